"""``CacheManager``: an engine for callers that have threads instead of a loop."""

from __future__ import annotations

import contextlib
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from tierkv.blocking.names import SessionNames, SessionOptions
from tierkv.blocking.portal import EngineThread
from tierkv.chains import parse_chain
from tierkv.config import load_config, tier_chain
from tierkv.errors import ConfigError
from tierkv.session import SessionInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import View
    from tierkv.engine import EngineStats
    from tierkv.layout import Space
    from tierkv.session import BlockReport, FlushResult, LoadResult, Session, StoreResult

__all__ = ["CacheManager"]


class CacheManager(EngineThread):
    """An engine for synchronous callers; use it with ``with``. Thread-safe.

    Args:
        source: TOML file, mapping or :class:`~tierkv.config.EngineConfig`, as for
            :func:`tierkv.open`.
        space: Space of the sessions; an adapter binds it when it attaches.
        **settings: Fields of :class:`~tierkv.config.EngineConfig`, e.g. ``name``, ``tiers``,
            ``policy``, ``compression``, ``block_tokens``, ``metrics``, ``metrics_port``.

    Raises:
        ConfigError: if a setting is unknown, malformed or cannot be honoured.
    """

    def __init__(self, source: Any = None, *, space: Space | None = None, **settings: Any) -> None:
        super().__init__(load_config(source, **settings).config)
        chains = [parse_chain(tier_chain(self.config, tier)) for tier in self.config.tiers]
        # asking for lossy compression is the opt-in to reading it
        self._fidelity = "exact" if all(c.lossless for c in chains) else "lossy"
        self._spaces: list[Space] = [space] if space is not None else []
        self._names = SessionNames()
        self._current: ContextVar[str | None] = ContextVar(f"{self.config.name}-session")

    def __repr__(self) -> str:
        state = "closed" if self._portal is None else "open"
        return f"<CacheManager {self.config.name}: {state}, {len(self._names)} sessions>"

    # ------------------------------------------------------------------ spaces

    def bind(self, space: Space) -> None:
        """Make a space known; adapters do it when they attach. Idempotent."""
        if space not in self._spaces:
            self._spaces.append(space)

    def space(self, wanted: Space | None = None) -> Space:
        """The space to work in: the one named, or the only one bound.

        Raises:
            ConfigError: if none was bound, or several were and none is named.
        """
        if wanted is not None:
            return wanted
        if len(self._spaces) == 1:
            return self._spaces[0]
        many = f"{len(self._spaces)} spaces are" if self._spaces else "no space is"
        raise ConfigError(f"{many} bound to this manager: attach a model, or name space=")

    # ------------------------------------------------------------------ sessions

    def create_session(
        self,
        name: str | None = None,
        *,
        tenant: str = "",
        ttl: float | str | None = None,
        fidelity: str | None = None,
        salt: bytes = b"",
    ) -> str:
        """Name a new session and return its name.

        Raises:
            ConfigError: if a session of that name exists.
        """
        name = name if name is not None else str(uuid.uuid4())
        self._names.add(name, SessionOptions(tenant, ttl, fidelity or self._fidelity, salt))
        return name

    @contextlib.contextmanager
    def use_session(self, name: str) -> Iterator[str]:
        """Make a session the current one of this thread or task while the block runs; nests.

        Raises:
            ConfigError: if there is no such session.
        """
        self._names.get(name)
        token = self._current.set(name)
        try:
            yield name
        finally:
            self._current.reset(token)

    def current_session(self) -> str | None:
        """Name of the session that :meth:`use_session` made current here, or None."""
        return self._current.get(None)

    def handle(self, name: str | None = None, space: Space | None = None) -> Session:
        """A handle on a session, for use on the engine's loop (inside :meth:`call`).

        Raises:
            ConfigError: if there is no such session, or no space to work in.
        """
        name = name if name is not None else self.current_session()
        if name is None:
            raise ConfigError("no session is current: name session=, or use 'with use_session(id)'")
        options = self._names.get(name)
        self.poke(self._bury)
        return self.engine.session(
            name,
            tenant=options.tenant,
            ttl=options.ttl,
            fidelity=options.fidelity,
            salt=options.salt,
            space=self.space(space),
        )

    def clear_session(self, name: str) -> None:
        """Drop a session's history; the name stays.

        Raises:
            ConfigError: if there is no such session.
        """
        self.call(self._forget, [(name, self._names.get(name).tenant)], False)

    def destroy_session(self, name: str) -> None:
        """Drop a session and its name. Idempotent; never raises, never blocks.

        Safe in ``__del__``, in any thread, after :meth:`close` and while the interpreter exits:
        it only leaves a note, which every later call honours first.
        """
        self._names.mark(name)
        self.poke(self._bury)

    def _bury(self) -> None:
        self._forget_now(self._names.dead(), True)

    def _forget_now(self, names: Sequence[tuple[str, str]], wholly: bool) -> None:
        for name, tenant in names:
            for space in self._spaces:
                self.engine.forget_session(name, tenant=tenant, space=space, name_too=wholly)

    async def _forget(self, names: Sequence[tuple[str, str]], wholly: bool) -> None:
        self._forget_now(names, wholly)

    def sessions(self) -> list[SessionInfo]:
        """Snapshot of every session that was created and not destroyed."""
        known = {(i.tenant, i.id): i for i in self.call(self._infos)}
        return [
            known.get((o.tenant, name)) or SessionInfo(name, o.tenant, 0, 0, 0, 0, None)
            for name, o in self._names.all().items()
        ]

    async def _infos(self) -> list[SessionInfo]:
        self._bury()
        return self.engine.sessions()

    # ------------------------------------------------------------------ KV

    def load(
        self,
        token_ids: Sequence[int],
        into: View,
        *,
        session: str | None = None,
        deadline: float | str | None = None,
        space: Space | None = None,
    ) -> LoadResult:
        """Match a prompt and load its prefix into a view; see :meth:`tierkv.session.Match.load`."""
        handle = self.handle(session, space)
        return self.call(_load, handle, token_ids, into, deadline)

    def store(
        self,
        token_ids: Sequence[int],
        kv: View,
        start: int = 0,
        *,
        session: str | None = None,
        space: Space | None = None,
    ) -> StoreResult:
        """Store the full blocks of a prompt; see :meth:`tierkv.session.Session.store`."""
        handle = self.handle(session, space)
        return self.call(_store, handle, token_ids, kv, start)

    # ------------------------------------------------------------------ the whole

    def stats(self) -> EngineStats:
        """Snapshot of the engine."""
        return self.call(self._stats)

    async def _stats(self) -> EngineStats:
        self._bury()
        return self.engine.stats()

    def health(self) -> dict[str, str]:
        """State in words: ``"status"`` and how bytes travel in each tier. Works when closed."""
        if self._portal is None:
            return {"status": "closed"}
        modes = {name: tier.mode for name, tier in self.stats().tiers.items()}
        return {"status": "open", **modes}

    def flush(self) -> FlushResult:
        """Wait for the copies under way and make everything durable that can be.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        return self.call(self.engine.flush)

    def reset(self) -> int:
        """Clear every session and forget every block nobody is reading; return how many parts."""
        return self.call(self.engine.reset)

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        space: Space | None = None,
    ) -> list[BlockReport]:
        """Tell, per block of a prompt, where it is or why it is nowhere."""
        name = session if session is not None else self.current_session()
        options = self._names.get(name) if name is not None else None
        tenant = options.tenant if options else ""
        fidelity = options.fidelity if options else self._fidelity
        return self.call(self._explain, token_ids, self.space(space), tenant, fidelity)

    async def _explain(
        self, token_ids: Sequence[int], space: Space, tenant: str, fidelity: str
    ) -> list[BlockReport]:
        return self.engine.explain(token_ids, space, tenant, fidelity)


async def _load(
    handle: Session, token_ids: Sequence[int], into: View, deadline: float | str | None
) -> LoadResult:
    async with handle, handle.match(token_ids) as match:
        return await match.load(into, deadline=deadline)


async def _store(handle: Session, token_ids: Sequence[int], kv: View, start: int) -> StoreResult:
    async with handle:
        return await handle.store(token_ids, kv, start)
