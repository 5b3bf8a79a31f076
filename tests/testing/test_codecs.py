"""The codec suites pass what is right and catch what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.testing.codec_mutants import (
    MUTANTS,
    REFERENCES,
    Deflate,
    Mutant,
    Plain,
    failing_checks,
)
from tierkv.testing.codecs import BytesCodecTests, TensorBytesCodecTests
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


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


class ScalesItsEncoding(Plain):
    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        super().decode(data, tensor, into)
        over(data, "uint8", (min(4, len(data)),)).bitwise_not_()


class ClearsItsEncoding(Deflate):
    def decode(self, data: memoryview, out: memoryview) -> None:
        super().decode(data, out)
        over(data, "uint8", (len(data),)).zero_()


@pytest.mark.parametrize(
    ("make", "suite"),
    [(ScalesItsEncoding, TensorBytesCodecTests), (ClearsItsEncoding, BytesCodecTests)],
)
def test_decoding_must_leave_an_encoding_as_it_is(
    make: Callable[[], Any], suite: type[Any]
) -> None:
    failed = failing_checks(suite, make, "test_round_trip")
    assert failed["test_round_trip"].startswith("AssertionError: decode changed the encoding")
