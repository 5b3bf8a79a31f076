"""The suite of devices passes what is right and catches what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tierkv.testing.device_mutants import MUTANTS, DeviceMutant, SimTests, failing_checks

SEEDS = 50
ONE_LOOP = ["asyncio"]  # seeds differ by threads, not by loops


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ONE_LOOP, indirect=True)
@pytest.mark.parametrize(
    "tens", [0, 1, *(pytest.param(n, marks=pytest.mark.stress) for n in range(2, SEEDS // 10))]
)
async def test_the_honest_simulation_passes_every_seed(tens: int, no_thread_leaks: None) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        assert await failing_checks(SimTests(seed=seed)) == {}, seed


@pytest.mark.anyio
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.wrong.__name__)
async def test_mutants_are_caught(mutant: DeviceMutant) -> None:
    for seed in range(SEEDS):
        if await failing_checks(mutant.suite(seed), mutant.check):
            return
    pytest.fail(f"{mutant.check} let it pass with {SEEDS} seeds")


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    assert {name for name in dir(SimTests) if name.startswith("test_")} == set(aimed)
