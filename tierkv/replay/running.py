"""The replay itself: requests arrive, wait for the server, are looked up, loaded and stored."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from tierkv.blocks import KEY_BYTES, BlockKey
from tierkv.decisions.core import Decisions
from tierkv.decisions.types import GroupRule, Query, TierLimits
from tierkv.layout import GroupKind
from tierkv.registry import factory
from tierkv.replay.counts import Counts
from tierkv.replay.links import Link
from tierkv.replay.moves import Moves, chain_items, key_of
from tierkv.replay.wishes import Wishes, make_prefetching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.types import Found, FoundPart
    from tierkv.replay.report import Report
    from tierkv.replay.setup import Setup
    from tierkv.traces import Trace, TraceRequest

__all__ = ["DURABLE", "replay"]

DURABLE: Final = ("nvme", "file")
"""Names of tiers whose writes wear a medium out."""

_RULES: Final = (GroupRule(GroupKind.FULL),)
_NEVER: Final = float("inf")


def replay(trace: Trace, setup: Setup) -> Report:
    """Run a trace through the decisions of an engine.

    A request is looked up when the server takes it and stored when its prefill is done; see
    :class:`~tierkv.replay.setup.CostModel` for what takes how long. Memory grows with the
    different blocks of the trace.

    Args:
        trace: What is asked for; iterated once (twice for a predictor that knows the future).
        setup: The engine.

    Returns:
        Hits, bytes, and times. All but ``cpu_s`` are the same whenever it runs.

    Raises:
        ConfigError: if the setup names what there is not.
        TraceError: if the trace is damaged.
    """
    begin = time.process_time()
    run = _Run(trace, setup)
    run.go()
    return run.report(time.process_time() - begin)


def _keys(ids: Sequence[int]) -> tuple[BlockKey, ...]:
    keys: list[BlockKey] = [number.to_bytes(KEY_BYTES, "little") for number in ids]  # type: ignore[misc]
    return tuple(keys)


class _Serving:
    """The request that the server computes, until ``end``."""

    __slots__ = ("end", "found", "landing", "request")

    def __init__(self, request: TraceRequest, found: Found) -> None:
        self.request = request
        self.found = found
        self.end = 0.0
        self.landing: list[tuple[int, list[int], int]] = []


class _Run:
    """One replay under way."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        header = trace.header
        self._trace, self._setup, self._model = trace, setup, setup.model
        self._block_tokens, self._per_token = header.block_tokens, header.bytes_per_token
        self._block_bytes = header.block_tokens * header.bytes_per_token
        capacities = setup.capacities(self._block_bytes)
        self._many = len(capacities) > 1
        self._decisions = self._make_decisions(capacities)
        self._moves = Moves(self._decisions, len(capacities), write_through=setup.write_through)
        self._counts = Counts(len(capacities))
        self._wishes: Wishes | None = None
        self._prefetching = make_prefetching(setup, trace)
        if self._prefetching is not None:
            self._wishes = Wishes(self._prefetching, self._moves, self._whole)
            self._moves.on_drop = self._prefetching.dropped
        self._links = [self._link(tier) for tier in range(len(capacities))]
        if self._wishes is not None:
            self._wishes.links = self._links
        self._queue: deque[TraceRequest] = deque()
        self._serving: _Serving | None = None
        self._free = self._ticked = 0.0
        self._watch = setup.high < 1  # whether time alone changes anything

    def _make_decisions(self, capacities: Sequence[int]) -> Decisions:
        setup = self._setup
        tiers = [
            TierLimits(name, size, high=setup.high, low=setup.low, durable=name in DURABLE)
            for name, size in zip(setup.tier_names(), capacities, strict=True)
        ]
        return Decisions(
            tiers,
            policy=[factory("policies", name) for name in setup.each(setup.policy)],
            admission=[factory("admissions", name) for name in setup.each(setup.admission)],
            touch_order=setup.touch_order,
            history=0,  # why a part is gone decides nothing, and nobody asks here
        )

    def _link(self, tier: int) -> Link:
        wishes, rate = self._wishes, self._model.rate(tier)
        if wishes is None:
            return Link(rate, lambda flight, now: False, lambda flight, now: None)
        return Link(rate, wishes.begin, wishes.land)

    def _whole(self, keys: Sequence[BlockKey]) -> Query:
        """A lookup of full blocks."""
        return Query(tuple(keys), _RULES, self._block_tokens, len(keys) * self._block_tokens)

    # ------------------------------------------------------------------ time

    def go(self) -> None:
        """Replay the whole trace."""
        for request in self._trace:
            self._until(request.time)
            if self._wishes is not None:
                self._let_pass(request.time)
                self._wishes.arrived(request, _keys(request.keys), request.time)
            self._queue.append(request)
        self._until(_NEVER)

    def _until(self, now: float) -> None:
        """Let happen in order what happens by ``now``; at the end, until all are served."""
        wishes = self._wishes
        while True:
            if self._serving is not None:
                when = self._serving.end
            elif self._queue:
                when = max(self._queue[0].time, self._free)
            elif now == _NEVER:
                return
            else:
                when = _NEVER
            wish = wishes.next_due() if wishes is not None else _NEVER
            if min(when, wish) > now:
                return
            if wishes is not None and wish < when:
                self._let_pass(wish)
                wishes.due(wish)
            elif self._serving is not None:
                self._finish(self._serving)
            else:
                self._begin(self._queue.popleft(), when)

    def _let_pass(self, now: float) -> None:
        """Let background work happen that is due by ``now``."""
        if self._watch and now >= self._ticked + self._setup.tick:
            self._ticked = now
            self._moves.tick(now)
        if self._wishes is not None:
            for link in self._links:
                link.let_pass(now)

    # ------------------------------------------------------------------ one request

    def _begin(self, request: TraceRequest, start: float) -> None:
        """Look a request up, and begin to load what is worth nothing but waiting for."""
        self._let_pass(start)
        model, size = self._model, request.block_tokens
        query = Query(_keys(request.keys), _RULES, size, request.tokens)
        found = self._decisions.lookup(query, start)
        self._serving = serving = _Serving(request, found)
        hit = self._counts.looked_up(request, found, many=self._many)
        loaded = start
        if self._many:
            if self._wishes is not None:
                self._wishes.demand(found.parts, start)
            cold = [part for part in found.parts if part.tier]
            if cold:
                loaded = self._load(serving, cold, start)
        compute = (request.tokens - hit + model.first_token) / model.prefill
        end, stall = start + compute, 0.0
        if loaded > start:
            late = loaded + (compute / model.layers if model.overlap else compute)
            end, stall = max(end, late), max(late - end, 0.0)
        serving.end = end
        self._counts.served(wait=end - request.time, stall=stall)

    def _load(self, serving: _Serving, cold: Sequence[FoundPart], now: float) -> float:
        """Bring what is in slower tiers; when the last of it is there."""
        self._counts.demand += len(cold)
        by_tier: dict[int, list[FoundPart]] = {}
        last = now
        for part in cold:
            link = self._links[part.tier]
            if link.carries(part.part):
                last = max(last, link.free)
                continue
            if self._wishes is not None and link.waits(part.part):
                self._wishes.withdraw(part, now)
            by_tier.setdefault(part.tier, []).append(part)
        for tier, parts in by_tier.items():
            reservation, room = self._moves.bring(tier, parts, now)
            if room:
                kept = sum(parts[i].nbytes for i in room)
                serving.landing.append((reservation, room, kept))
            last = max(last, self._links[tier].carry(sum(p.nbytes for p in parts), now))
        return last

    def _finish(self, serving: _Serving) -> None:
        """End a turn: what was loaded is kept where there is room, what is new is stored."""
        now = self._free = serving.end
        self._serving = None
        self._let_pass(now)
        request = serving.request
        for reservation, items, nbytes in serving.landing:
            self._moves.arrived(reservation, items, nbytes, now)
        chain = request.keys + request.reply_keys
        start = serving.found.blocks
        if start < len(chain):
            wanted = chain_items(chain, start, request.block_tokens * self._per_token)
            there = self._moves.store(wanted, request.tenant, now)
            whole = len(there) == len(wanted)
            self._counts.stored(chain[start:] if whole else [key_of(item.part) for item in there])
        self._moves.free(self._decisions.release(serving.found.lease, now), now)
        told = request.stop_reason is not None or request.next_in is not None
        if (self._setup.hints and told) or self._wishes is not None:
            keys = _keys(chain)
            if self._setup.hints and told:
                self._watch = True  # hints expire
                self._decisions.hint(
                    keys, 1, now, stop_reason=request.stop_reason, next_in=request.next_in
                )
            if self._wishes is not None:
                self._wishes.ended(request, keys, now)

    # ------------------------------------------------------------------ results

    def report(self, cpu_s: float) -> Report:
        """What came of it."""
        return self._counts.report(
            self._setup,
            self._block_bytes,
            self._moves,
            read=[link.moved for link in self._links],
            prefetch=self._wishes.figures(self._free) if self._wishes is not None else {},
            durable=DURABLE,
            cpu_s=cpu_s,
        )
