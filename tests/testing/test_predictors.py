"""The predictor suite passes what is right and catches what is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tierkv.decisions.predict.arrival import AtArrival
from tierkv.decisions.predict.chain import MostRecentChild
from tierkv.decisions.predict.oracle import Oracle
from tierkv.decisions.predict.return_time import ReturnTime
from tierkv.decisions.predict.sequential import ReadAhead
from tierkv.testing.predictor_mutants import MUTANTS, Mutant, failing_checks
from tierkv.testing.predictors import PredictorTests, future


class TestAtArrival(PredictorTests):
    def make(self, *, small: bool = False) -> AtArrival:
        return AtArrival()


class TestMostRecentChild(PredictorTests):
    def make(self, *, small: bool = False) -> MostRecentChild:
        return MostRecentChild(memory=512) if small else MostRecentChild()


class TestReadAhead(PredictorTests):
    def make(self, *, small: bool = False) -> ReadAhead:
        return ReadAhead(readers=512, memory=512) if small else ReadAhead()


class TestReturnTime(PredictorTests):
    def make(self, *, small: bool = False) -> ReturnTime:
        return ReturnTime(sessions=512, memory=512) if small else ReturnTime()


class TestBlindTimer(PredictorTests):
    def make(self, *, small: bool = False) -> ReturnTime:
        return ReturnTime(chance=0, sessions=512) if small else ReturnTime(chance=0)


class TestOracle(PredictorTests):
    def make(self, *, small: bool = False) -> Oracle:
        return Oracle(future())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.make.__name__)
def test_mutants_are_caught(mutant: Mutant) -> None:
    failed = failing_checks(mutant.make, mutant.check)
    assert mutant.check in failed, f"{mutant.check} let it pass"
    assert failed[mutant.check].startswith("AssertionError")


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    assert set(aimed) == {name for name in dir(PredictorTests) if name.startswith("test_")}
