"""Prefetch, offline: plans of the predictors are looked up and carried, as the engine does it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from tierkv.abc import Arrival, Departure
from tierkv.decisions.predict import make_predictors
from tierkv.decisions.prefetching import Prefetching
from tierkv.registry import resolve
from tierkv.replay.links import Flight
from tierkv.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.prefetching import Plan
    from tierkv.decisions.types import FoundPart, Query
    from tierkv.replay.links import Link
    from tierkv.replay.moves import Moves
    from tierkv.replay.setup import Setup
    from tierkv.traces import Trace, TraceRequest

__all__ = ["Wishes", "make_prefetching", "session_number"]


def session_number(request: TraceRequest) -> int:
    """64 bits that name a request's session; 0 if it has none."""
    if not request.session:
        return 0
    name = f"{request.tenant}\0{request.session}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def make_prefetching(setup: Setup, trace: Trace) -> Prefetching | None:
    """The predictors of a setup; None if it has none.

    Raises:
        ConfigError: if a predictor is unknown or cannot be honoured.
    """
    if not setup.prefetch:
        return None
    find = partial(resolve, "predictors")
    names = [item.partition(":")[0].strip() for item in setup.prefetch.split(",")]
    future = None
    if any(find(name).offline for name in names):
        future = [(request.time, session_number(request)) for request in trace]
    made = make_predictors(setup.prefetch, find, future)
    budget = None if setup.prefetch_budget is None else float(parse_bytes(setup.prefetch_budget))
    return Prefetching(made, budget=budget, floor=setup.prefetch_floor)


class _Open:
    """A plan under way: its lease, and how many parts of it are still to come."""

    __slots__ = ("lease", "left", "plan")

    def __init__(self, plan: Plan, lease: int, left: int) -> None:
        self.plan = plan
        self.lease = lease
        self.left = left


class Wishes:
    """Feeds a :class:`Prefetching`, and carries out what it wishes for."""

    def __init__(
        self,
        prefetching: Prefetching,
        moves: Moves,
        query: Callable[[Sequence[BlockKey]], Query],
    ) -> None:
        self.links: Sequence[Link] = ()
        self._prefetching = prefetching
        self._moves = moves
        self._query = query
        self._open: dict[int, _Open] = {}
        self._last_due = -1.0

    # ------------------------------------------------------------------ events

    def arrived(self, request: TraceRequest, keys: tuple[BlockKey, ...], now: float) -> None:
        """A request came in."""
        event = Arrival(session_number(request), keys)
        self._perform(self._prefetching.arrived(event, now), now)

    def ended(self, request: TraceRequest, keys: tuple[BlockKey, ...], now: float) -> None:
        """Its turn is over, and its blocks are stored."""
        session = session_number(request)
        event = Departure(session, keys, request.stop_reason, request.next_in)
        self._perform(self._prefetching.ended(event, now), now)

    def next_due(self) -> float:
        """When time itself brings a wish; infinite if it does not."""
        when = self._prefetching.next_due()
        # who is not content with having been asked is asked again later, with the next event
        return float("inf") if when is None or when <= self._last_due else when

    def due(self, now: float) -> None:
        """Time passed."""
        self._last_due = max(now, self._last_due)
        self._perform(self._prefetching.due(now), now)

    def demand(self, parts: Iterable[FoundPart], now: float) -> None:
        """A request loads these parts."""
        self._prefetching.demand(((p.part, p.tier) for p in parts), now)

    # ------------------------------------------------------------------ plans

    def _perform(self, plans: Iterable[Plan], now: float) -> None:
        for plan in plans:
            found = self._moves.decisions.lookup(self._query_of(plan), now)
            cold = [
                p
                for p in found.parts
                if p.tier
                and not self.links[p.tier].waits(p.part)
                and not self.links[p.tier].carries(p.part)
            ]
            self._open[plan.id] = _Open(plan, found.lease, len(cold))
            for part in cold:
                self.links[part.tier].send(Flight(part, plan.id, now))
            if not cold:
                self._over(plan.id, now)

    def _query_of(self, plan: Plan) -> Query:
        query = self._query(plan.keys)
        return replace(query, ttl=0.0, touch=plan.asked, ahead=True)

    def begin(self, flight: Flight, now: float) -> bool:
        """Ask whether a part may be brought, and make room for it."""
        prefetching, found = self._prefetching, flight.found
        plan = self._open[flight.plan].plan
        if prefetching.grant(plan, [(found.part, found.tier, found.nbytes)], now):
            flight.reservation, room = self._moves.bring(found.tier, [found], now, ahead=True)
            if room:
                return True
            prefetching.refused([found.part], now)
        self._less(flight.plan, now)
        return False

    def land(self, flight: Flight, now: float) -> None:
        """A part has arrived."""
        self._moves.arrived(flight.reservation, [0], flight.found.nbytes, now)
        self._prefetching.landed([flight.found.part], now)
        self._less(flight.plan, now)

    def withdraw(self, part: FoundPart, now: float) -> None:
        """Somebody waits for a part whose flight has not begun, and carries it himself."""
        self._less(self.links[part.tier].withdraw(part.part).plan, now)

    def _less(self, plan: int, now: float) -> None:
        self._open[plan].left -= 1
        if not self._open[plan].left:
            self._over(plan, now)

    def _over(self, plan: int, now: float) -> None:
        over = self._open.pop(plan)
        self._moves.free(self._moves.decisions.release(over.lease, now), now)
        self._prefetching.finish(over.plan, now)

    # ------------------------------------------------------------------ results

    def figures(self, now: float) -> dict[str, dict[str, Any]]:
        """Counters of each predictor, by name."""
        return {
            f.name: {
                "issued": f.issued,
                "used": f.used,
                "late": f.late,
                "wasted": f.wasted,
                "refused": f.refused,
                "out": f.out,
                "nbytes": f.nbytes,
                "precision": f.precision,
                "enabled": f.enabled,
                "times_off": f.times_off,
                "broken": f.broken,
            }
            for f in self._prefetching.figures(now)
        }
