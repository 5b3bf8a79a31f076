"""Which announced loads and saves a worker still owes an answer: pure bookkeeping.

The runtime announces a request once, when its load began and when it ended with saves under way,
and wants its id back exactly once, when no copy is at its pages any more. A load that fell short is
tried again, since other tiers may have other copies, and goes on being tried: somebody else may
compute and store the block, or a tier come back. One that cannot be completed is never reported,
because to report it is to serve whatever lies in those pages; it is *lost* once that has lasted.
Only when the runtime has given the request up is it let go.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.decisions.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv_adapters.serving.jobs import Ended
    from tierkv_adapters.serving.orders import LoadOrder, StepOrders

__all__ = ["Transfers", "WorkerCounters"]

_TRIES: Final = 3  # at once; then again from time to time
_AGAIN_S: Final = 1.0
_ADVICE: Final = {
    MissReason.DAMAGED.value: ". Look for memory errors of this machine; a tier on disk behind "
    "'host' is a second copy",
    MissReason.REMOVED.value: ". A rank's engine was reset or told to forget them: do so only "
    "while no request waits",
}


@dataclass(slots=True)
class WorkerCounters:
    """Plain counts, beside the rank's.

    Attributes:
        loads_retried: Times that a load which fell short was ordered again.
        loads_stuck: Loads that fell short in all of their first tries.
        loads_mended: Of those, the ones that were completed after all.
        loads_dropped: Loads announced and then taken back by the runtime.
    """

    loads_retried: int = 0
    loads_stuck: int = 0
    loads_mended: int = 0
    loads_dropped: int = 0


class _Stuck(NamedTuple):
    order: LoadOrder  # the rest of it
    next: float  # when it is tried again
    why: str


class Transfers:
    """See the module. In the worker's thread only; ``now`` is any clock's, in seconds.

    Args:
        complain: Told in words of a load that fell short for good, as it seems.
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
        self._stuck: dict[int, _Stuck] = {}
        self._since: dict[int, float] = {}  # when those loads came to rest that are not over
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
            self._moves(number)
            self._given_up.discard(number)
        for number in dropped:
            self.counters.loads_dropped += 1
            if not self._running[number]:
                self._done(number)
            self._given_up.add(number)

    def _ended(self, number: int) -> None:
        """The request is over: nothing reads what its load brings, or does not bring."""
        if number in self._stuck or self._running[number] or number in self._loading:
            self._given_up.add(number)
            if not self._running[number]:
                self._done(number)
        else:
            self._forget(number)

    def announced(self, finished: Iterable[int], started: Iterable[int], now: float) -> None:
        """Take in what ``get_finished`` was given."""
        self._saving.update(dict.fromkeys(finished))
        for number in started:
            self._loading[number] = None
            if not self._running[number] and number not in self._over:
                self._since.setdefault(number, now)  # nobody ordered it, or it is stuck already

    def ended(self, ended: Iterable[Ended], now: float) -> list[LoadOrder]:
        """Take in what ended on the rank.

        Returns:
            Loads to order again: they fell short, now or a while ago.
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
            rest = order._replace(start=max(order.start, one.tokens))
            if one.tokens >= order.stop or number in self._given_up:
                self.counters.loads_mended += number in self._stuck and one.tokens >= order.stop
                self._done(number)
            elif self._tries[number] < _TRIES:
                self._tries[number] += 1
                again.append(rest)
            else:
                self._rests(number, _Stuck(rest, now + _AGAIN_S, str(one.reason)), now)
        again += [
            one.order
            for number, one in self._stuck.items()
            if one.next <= now and not self._running[number]
        ]
        for order in again:
            self.counters.loads_retried += 1
            self._running[int(order.id)] += 1
        return again

    def _rests(self, number: int, stuck: _Stuck, now: float) -> None:
        if number not in self._stuck:
            self.counters.loads_stuck += 1
            start, stop = stuck.order.start, stuck.order.stop
            self._complain(
                f"request {number}: tokens {start} to {stop} were held, and could not be copied "
                f"({stuck.why}); TensorRT-LLM cannot be told that a load failed: it is tried again"
            )
        self._stuck[number] = stuck
        self._since.setdefault(number, now)

    def _moves(self, number: int) -> None:
        self._stuck.pop(number, None)
        self._since.pop(number, None)

    def _done(self, number: int) -> None:
        self._over.add(number)
        self._moves(number)

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
        self._moves(number)
        self._given_up.discard(number)
        if not self._running[number]:
            del self._running[number]
        del self._tries[number]

    def stuck(self) -> Sequence[int]:
        """Requests whose load fell short in all of its tries so far."""
        return sorted(self._stuck)

    def lost(self, now: float, after: float | None) -> str | None:
        """What was announced and has had no hope for so many seconds, in words; None: nothing is.

        Args:
            now: The time.
            after: How long; None: there is always hope.
        """
        if after is None:
            return None
        for number, since in self._since.items():
            if number not in self._loading or self._running[number] or now - since < after:
                continue  # while a try is under way there is hope
            stuck = self._stuck.get(number)
            if stuck is None:
                return f"request {number} waits for a load that no step has ordered"
            start, stop = stuck.order.start, stuck.order.stop
            return (
                f"tokens {start} to {stop} of request {number} are lost ({stuck.why}): they were "
                "verified and held in memory when they were offered, and no tier has another copy"
                + _ADVICE.get(stuck.why, "")
            )
        return None
