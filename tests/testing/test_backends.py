"""The backend suites pass what is right and catch what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.testing.backend_mutants import MUTANTS, REFERENCES, Mutant, failing_checks

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.testing.backend_references import DictBackend, SlabBackend


@pytest.mark.anyio
@pytest.mark.parametrize(("make", "suite"), REFERENCES)
async def test_references_pass(
    make: type[DictBackend] | type[SlabBackend], suite: type[Any], tmp_path: Path
) -> None:
    assert await failing_checks(suite, make, tmp_path) == {}


@pytest.mark.anyio
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.make.__name__)
async def test_mutants_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    failed = await failing_checks(mutant.suite, mutant.make, tmp_path, mutant.check)
    assert list(failed) == [mutant.check], "it was let pass"


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    for _, suite in REFERENCES:
        assert {name for name in dir(suite) if name.startswith("test_")} <= set(aimed)
