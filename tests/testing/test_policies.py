"""The policy suite passes what is right and catches what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tierkv.decisions.policy.adaptive import Adaptive
from tierkv.decisions.policy.arc import Arc
from tierkv.decisions.policy.fifo import Fifo
from tierkv.decisions.policy.importance import Importance
from tierkv.decisions.policy.lfu import Lfu, LfuDecay
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.policy.lru2 import Lru2
from tierkv.decisions.policy.s3fifo import S3Fifo
from tierkv.decisions.policy.size_aware import Gdsf, SizeAware
from tierkv.testing.policies import PolicyTests
from tierkv.testing.policy_mutants import MUTANTS, Mutant, failing_checks

if TYPE_CHECKING:
    from tierkv.abc import Policy


class TestLru(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Lru()


class TestLrfu(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Lrfu()


class TestLrfuOfTinyTier(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        policy = Lrfu()
        policy.resize(2.5)
        return policy


class TestFifo(PolicyTests):
    def make(self) -> Policy:
        return Fifo()


class TestLfu(PolicyTests):
    def make(self) -> Policy:
        return Lfu()


class TestLfuDecay(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return LfuDecay()


class TestLru2(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Lru2()


class TestArc(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Arc()


class TestArcOfKnownSize(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        policy = Arc()
        policy.resize(10.0)
        return policy


class TestS3Fifo(PolicyTests):
    def make(self) -> Policy:
        return S3Fifo()


class TestSizeAware(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return SizeAware()


class TestGdsf(PolicyTests):
    follows_scores = True

    def make(self) -> Policy:
        return Gdsf()


class TestImportance(PolicyTests):
    follows_shifts = True
    follows_scores = True

    def make(self) -> Policy:
        return Importance()


class TestAdaptive(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Adaptive()


class TestAdaptiveThatFollowsArc(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Adaptive((Arc, Lru))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.make.__name__)
def test_mutants_are_caught(mutant: Mutant) -> None:
    failed = failing_checks(mutant.make, mutant.check)
    assert mutant.check in failed, f"{mutant.check} let it pass"
    assert failed[mutant.check].startswith("AssertionError")


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    assert set(aimed) == {name for name in dir(PolicyTests) if name.startswith("test_")}
