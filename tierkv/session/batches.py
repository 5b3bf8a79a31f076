"""Batches of requests: one backend call per tier and window, one worker hop per batch."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from tierkv import views
from tierkv.errors import SessionBusyError
from tierkv.mover.load import load
from tierkv.mover.store import store
from tierkv.session.match import follow
from tierkv.session.saving import finish_store, plan_store, replan_store
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tierkv.abc import View
    from tierkv.blocks import Media
    from tierkv.session.handle import Session
    from tierkv.session.match import LoadResult, Match
    from tierkv.session.saving import Saving, StoreResult
    from tierkv.session.table import Runtime

__all__ = ["StoreRequest", "load_many", "match_many", "store_many"]


class StoreRequest(NamedTuple):
    """One store of a batch; see :meth:`tierkv.session.Session.store`."""

    session: Session
    token_ids: Sequence[int]
    kv: View
    start: int = 0
    tail: bool = False
    media: Sequence[Media] = ()


def _in_order(sessions: Sequence[Session]) -> list[int]:
    """Numbers of the sessions in the one order in which batches take their turns.

    Raises:
        SessionBusyError: if a session occurs twice: it would wait for itself.
    """
    seen: set[int] = set()
    for session in sessions:
        if id(session.state) in seen:
            raise SessionBusyError(f"session {session.id!r} occurs twice in one batch; split it")
        seen.add(id(session.state))
    names = [(s.space.fingerprint, s.tenant, s.id) for s in sessions]
    return sorted(range(len(sessions)), key=names.__getitem__)


@asynccontextmanager
async def match_many(
    requests: Sequence[tuple[Session, Sequence[int]]],
) -> AsyncIterator[list[Match]]:
    """Open a match per request; all are left together.

    Each session may occur once: its turn is held until the matches are left. Sessions are
    entered in one order everywhere, so that two batches cannot wait for each other.

    Raises:
        SessionBusyError: if a session occurs twice.
    """
    matches = [session.match(token_ids) for session, token_ids in requests]
    async with AsyncExitStack() as stack:
        for index in _in_order([session for session, _ in requests]):
            await stack.enter_async_context(matches[index])
        yield matches


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
    """Store several sessions' KV together; see :meth:`tierkv.session.Session.store`.

    Raises:
        SessionBusyError: if a session occurs twice.
    """
    core = runtime.core
    start = core.clock()
    for request in requests:
        request.session.check_open()
        views.check(request.kv, request.session.space.layout)
    held: list[Session] = []
    try:
        for index in _in_order([request.session for request in requests]):
            await requests[index].session.begin_turn()
            held.append(requests[index].session)
        savings: list[Saving] = []
        for session, token_ids, kv, first, tail, media in requests:
            chain, _ = await follow(session, token_ids, media)
            savings.append(plan_store(session, chain, kv, first, tail=tail))
        await store(core, runtime.behind, [saving.plan for saving in savings])
        await _store_again(runtime, requests, savings)
        results = [
            await finish_store(request.session, saving)
            for request, saving in zip(requests, savings, strict=True)
        ]
    finally:
        for session in held:
            session.end_turn()
    core.observer.operation(op="store", tier=core.levels[0].name, seconds=core.clock() - start)
    return results


async def _store_again(
    runtime: Runtime,
    requests: Sequence[StoreRequest],
    savings: list[Saving],
) -> None:
    """Once more, from further ahead, where blocks have gone that a store counted on."""
    again = []
    for number, request in enumerate(requests):
        earlier = await replan_store(request.session, savings[number])
        if earlier is not None:
            savings[number] = earlier
            again.append(earlier.plan)
    if again:
        await store(runtime.core, runtime.behind, again)
