"""Batches of requests: one backend call per tier and window, one worker hop per batch."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tierkv import views
from tierkv.blocks import as_token_ids
from tierkv.errors import LayoutError, SessionBusyError
from tierkv.mover.letting_go import LastRead
from tierkv.mover.load import load
from tierkv.mover.store import store
from tierkv.session.base import Handle
from tierkv.session.leased import follow
from tierkv.session.match import Match
from tierkv.session.saving import finish_store, plan_store, replan_store, source_of
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tierkv.abc import Event, View
    from tierkv.blocks import Media
    from tierkv.session.handle import Session
    from tierkv.session.match import LoadResult
    from tierkv.session.saving import Saving, StoreResult
    from tierkv.session.table import Runtime

__all__ = [
    "MatchRequest",
    "StoreRequest",
    "checked",
    "load_many",
    "match_many",
    "store_again",
    "store_many",
]


class StoreRequest(NamedTuple):
    """One store of a batch; see :meth:`tierkv.session.Session.store`.

    ``ready`` is an event of the view's device behind the work that fills the view; None takes what
    the thread that runs the engine's loop has submitted when the store begins.

    ``gathered`` is called, on the loop, once no thread and no device reads the view any more, which
    may be long before the store is over: a medium is written from the engine's own memory. It is
    called exactly once, also if the store fails or is cancelled, and must not raise. A part that a
    tier fails to write after that is skipped, as the KV is gone that another one would take.
    """

    session: Session
    token_ids: Sequence[int]
    kv: View
    start: int = 0
    tail: bool = False
    media: Sequence[Media] = ()
    ready: Event | None = None
    gathered: Callable[[], object] | None = None


MatchRequest: TypeAlias = (
    "tuple[Session, Sequence[int]] | tuple[Session, Sequence[int], int]"
    " | tuple[Session, Sequence[int], int, Sequence[Media]]"
)
_STORES = range(3, len(StoreRequest._fields) + 1)


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
async def match_many(requests: Sequence[MatchRequest]) -> AsyncIterator[list[Match]]:
    """Open a match per request; all are left together.

    Each session may occur once: its turn is held until the matches are left. Sessions are
    entered in one order everywhere, so that two batches cannot wait for each other.

    Args:
        requests: A session and the tokens of a prompt each, the token to start at if it is not 0,
            and the media of the prompt if it has some; see :meth:`tierkv.session.Session.match`.

    Raises:
        SessionBusyError: if a session occurs twice.
    """
    usage = "match_many takes (session, token_ids), and then a start, and then media"
    asked = _checked(requests, (2, 3, 4), usage)
    for session, *_ in asked:
        _of(Handle, session, "a session")
    matches = [
        session.match(ids, start=more[0] if more else 0, media=more[1] if more[1:] else ())
        for session, ids, *more in asked
    ]
    async with AsyncExitStack() as stack:
        for number in _in_order([session for session, *_ in asked]):
            await stack.enter_async_context(matches[number])
        yield matches


async def load_many(
    runtime: Runtime,
    requests: Sequence[tuple[Match, View] | tuple[Match, View, int]],
    deadline: float | str | None = None,
) -> list[LoadResult]:
    """Load several open matches together; see :meth:`tierkv.session.Match.load`.

    Args:
        runtime: Of the engine.
        requests: A match and a view each, and the token to start at if it is another one than
            that of the match.
        deadline: Seconds (or text) after which no further block is waited for.
    """
    core = runtime.core
    start = core.clock()
    until = None if deadline is None else start + parse_duration(deadline)
    asked = _checked(requests, (2, 3), "load_many takes (match, view) or (match, view, start)")
    for match, *_ in asked:
        _of(Match, match, "an open match")
    if not asked:
        return []
    firsts = [await match.begin(start[0] if start else None, until) for match, _, *start in asked]
    plans = [
        match.plan(into, first=first)  # no await from here to the load, which keeps the leases
        for (match, into, *_), first in zip(asked, firsts, strict=True)
    ]
    await load(core, runtime.fetcher, plans, until)
    results = []
    for (match, *_), plan in zip(asked, plans, strict=True):
        done = await match.replan(plan, until)
        match.observe_load(done, core.clock() - start)
        results.append(match.result(done))
    return results


async def store_many(runtime: Runtime, requests: Sequence[StoreRequest]) -> list[StoreResult]:
    """Store several sessions' KV together; see :meth:`tierkv.session.Session.store`.

    Raises:
        ClosedError: if a session or the engine is closed.
        LayoutError: if a view does not fit its layout, or is too short for its tokens; nothing is
            stored then.
        SessionBusyError: if a session occurs twice.
    """
    usage = "store_many takes StoreRequest(session, ids, kv)"
    requests = [StoreRequest(*request) for request in _checked(requests, _STORES, usage)]
    last = LastRead(each.gathered for each in requests if callable(each.gathered))
    try:
        return await _store_many(runtime, requests, last)
    finally:
        last.tell()


async def _store_many(
    runtime: Runtime, requests: Sequence[StoreRequest], last: LastRead
) -> list[StoreResult]:
    core = runtime.core
    start, resets = core.clock(), core.resets
    requests = [checked(request) for request in requests]
    sources = [source_of(core, request.kv, request.ready) for request in requests]
    held: list[Session] = []
    try:
        for number in _in_order([request.session for request in requests]):
            await requests[number].session.begin_turn()
            held.append(requests[number].session)
        savings: list[Saving] = []
        for request, source in zip(requests, sources, strict=True):
            chain, _ = await follow(request.session, request.token_ids, request.media)
            saving = plan_store(request.session, chain, source, request.start, tail=request.tail)
            saving.plan.resets = resets
            savings.append(saving)
        await store(core, runtime.behind, [saving.plan for saving in savings], last=last)
        await store_again(runtime, [request.session for request in requests], savings, last)
        results = [
            await finish_store(request.session, saving)
            for request, saving in zip(requests, savings, strict=True)
        ]
    finally:
        for session in held:
            session.end_turn()
    core.observer.operation(op="store", tier=core.levels[0].name, seconds=core.clock() - start)
    return results


def _checked(requests: Sequence[Any], lengths: Sequence[int], usage: str) -> list[Any]:
    """The requests of a batch, if they look like ones."""
    if not isinstance(requests, list | tuple):
        raise LayoutError(f"{usage}, in a list; not {type(requests).__name__}")
    for request in requests:
        size = len(request) if isinstance(request, tuple | list) else 0
        if size not in lengths:
            raise LayoutError(f"{usage}, not {request!r:.80}")
    return list(requests)


def _of(kind: type, thing: object, what: str) -> None:
    if not isinstance(thing, kind):
        raise LayoutError(f"need {what}, not {thing!r:.80}")


def checked(request: StoreRequest) -> StoreRequest:
    """Check what can be checked before anything is done.

    Raises:
        ClosedError: if the session is not open.
        LayoutError: if something does not fit.
    """
    _of(Handle, request.session, "a session")
    session = request.session
    session.check_open()
    ids = as_token_ids(request.token_ids)
    try:
        start = index(request.start)
    except TypeError:
        raise LayoutError(f"start must be a token index, not {request.start!r:.80}") from None
    size = session.space.block_tokens
    if request.gathered is not None and not callable(request.gathered):
        raise LayoutError(f"gathered is a function to call, not {request.gathered!r:.80}")
    needed = len(ids) if request.tail else len(ids) // size * size
    views.check(request.kv, session.space.layout, needed)
    return request._replace(token_ids=ids, start=start)


async def store_again(
    runtime: Runtime,
    sessions: Sequence[Session],
    savings: list[Saving],
    last: LastRead | None = None,
) -> None:
    """Once more, from further ahead, where blocks have gone that a store counted on.

    Unless ``last`` was told: the views may not be read any more then.
    """
    if last is not None:
        if last.over:
            return
        last.again = False
    again = []
    for number, session in enumerate(sessions):
        earlier = await replan_store(session, savings[number])
        if earlier is not None:
            savings[number] = earlier
            again.append(earlier.plan)
    if again:
        await store(runtime.core, runtime.behind, again, last=last)
