"""Our own admission passes the suite that we ship; wrong ones do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tierkv.decisions.admission.everything import Everything
from tierkv.decisions.admission.second_use import SecondUse
from tierkv.decisions.admission.tinylfu import TinyLfu
from tierkv.decisions.admission.write_budget import WriteBudget
from tierkv.testing.admission_mutants import MUTANTS, Mutant, failing_checks
from tierkv.testing.admissions import AdmissionTests

if TYPE_CHECKING:
    from tierkv.abc import Admission


class TestEverything(AdmissionTests):
    def make(self) -> Admission:
        return Everything()


class TestSecondUse(AdmissionTests):
    def make(self) -> Admission:
        return SecondUse()


class TestSecondUseWhenFull(AdmissionTests):
    def make(self) -> Admission:
        return SecondUse("when_full")


class TestTinyLfu(AdmissionTests):
    def make(self) -> Admission:
        return TinyLfu()


class TestWriteBudget(AdmissionTests):
    def make(self) -> Admission:
        return WriteBudget("4MiB")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.make.__name__ for mutant in MUTANTS])
def test_the_suite_catches_each_wrong_rule(mutant: Mutant) -> None:
    assert failing_checks(mutant.make, only=mutant.check)


def test_each_wrong_rule_has_a_check_of_its_own() -> None:
    checks = [mutant.check for mutant in MUTANTS]
    assert len(set(checks)) == len(checks)
    assert set(checks) == {name for name in dir(AdmissionTests) if name.startswith("test_")}
