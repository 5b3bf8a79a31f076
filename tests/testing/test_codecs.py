"""The codec suites pass what is right and catch what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.testing.codec_mutants import MUTANTS, REFERENCES, Mutant, failing_checks
from tierkv.testing.codecs import BytesCodecTests, TensorBytesCodecTests

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(("make", "suite"), REFERENCES)
def test_references_pass(make: Callable[[], Any], suite: type[Any]) -> None:
    assert failing_checks(suite, make) == {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.make.__name__)
def test_mutants_are_caught(mutant: Mutant) -> None:
    failed = failing_checks(mutant.suite, mutant.make, mutant.check)
    assert mutant.check in failed, f"{mutant.check} let it pass"
    assert failed[mutant.check].startswith(("AssertionError", "error: "))


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter((mutant.suite, mutant.check) for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    for suite in (TensorBytesCodecTests, BytesCodecTests):
        checks = {name for name in dir(suite) if name.startswith("test_")}
        without = checks - {check for kind, check in aimed if kind is suite}
        # the frozen-value check is inherited unchanged: one mutant shows it
        assert without <= {"test_is_a_frozen_value"}
