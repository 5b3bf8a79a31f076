"""Which announced loads and saves a worker still owes an answer: pure bookkeeping.

The runtime announces a request once, when its load began and when it ended with saves under way,
and wants its id back exactly once, when no copy is at its pages any more. A load that fell short is
tried again, since other tiers may have other copies; one that cannot be completed is never
reported, because to report it is to serve whatever lies in those pages. Only when the runtime has
given the request up is it let go.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv_adapters.serving.jobs import Ended
    from tierkv_adapters.serving.orders import LoadOrder, StepOrders

__all__ = ["Transfers", "WorkerCounters"]

_TRIES: Final = 3


@dataclass(slots=True)
class WorkerCounters:
    """Plain counts, beside the rank's.

    Attributes:
        loads_retried: Loads that fell short and were ordered again.
        loads_stuck: Loads that could not be completed: their requests wait until they are
            cancelled, since this runtime cannot be told that a load failed.
        loads_dropped: Loads announced and then taken back by the runtime.
    """

    loads_retried: int = 0
    loads_stuck: int = 0
    loads_dropped: int = 0


class Transfers:
    """See the module. In the worker's thread only.

    Args:
        complain: Told in words of a load that cannot be completed.
    """

    def __init__(self, complain: Callable[[str], None]) -> None:
        self.counters = WorkerCounters()
        self._complain = complain
        self._saving: dict[int, None] = {}  # announced, in order
        self._loading: dict[int, None] = {}
        self._orders: dict[int, LoadOrder] = {}  # the last load ordered
        self._running: Counter[int] = Counter()  # loads of a request that have not ended
        self._over: set[int] = set()  # loads that may be reported
        self._tries: Counter[int] = Counter()
        self._stuck: set[int] = set()
        self._given_up: set[int] = set()

    def __repr__(self) -> str:
        return f"<Transfers: {len(self._loading)} loads, {len(self._saving)} saves owed>"

    def ordered(self, orders: StepOrders, dropped: Iterable[int]) -> None:
        """Take note of a step's loads, of those that will not take place, and of ended requests."""
        for name in orders.ended:
            self._ended(int(name))
        for order in orders.loads:
            number = int(order.id)
            self._orders[number] = order
            self._running[number] += 1
            self._tries[number] = 0
            self._over.discard(number)
            self._stuck.discard(number)
            self._given_up.discard(number)
        for number in dropped:
            self.counters.loads_dropped += 1
            if not self._running[number]:
                self._over.add(number)
            self._given_up.add(number)

    def _ended(self, number: int) -> None:
        """The request is over: nothing reads what its load brings, or does not bring."""
        if number in self._stuck or self._running[number] or number in self._loading:
            self._given_up.add(number)
            if not self._running[number]:
                self._over.add(number)
        else:
            self._forget(number)

    def announced(self, finished: Iterable[int], started: Iterable[int]) -> None:
        """Take in what ``get_finished`` was given."""
        self._saving.update(dict.fromkeys(finished))
        self._loading.update(dict.fromkeys(started))

    def ended(self, ended: Iterable[Ended]) -> list[LoadOrder]:
        """Take in what ended on the rank.

        Returns:
            Loads to order again: they fell short.
        """
        again = []
        for one in ended:
            number = int(one.id)
            if one.kind == "save" or not self._running[number]:
                continue
            self._running[number] -= 1
            order = self._orders.get(number)
            if self._running[number] or order is None:
                continue  # an older one: the last one ordered decides
            if one.tokens >= order.stop or number in self._given_up:
                self._over.add(number)
            elif self._tries[number] < _TRIES:
                self._tries[number] += 1
                self.counters.loads_retried += 1
                self._running[number] += 1
                again.append(order._replace(start=max(order.start, one.tokens)))
            else:
                self._stuck.add(number)
                self.counters.loads_stuck += 1
                self._complain(
                    f"request {number}: tokens {one.tokens} to {order.stop} were held and could "
                    f"not be copied ({one.reason}); it waits until it is cancelled, as "
                    "TensorRT-LLM cannot be told that a load failed"
                )
        return again

    def finished(self, saving: Callable[[int], bool]) -> tuple[list[int], list[int]]:
        """Ids to report: saves and loads that are over. Each is reported once.

        Args:
            saving: Whether the rank still has saves of a request under way.
        """
        loads = [number for number in self._loading if number in self._over]
        for number in loads:
            del self._loading[number]
            self._forget(number)
        saves = [
            number for number in self._saving if not saving(number) and not self._running[number]
        ]
        for number in saves:
            del self._saving[number]
            if number not in self._loading:
                self._forget(number)
        return saves, loads

    def _forget(self, number: int) -> None:
        self._orders.pop(number, None)
        self._over.discard(number)
        self._stuck.discard(number)
        self._given_up.discard(number)
        if not self._running[number]:
            del self._running[number]
        del self._tries[number]

    def stuck(self) -> Sequence[int]:
        """Requests whose load cannot be completed."""
        return sorted(self._stuck)
