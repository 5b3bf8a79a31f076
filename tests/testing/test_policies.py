"""The policy suite passes what is right and catches what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.testing.policies import PolicyTests
from tierkv.testing.policy_mutants import MUTANTS, Mutant, failing_checks


class TestLru(PolicyTests):
    def make(self) -> Lru:
        return Lru()


class TestLrfu(PolicyTests):
    def make(self) -> Lrfu:
        return Lrfu()


class TestLrfuOfTinyTier(PolicyTests):
    def make(self) -> Lrfu:
        policy = Lrfu()
        policy.resize(2.5)
        return policy


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.make.__name__)
def test_mutants_are_caught(mutant: Mutant) -> None:
    failed = failing_checks(mutant.make, mutant.check)
    assert mutant.check in failed, f"{mutant.check} let it pass"
    assert failed[mutant.check].startswith("AssertionError")


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    assert set(aimed) == {name for name in dir(PolicyTests) if name.startswith("test_")}
