"""The suite of TensorRT-LLM connectors passes what is right and catches what is wrong."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest

from tierkv.testing.trtllm.mutants import MUTANTS, Mutant, failing_checks
from tierkv.testing.trtllm.reference import reference
from tierkv.testing.trtllm.suite import ConnectorTests

if TYPE_CHECKING:
    from tierkv.testing.trtllm import Connector

SCALE = float(os.environ.get("TIERKV_SCALE", "1"))


class Quick(ConnectorTests):
    patience: ClassVar[int] = 100
    pause: ClassVar[float] = 0.0
    tries: ClassVar[int] = 20


class TestAsynchronousLoads(Quick):
    def make(self) -> Connector:
        return reference()


class TestSynchronousLoads(Quick):
    def make(self) -> Connector:
        return reference(asynchronous=False)


class TestSlowCopies(Quick):
    def make(self) -> Connector:
        return reference(lag=9)


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_random_schedules(asynchronous: bool) -> None:
    class Case(Quick):
        schedules: ClassVar[int] = max(4, int(200 * SCALE))

        def make(self) -> Connector:
            return reference(asynchronous=asynchronous)

    Case().test_random_schedules()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants_are_caught(mutant: Mutant) -> None:
    failed = failing_checks(mutant, mutant.check)

    assert mutant.check in failed, f"{mutant.check} let it pass"
    assert failed[mutant.check].rule == mutant.rule, failed[mutant.check].text


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    checks = {name for name in dir(ConnectorTests) if name.startswith("test_")}

    assert set(aimed) == checks
    assert max(aimed.values()) == 1
