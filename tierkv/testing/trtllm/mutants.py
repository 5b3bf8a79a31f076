"""Connectors that are wrong, each in one way: the suite must tell.

Every mutant names the check that is there for it, and the rule that the check finds broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tierkv.testing.trtllm.mutant import Mutant
from tierkv.testing.trtllm.scheduler_mutants import SCHEDULERS
from tierkv.testing.trtllm.suite import ConnectorTests
from tierkv.testing.trtllm.violations import Violation
from tierkv.testing.trtllm.worker_mutants import WORKERS

if TYPE_CHECKING:
    from tierkv.testing.trtllm.connector import Connector

__all__ = ["MUTANTS", "Failure", "Mutant", "failing_checks"]

MUTANTS: list[Mutant] = [*SCHEDULERS, *WORKERS]
"""All of them; each is caught by another check."""


class Failure(NamedTuple):
    """How a check failed: the rule that was broken, if one was, and the words."""

    rule: str | None
    text: str


def failing_checks(mutant: Mutant, only: str = "test_") -> dict[str, Failure]:
    """Run the checks whose names begin with ``only`` on a mutant; those that fail, and how."""

    class Case(ConnectorTests):
        patience: ClassVar[int] = 100
        pause: ClassVar[float] = 0.0
        tries: ClassVar[int] = 20

        def make(self) -> Connector:
            return mutant.make()

    case, failed = Case(), {}
    for name in sorted(name for name in dir(case) if name.startswith(only)):
        try:
            getattr(case, name)()
        except Violation as error:
            failed[name] = Failure(error.rule, str(error))
        except AssertionError as error:
            failed[name] = Failure(None, str(error))
    return failed
