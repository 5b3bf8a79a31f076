"""Index, ledger, each registered policy and each admission against the mirror: K*, C2, I8, M1."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.decisions.mirror import TIERS, Mirror, wander
from tierkv import registry
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.ruling import Rule, Ruled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import Admission

POLICIES: Final = registry.names("policies")
ADMISSIONS: Final = ("second_use", "second_use:when_full", "tinylfu", "write_budget:2000B")
RULES: Final[dict[str, list[Rule]]] = {
    "parts, then sessions": [Rule(Lru), Rule(Lru, sessions=True, target=2)],
    "sessions": [Rule(Lru, sessions=True)],
}
STEPS: Final = int(1_000_000 * float(os.environ.get("TIERKV_SCALE", "0.05")))


def of_policy(name: str) -> Callable[[], Mirror]:
    return partial(Mirror, registry.factory("policies", name))


def of_admission(name: str) -> Callable[[], Mirror]:
    gate: Callable[[], Admission] = registry.factory("admissions", name)
    return partial(Mirror, Lru, gate)


class Machine(RuleBasedStateMachine):
    """Every call, with every kind of ending, in any order."""

    make: Callable[[], Mirror]

    def __init__(self) -> None:
        super().__init__()
        self.mirror = type(self).make()

    paths = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    tiers = st.integers(0, len(TIERS) - 1)
    picks = st.integers(0, 10**6)

    @rule(path=paths, tier=tiers, nbytes=st.integers(1, 160))
    def store(self, path: list[int], tier: int, nbytes: int) -> None:
        self.mirror.store(path, tier, nbytes)

    @rule(path=paths, tier=tiers, nbytes=st.integers(5, 20))
    def store_small(self, path: list[int], tier: int, nbytes: int) -> None:
        self.mirror.store(path, tier, nbytes)

    @rule(path=paths, source=tiers, tier=tiers, demand=st.booleans(), ahead=st.booleans())
    def copy(self, path: list[int], source: int, tier: int, demand: bool, ahead: bool) -> None:
        self.mirror.copy(path, source, tier, demand=demand, ahead=ahead)

    @rule(pick=picks, saved=st.integers(0, 4), fail=st.booleans())
    def settle(self, pick: int, saved: int, fail: bool) -> None:
        self.mirror.settle(pick, saved, fail=fail)

    @rule(path=paths, keep=st.booleans())
    def look(self, path: list[int], keep: bool) -> None:
        self.mirror.look(path, keep=keep)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.mirror.release(pick)

    @rule(tier=tiers, nbytes=st.integers(1, 150))
    def make_room(self, tier: int, nbytes: int) -> None:
        self.mirror.make_room(tier, nbytes)

    @rule(seconds=st.floats(0, 5))
    def tick(self, seconds: float) -> None:
        self.mirror.tick(seconds)

    @rule(pick=picks, cancel=st.booleans())
    def demote(self, pick: int, cancel: bool) -> None:
        self.mirror.demote(pick, cancel=cancel)

    @rule(tier=tiers, share=picks)
    def resize(self, tier: int, share: int) -> None:
        self.mirror.resize(tier, share)

    @rule(pick=picks, forget=st.booleans())
    def lose(self, pick: int, forget: bool) -> None:
        self.mirror.lose(pick, forget=forget)

    @rule(path=paths, pick=picks)
    def tell(self, path: list[int], pick: int) -> None:
        self.mirror.tell(path, pick)

    @rule(tier=tiers, works=st.booleans())
    def fault(self, tier: int, works: bool) -> None:
        self.mirror.fault(tier, works=works)

    def teardown(self) -> None:
        self.mirror.rest()


def run_machine(make: Callable[[], Mirror]) -> None:
    class Mine(Machine):
        pass

    Mine.make = staticmethod(make)
    run_state_machine_as_test(
        Mine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None)
    )


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_breaks_no_invariant(name: str) -> None:
    run_machine(of_policy(name))


@pytest.mark.parametrize("name", ADMISSIONS)
def test_each_admission_breaks_no_invariant(name: str) -> None:
    run_machine(of_admission(name))


@pytest.mark.parametrize("name", RULES)
def test_rules_break_no_invariant(name: str) -> None:
    run_machine(mirror_of_rules(name))


def mirror_of_rules(name: str) -> Callable[[], Mirror]:
    return partial(Mirror, partial(Ruled, RULES[name]), plain=False)


def walk(make: Callable[[], Mirror], steps: int, seed: int) -> None:
    """One long random life; what is logged of it is replayed by the shorter ones."""
    mirror = make()
    mirror.core.attach(None)
    mirror.logged, mirror.thorough = False, 20
    order = random.Random(seed)
    for _ in range(steps):
        wander(mirror, order)
    mirror.rest()


@pytest.mark.stress
@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_breaks_no_invariant_for_long(name: str) -> None:
    walk(of_policy(name), STEPS // len(POLICIES), 1)


@pytest.mark.stress
@pytest.mark.parametrize("name", ADMISSIONS)
def test_each_admission_breaks_no_invariant_for_long(name: str) -> None:
    walk(of_admission(name), STEPS // 10, 2)


@pytest.mark.stress
@pytest.mark.parametrize("name", RULES)
def test_rules_break_no_invariant_for_long(name: str) -> None:
    walk(mirror_of_rules(name), STEPS // 10, 3)
