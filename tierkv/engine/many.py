"""Batches of requests: one backend call per tier and window, one worker hop per batch."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from tierkv import views
from tierkv.mover.load import load
from tierkv.mover.store import store
from tierkv.session.match import Match, follow
from tierkv.session.saving import finish_store, plan_store
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tierkv.abc import View
    from tierkv.session import LoadResult, Session, StoreResult
    from tierkv.session.table import Runtime

__all__ = ["StoreRequest", "load_many", "match_many", "store_many"]


class StoreRequest(NamedTuple):
    """One store of a batch; see :meth:`tierkv.session.Session.store`."""

    session: Session
    token_ids: Sequence[int]
    kv: View
    start: int = 0


@asynccontextmanager
async def match_many(
    requests: Sequence[tuple[Session, Sequence[int]]],
) -> AsyncIterator[list[Match]]:
    """Open a match per request; all are left together.

    Each session may occur once: its turn is held until the matches are left. Sessions are
    entered in one order everywhere, so that two batches cannot wait for each other.
    """
    order = sorted(range(len(requests)), key=lambda i: (requests[i][0].tenant, requests[i][0].id))
    matches: list[Match | None] = [None] * len(requests)
    async with AsyncExitStack() as stack:
        for index in order:
            session, token_ids = requests[index]
            matches[index] = await stack.enter_async_context(session.match(token_ids))
        yield [m for m in matches if m is not None]


async def load_many(
    runtime: Runtime,
    requests: Sequence[tuple[Match, View]],
    deadline: float | str | None = None,
) -> list[LoadResult]:
    """Load several open matches together; see :meth:`tierkv.session.Match.load`."""
    core = runtime.core
    start = core.clock()
    until = None if deadline is None else start + parse_duration(deadline)
    plans = [match.plan(into) for match, into in requests]
    await load(core, runtime.fetcher, plans, until)
    results = []
    for (match, _), plan in zip(requests, plans, strict=True):
        done = await match.replan(plan, until)
        match.observe_load(done, core.clock() - start)
        results.append(match.result(done))
    return results


async def store_many(runtime: Runtime, requests: Sequence[StoreRequest]) -> list[StoreResult]:
    """Store several sessions' KV together; see :meth:`tierkv.session.Session.store`."""
    core = runtime.core
    start = core.clock()
    order = sorted(requests, key=lambda r: (r.session.tenant, r.session.id))
    held: list[Session] = []
    try:
        for request in order:
            request.session.check_open()
            views.check(request.kv, request.session.space.layout)
            await request.session.begin_turn()
            held.append(request.session)
        plans = []
        for session, token_ids, kv, first in requests:
            await follow(session, token_ids)
            plans.append(plan_store(session, token_ids, kv, first, False))
        await store(core, runtime.behind, plans)
        results = [finish_store(r.session, plan) for r, plan in zip(requests, plans, strict=True)]
    finally:
        for session in held:
            session.end_turn()
    core.observer.operation(op="store", tier=core.levels[0].name, seconds=core.clock() - start)
    return results
