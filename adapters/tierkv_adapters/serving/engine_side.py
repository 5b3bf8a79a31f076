"""A rank's work on the engine's loop: sessions of requests, their loads and their saves."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.chains import parse_chains
from tierkv.config import engine_chains
from tierkv.decisions.types import MissReason
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind
from tierkv.mover.load import UNKNOWN, Progress
from tierkv.session.saving import source_of
from tierkv.workers import Signal
from tierkv_adapters.serving.hinted import HintSide
from tierkv_adapters.serving.jobs import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tierkv.abc import Device
    from tierkv.blocking import CacheManager
    from tierkv.layout import Space
    from tierkv.session import LoadResult, Session, StoreResult
    from tierkv_adapters.serving.counters import RankCounters
    from tierkv_adapters.serving.jobs import Job, RequestState
    from tierkv_adapters.serving.pages import PagePools
    from tierkv_adapters.serving.settings import RankSettings

__all__ = ["EngineSide"]

_UNBACKED = "no_memory"


@dataclass(slots=True)
class _Kept:
    """A session that requests named: its handles by space; whether the rank made the name up."""

    handles: dict[bytes, Session] = field(default_factory=dict)
    created: bool = False


class EngineSide:
    """Does a rank's jobs. Every coroutine runs on the engine's loop.

    Args:
        manager: The engine of the rank.
        pools: Its pages.
        settings: How patient it is.
        begins: Told of a job before it touches pages; False: it must not any more.
        clock: The rank's clock.
        counters: The rank's counters.
    """

    def __init__(
        self,
        manager: CacheManager,
        pools: PagePools,
        settings: RankSettings,
        begins: Callable[[Job], bool],
        clock: Callable[[], float],
        counters: RankCounters,
    ) -> None:
        self._manager = manager
        self._pools = pools
        self._settings = settings
        self._begins = begins
        self._clock = clock
        chains = [parse_chains(chain) for chain in engine_chains(manager.config)]
        # asking for lossy compression is the opt-in to reading it
        self._fidelity = "exact" if all(chain.lossless for chain in chains) else "lossy"
        self._states = any(g.kind is GroupKind.STATE for g in pools.groups)
        self.hints = HintSide(manager, self._fidelity, counters)
        self._named: OrderedDict[tuple[str, str], _Kept] = OrderedDict()  # tenant, name
        self._passing: dict[bytes, Space] = {}  # spaces of eras: gone with the next reset
        self._tainted = False  # whether pages may hold lossy KV, for requests to come, too
        self._carried = 0  # jobs that this side is at
        self._quiet = Signal()  # replaced by who waits until there are none
        self._renewal: Signal | None = None  # the last one ordered; set once it is over
        self.device: Device | None = None
        """The device that the pools are in; None: host memory."""

    async def look(self) -> None:
        """Find out where the pools are.

        Raises:
            ConfigError: if no plug-in knows such memory.
            BackendError: if the plug-in finds no such device.
        """
        view = self._pools.view([[] for _ in self._pools.groups])
        self.device = source_of(self._manager.engine.core, view).device

    # ------------------------------------------------------------------ sessions

    async def _handle(self, request: RequestState) -> Session:
        if request.handle is None:
            assert request.space is not None
            handle = self._open(request, request.space)
            await handle.__aenter__()
            request.handle = handle
        return request.handle

    def _open(self, request: RequestState, space: Space) -> Session:
        facts, manager = request.facts, self._manager
        if facts.era:  # spaces that come and go are nobody's to name
            self._passing[space.fingerprint] = space
        else:
            manager.bind(space)
        handle, kept = None, None
        if facts.session is not None:
            kept = self._named.get((facts.tenant, facts.session))
            created = not manager.knows_session(facts.session)
            if created:  # so that the application sees it, and can clear it
                manager.create_session(
                    facts.session, tenant=facts.tenant, ttl=facts.ttl, salt=facts.salt
                )
                kept = kept or _Kept()
                kept.created = True
            handle = manager.handle(facts.session, space)
            if (handle.tenant, handle.state.salt) != (facts.tenant, facts.salt):
                handle, kept = None, kept or _Kept()  # somebody else's name
        if handle is None:
            handle = manager.engine.session(
                request.name,
                tenant=facts.tenant,
                ttl=facts.ttl,
                fidelity=self._fidelity,
                salt=facts.salt,
                space=space,
            )
        if kept is not None:
            kept.handles[space.fingerprint] = handle
            self._keep(facts.tenant, handle.id, kept)
        return handle

    def _keep(self, tenant: str, name: str, kept: _Kept) -> None:
        """Keep a session for its next request, but not the history of ever more sessions."""
        self._named[tenant, name] = kept
        self._named.move_to_end((tenant, name))
        over = len(self._named) - self._settings.sessions
        for key in list(self._named)[: max(0, over)]:
            old = self._named[key]
            if old is not kept and not any(h.state.handles for h in old.handles.values()):
                del self._named[key]
                if old.created:
                    self._manager.destroy_session(key[1])
                for handle in old.handles.values():
                    handle.destroy()

    async def part(self, request: RequestState) -> None:
        """Leave the session of a request that is over; one that has no name goes with it."""
        handle, request.handle = request.handle, None
        if handle is not None:
            await handle.__aexit__(None, None, None)
            if request.facts.session is None:
                handle.destroy()

    async def computed(self, space: Space, tokens: int, seconds: float) -> None:
        """Tell the cost model how fast the engine computes."""
        speaker = self._manager.engine.session("serving-speed", space=space)
        try:
            speaker.computed(tokens, seconds)
        finally:
            speaker.destroy()

    async def renew(self) -> None:
        """Forget all that is stored, once nothing stores any more; new jobs wait until then.

        Raises:
            TierKVError: if a tier could not be emptied.
        """
        before, over = self._renewal, Signal()
        self._renewal = over
        try:
            if before is not None:
                await before.wait()
            while self._carried:
                self._quiet = Signal()
                await self._quiet.wait()
            await self.hints.close()  # what is held would stay
            await self._manager.areset()
            self._leave_eras()
        finally:
            if self._renewal is over:
                self._renewal = None
            over.set()

    def _leave_eras(self) -> None:
        """Forget the named sessions in the spaces of eras that are over: they come no more."""
        spaces, self._passing = self._passing, {}
        self._manager.leave(spaces.values())
        for kept in self._named.values():
            for fingerprint in spaces:
                kept.handles.pop(fingerprint, None)

    # ------------------------------------------------------------------ jobs

    async def carry(self, job: Job) -> Outcome | None:
        """Do a job; None if it must not begin any more.

        Raises:
            Exception: whatever keeps it from being done.

        Cancellation: as of a load or store of the engine; nothing touches the pages after it.
        """
        if job.kind == "save":
            return await self._carry(job, self._save)
        late = None
        if job.until is not None:
            late = max(job.until - self._clock(), 0) + self._settings.load_grace
        try:
            async with asyncio.timeout(late) as limit:
                return await self._carry(job, self._load)
        except TimeoutError:
            if not limit.expired():
                raise
            return Outcome(job.start, MissReason.DEADLINE.value)

    async def _carry(
        self, job: Job, act: Callable[[Job], Awaitable[Outcome | None]]
    ) -> Outcome | None:
        while self._renewal is not None:
            await self._renewal.wait()
        self._carried += 1
        try:
            return await act(job)
        finally:
            self._carried -= 1
            if not self._carried:
                self._quiet.set()

    async def _load(self, job: Job) -> Outcome | None:
        handle = await self._handle(job.request)
        if self.device is not None and job.ready is not None:
            # the engine's kernels of earlier steps may still read what was in these pages
            await self.device.wait(job.ready)
        media, size = job.request.facts.media, handle.space.block_tokens
        # a start inside a block: what is before it has no page here, and goes nowhere
        start = job.start // size * size
        async with handle.match(job.tokens, media=media, start=start) as match:
            if match.tokens <= job.start:
                return Outcome(job.start, _value(match.reason) or MissReason.NEVER_STORED.value)
            if not self._begins(job):
                return None
            view = self._pools.view(job.pages, match.tokens, spill=True)
            left = None if job.until is None else max(job.until - self._clock(), 0.0)
            try:
                loaded = await match.load(view, deadline=left)
            except LayoutError:
                # a shorter prefix needs windows before this one, for which there are no pages
                if match.tokens == job.stop:
                    raise
                return Outcome(job.start, _value(match.reason) or _UNBACKED)
            finally:
                self._tainted |= bool(handle.derived)
            return self._loaded(job, loaded, match.tokens, _value(match.reason))

    def _loaded(self, job: Job, loaded: LoadResult, matched: int, why: str | None) -> Outcome:
        block = job.request.space.block_tokens if job.request.space is not None else 1
        tokens = max(job.start, loaded.tokens // block * block)
        reason = None
        if tokens < job.stop:
            reason = _value(loaded.reason) or why or MissReason.NEVER_STORED.value
        if self._states and tokens != matched:
            return Outcome(job.start, reason)  # the state is of another token than its page
        if not self._covered(job, tokens):
            return Outcome(job.start, reason or _UNBACKED)
        return Outcome(tokens, reason, self._pools.raw_bytes(job.start, tokens))

    def _covered(self, job: Job, tokens: int) -> bool:
        """Whether the request has pages for the windows and states that a prefix needs."""
        for group, pages in zip(self._pools.groups, job.pages, strict=True):
            if not group.drops:
                continue
            first = max(job.start, 0 if group.window is None else tokens - group.window + 1)
            if not group.per_token:
                first = max(job.start, tokens - 1)
            needed = pages[first // group.page_tokens : -(-tokens // group.page_tokens)]
            if any(page < 0 for page in needed):
                return False
        return True

    async def _save(self, job: Job) -> Outcome | None:
        handle = await self._handle(job.request)
        # first the turn, which may take long: a save that has not begun holds no page
        await handle.begin_turn()
        try:
            if not self._begins(job):
                return None
            view = self._pools.view(job.pages, job.stop)
            if not view.holds_states():
                # what is behind the next state that is stored takes these blocks along
                return Outcome(job.start, _UNBACKED)
            unknown = self._tainted or (job.start and handle.lossy)
            if unknown and not handle.derived:
                # nobody knows how the KV came about that another request left in these pages: what
                # was computed behind lossy copies is derived, and must not pass for exact
                handle.lineage = [Progress(derived=UNKNOWN)]
            result = await handle.store(
                job.tokens,
                view,
                job.start,
                media=job.request.facts.media,
                ready=job.ready,
                gathered=job.gathered,
            )
        finally:
            handle.end_turn()
        outcome = self._saved(job, result)
        self.hints.stored(job.request.id, job.tokens, outcome.tokens)
        return outcome

    def _saved(self, job: Job, result: StoreResult) -> Outcome:
        assert job.request.space is not None
        block = job.request.space.block_tokens
        states = {outcome.index: outcome for outcome in result.blocks}
        tokens, reason = job.start, None
        while tokens < job.stop:
            outcome = states.get(tokens // block)
            if outcome is None or outcome.state == "skipped":
                reason = "skipped" if outcome is None else _value(outcome.reason) or "skipped"
                break
            tokens += block
        nbytes = result.stored * job.request.space.layout.raw_bytes(block)
        return Outcome(tokens, reason, nbytes, result.stored)


def _value(reason: object) -> str | None:
    return None if reason is None else str(getattr(reason, "value", reason))
