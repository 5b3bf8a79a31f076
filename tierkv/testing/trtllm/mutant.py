"""What a wrong connector is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.testing.trtllm.reference import ReferenceScheduler, ReferenceWorker, reference

if TYPE_CHECKING:
    from tierkv.testing.trtllm.connector import Connector

__all__ = ["Mutant"]


class Mutant(NamedTuple):
    """A wrong connector, the check that must catch it, and what that says.

    Attributes:
        name: What it does wrong.
        side: The class that does it, of one of the two sides.
        check: The check that is there for it.
        rule: The rule it breaks; None: the check itself compares.
        asynchronous: Whether its loads are.
        lag: Polls that its copies take.
        worker: The ranks' side, where ``side`` is the scheduler's and is not all that is wrong.
    """

    name: str
    side: type[ReferenceScheduler] | type[ReferenceWorker]
    check: str
    rule: str | None
    asynchronous: bool = True
    lag: int = 2
    worker: type[ReferenceWorker] = ReferenceWorker

    def make(self) -> Connector:
        """A connector with this side, and another that is right."""
        how: dict[str, Any] = {"asynchronous": self.asynchronous, "lag": self.lag}
        if issubclass(self.side, ReferenceScheduler):
            return reference(scheduler=self.side, worker=self.worker, **how)
        return reference(worker=self.side, **how)
