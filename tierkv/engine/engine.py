"""The engine: what users call."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierkv.blocks import as_token_ids
from tierkv.config import EngineConfig, load_config
from tierkv.decisions.types import EvictReason
from tierkv.engine.keeping import Keeping
from tierkv.engine.parts import NOT_OPEN, traffic
from tierkv.engine.stats import EngineStats
from tierkv.errors import ClosedError, ConfigError
from tierkv.layout import Space
from tierkv.mover.slices import sliced
from tierkv.session import Session, SessionState
from tierkv.session.base import check_fidelity
from tierkv.session.batches import StoreRequest, load_many, match_many, store_many
from tierkv.session.explaining import without_tokens
from tierkv.session.leased import HASH_INLINE_TOKENS
from tierkv.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from tierkv.abc import Backend, Observer, View
    from tierkv.blocks import Identity, Media, PartId
    from tierkv.layout import Layout
    from tierkv.session import (
        BlockReport,
        FlushResult,
        LoadResult,
        Match,
        StoreResult,
    )
    from tierkv.session.batches import MatchRequest
    from tierkv.workers import Job

__all__ = ["BoundSpace", "Engine", "open"]


class Engine(Keeping):
    """Keeps KV alive in tiers. Make one with :func:`open`.

    All methods belong to the event loop on which the engine was opened.
    """

    def space(
        self, identity: Identity, layout: Layout, block_tokens: int | None = None
    ) -> BoundSpace:
        """Bind a space to this engine; several models may share one engine.

        Raises:
            LayoutError: if identity, layout or block size make no space.
        """
        size = self.config.block_tokens if block_tokens is None else block_tokens
        return BoundSpace(self, Space(identity, layout, size))

    def session(
        self,
        name: str,
        *,
        tenant: str = "",
        ttl: float | str | None = None,
        fidelity: str = "exact",
        salt: bytes = b"",
        space: Space | None = None,
    ) -> Session:
        """A handle on the session of this name, made if need be: use it with ``async with``.

        Args:
            name: Name of the session, unique in its space and tenant.
            tenant: Whose it is; tenants never share blocks.
            ttl: How long its parts live after their last use, e.g. ``"6h"``.
            fidelity: ``"exact"``, or ``"lossy"`` if lossy copies are welcome.
            salt: Further secret that blocks must share to be reused.
            space: Space to work in; None takes the engine's.

        Raises:
            ConfigError: if no space is given here or at :func:`open`, or an argument is malformed.
            ClosedError: if the engine is not open.
        """
        if self.core.closed:
            raise ClosedError("the engine is closed")
        space = self._space(space)
        if name == "":
            raise ConfigError("a session's name is a text that is not empty")
        ttl = None if ttl is None else parse_duration(ttl)
        check_fidelity(fidelity)  # before the session is made
        state = self._sessions.ensure(space, tenant, name, salt)
        quota = "session_quota" in self.config.tenants.get(tenant, {})
        return Session(self.runtime, self._sessions, state, ttl=ttl, fidelity=fidelity, quota=quota)

    async def prefetch(
        self,
        *,
        session: str | None = None,
        tenant: str = "",
        tokens: Sequence[int] | None = None,
        space: Space | None = None,
        salt: bytes = b"",
        fidelity: str = "exact",
        guess: bool = False,
        media: Sequence[Media] = (),
    ) -> Job[int]:
        """Start bringing a prefix into the fastest tier: call it when its request arrives.

        It counts as a use of the prefix, for which what was used before gives way; call it for a
        request that has to wait for its turn, and load it then.

        Args:
            session: Session whose history to bring; nothing is brought if there is none.
            tenant: Its tenant.
            tokens: Token ids to bring instead of the history.
            space: Space; None takes the engine's.
            salt: Salt of the blocks, where no session is named.
            fidelity: ``"exact"``, or ``"lossy"`` if lossy copies are of use.
            guess: Whether no request is there yet. A guess is no use, and evicts nothing that was
                used later than the prefix.
            media: Content behind placeholder tokens of ``tokens``; a history has its own.

        Returns:
            The engine-owned job; awaiting ``job.wait()`` gives the number of parts moved, and is
            never needed.

        Raises:
            ConfigError: if neither a session nor tokens are given, or media without tokens.
            ClosedError: if the engine is closed.
        """
        if session is None and tokens is None:
            raise ConfigError("prefetch needs session= or tokens=")
        if self.core.closed:
            raise ClosedError("the engine is closed")
        self.workers.home.refuse_elsewhere()
        space = self._space(space)
        # a probe: it makes no session and renews none
        state = self._sessions.get(space, tenant, session) if session is not None else None
        state = state or SessionState(session or "", tenant, space, salt)
        lossy = check_fidelity(fidelity) == "lossy"
        keys = state.chain.keys
        if tokens is not None:
            chain, ids = state.chain.fork(), as_token_ids(tokens)
            if len(ids) <= HASH_INLINE_TOKENS:
                chain.follow(ids, media)
            else:
                await self.workers.run(chain.follow, ids, media)
            keys = chain.keys
        else:
            without_tokens(media)
        return self.runtime.prefetcher.ask(
            state, keys, named=session is not None, lossy=lossy, guess=guess
        )

    def match_many(
        self, requests: Sequence[MatchRequest]
    ) -> AbstractAsyncContextManager[list[Match]]:
        """Open several matches: ``async with engine.match_many([(session, ids), ...])``.

        A third item is the token to start at, a fourth the media; see
        :meth:`tierkv.session.Session.match`.
        """
        return match_many(requests)

    async def load_many(
        self,
        requests: Sequence[tuple[Match, View] | tuple[Match, View, int]],
        *,
        deadline: float | str | None = None,
    ) -> list[LoadResult]:
        """Load several open matches together: ``[(match, view), ...]``, one result each.

        ``(match, view, start)`` loads from a token on; see :meth:`tierkv.session.Match.load`.
        """
        return await load_many(self.runtime, requests, deadline)

    async def store_many(self, requests: Sequence[StoreRequest]) -> list[StoreResult]:
        """Store several sessions' KV together, one result each."""
        return await store_many(self.runtime, requests)

    def explain(
        self,
        token_ids: Sequence[int],
        space: Space | None = None,
        tenant: str = "",
        fidelity: str = "exact",
        salt: bytes = b"",
        media: Sequence[Media] = (),
    ) -> list[BlockReport]:
        """Tell, per block of a prompt, where it is or why it is nowhere. Changes nothing.

        Long prompts: see :meth:`tierkv.session.Session.aexplain`.
        """
        state = SessionState("", tenant, self._space(space), salt)
        handle = Session(self.runtime, self._sessions, state, fidelity=fidelity)
        return handle.explain(as_token_ids(token_ids), media=media)

    def forget_session(
        self,
        name: str,
        *,
        tenant: str = "",
        space: Space | None = None,
        name_too: bool = True,
    ) -> None:
        """Clear a session, and forget its name. Idempotent."""
        state = self._sessions.get(self._space(space), tenant, name)
        if state is None:
            return
        if name_too:
            self._sessions.destroy(state)
        else:
            self._sessions.clear(state)

    async def flush(self) -> FlushResult:
        """Wait for the copies under way and make everything durable that can be.

        Returns:
            How many parts would survive a crash now, and how many would not: also those that
            sessions were asked to store and that no tier took or kept.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        core = self.core
        self.workers.home.refuse_elsewhere()
        wanted = {part: None async for part in sliced(core.decisions.known()) if self._has(part)}
        for state in self._sessions:
            async for part in sliced(state.wanted(core)):
                wanted[part] = None
        return await self.runtime.behind.flush(wanted)

    def _has(self, part: PartId) -> bool:
        return bool(self.core.decisions.state(part, self.core.clock()).tiers)

    async def reset(self) -> int:
        """Clear every session and forget every part that nobody is reading.

        Stores that were asked for before this become visible no more: they skip their blocks with
        reason RESET, also those whose callers were cancelled while a medium was being written.

        Returns:
            How many copies were forgotten.
        """
        core = self.core
        self.workers.home.refuse_elsewhere()
        core.resets += 1
        for state in self._sessions:
            self._sessions.clear(state)
        await self.runtime.behind.drain()
        before = sum(core.decisions.entries(level.index) for level in core.levels)
        async for part in sliced(core.decisions.known()):
            core.free(core.decisions.forget([part], EvictReason.REMOVED, core.clock()))
        for level in core.levels:
            await self.workers.spawn(core.purge, level, name="purge").wait()
        return before - sum(core.decisions.entries(level.index) for level in core.levels)

    def resize(self, tier: str, capacity: int | str) -> int:
        """Give a tier another capacity while it is in use.

        What no longer fits is demoted or dropped, coldest first, in the background; leased parts
        stay until their leases end. Memory that the tier mapped at its start stays mapped: it can
        never grow beyond what it was opened with, except where the memory is a device's.

        Args:
            tier: Name of the tier.
            capacity: Bytes, or text such as ``"8GiB"``.

        Returns:
            Bytes that are still in use above the new capacity; 0 if none are.

        Raises:
            ConfigError: if there is no such tier, or it cannot have that capacity.
            ClosedError: if the engine is not open.
        """
        core = self.core
        if core.closed:
            raise ClosedError("the engine is closed")
        names = [level.name for level in core.levels]
        if tier not in names:
            raise ConfigError(f"there is no tier {tier!r}; the engine has {', '.join(names)}")
        level, wanted = core.levels[names.index(tier)], parse_bytes(capacity)
        most = self._usable.get(level.index, 0)
        if level.resident is None and wanted > most:
            raise ConfigError(
                f"tier {tier!r} was opened with {most} usable bytes and cannot grow to {wanted}; "
                f"configure it larger and open the engine anew"
            )
        drops, demotes = core.decisions.set_capacity(level.index, wanted, core.clock())
        core.free(drops)
        self.runtime.behind.demote(demotes)
        self._limits[level.index] = wanted
        if level.resident is not None:
            level.resident.shrink(wanted)
        return max(core.decisions.used(level.index) - wanted, 0)

    def shrink(self, tier: str, nbytes: int | str) -> int:
        """Take bytes away from a tier, e.g. ``shrink("device", "2GiB")`` when a model needs them.

        As :meth:`resize`, by so much less than now (down to nothing).
        """
        core = self.core
        level = next((x for x in core.levels if x.name == tier), None)
        if level is None:
            return self.resize(tier, 0)  # says which tiers there are
        return self.resize(tier, max(core.decisions.capacity(level.index) - parse_bytes(nbytes), 0))

    def call_soon_threadsafe(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn(*args)`` on the engine's loop soon; from any thread, without waiting.

        Raises:
            ClosedError: if the engine was never opened.
            RuntimeError: if the loop is gone.
        """
        if self._loop is None:
            raise ClosedError(NOT_OPEN)
        self._loop.call_soon_threadsafe(fn, *args)

    def stats(self) -> EngineStats:
        """Snapshot of the engine."""
        core, behind = self.core, self.runtime.behind
        return EngineStats(
            tiers={x.name: x.backend.stats() for x in core.levels},
            used={x.name: core.decisions.used(x.index) for x in core.levels},
            sessions=len(self._sessions),
            leases=core.decisions.leases(),
            queued_bytes=behind.queued_bytes,
            in_flight=self.runtime.fetcher.in_flight,
            staging_used=core.staging.used,
            tasks_spawned=self.workers.tasks_spawned,
            thread_hops=self.workers.thread_hops,
            bytes_copied=core.bytes_copied,
            bytes_gathered=core.bytes_gathered,
            oldest_seconds=behind.oldest_seconds,
            traffic={x.name: traffic(core, x) for x in core.levels},
            chains={x.name: x.chain for x in core.levels},
            prefill=core.decisions.costs.speeds(),
            prefetch={figures.name: figures for figures in self._prefetched()},
            promotions={x.name: core.decisions.promotions(x.index) for x in core.levels},
            hints=tuple(core.decisions.hint_classes()),
        )


class BoundSpace:
    """A space of one engine: ``space.session(id)`` opens sessions in it."""

    def __init__(self, engine: Engine, space: Space) -> None:
        self.engine = engine
        self.space = space

    def session(self, name: str, **options: Any) -> Session:
        """As :meth:`Engine.session`, in this space."""
        return self.engine.session(name, space=self.space, **options)


def open(
    source: str | os.PathLike[str] | Mapping[str, Any] | EngineConfig | None = None,
    *,
    space: Space | None = None,
    backends: Sequence[Backend] | None = None,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    **settings: Any,
) -> Engine:
    """An engine; it is open inside its ``async with``.

    ``async with tierkv.open("tierkv.toml", space=space) as engine``

    Args:
        source: TOML file, mapping or config; None for settings alone.
        space: Default space of ``engine.session``.
        backends: Ready backends for the tiers, instead of making them by kind (tests, wrappers).
        observer: Who hears what happens, instead of the metrics.
        clock: Monotonic clock in seconds.
        wall: Wall clock in seconds, for expiry times that outlive the process.
        **settings: Fields of :class:`~tierkv.config.EngineConfig`; they win over the environment
            (``TIERKV_*``), which wins over the file.

    Raises:
        ConfigError: if a setting is unknown or malformed. Entering it raises one if a setting
            cannot be honoured, and BackendError if a tier cannot be opened.

    Leaving closes the engine, which is bounded by ``close_timeout``.
    """
    if source is not None and not isinstance(source, str | os.PathLike | Mapping | EngineConfig):
        raise ConfigError(
            f"need a TOML file, a mapping or a tierkv.EngineConfig, not {type(source).__name__}"
        )
    return Engine(
        load_config(source, **settings).config,
        space=space,
        backends=backends,
        observer=observer,
        clock=clock,
        wall=wall,
    )
