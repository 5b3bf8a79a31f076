"""What a manager is asked about the whole: figures, explanations, hints, and where its engine is.

Every question has two forms: one for any thread, which waits, and one of the same name with an
``a`` before it for tasks on the engine's own loop, such as a server of this manager.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from tierkv import registry
from tierkv.blocking.sessions import NamedSessions
from tierkv.errors import ClosedError, TierKVError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tierkv.blocking.elsewhere import Elsewhere
    from tierkv.blocking.names import SessionEntry
    from tierkv.blocks import Media
    from tierkv.engine import CloseReport, EngineStats
    from tierkv.layout import Space
    from tierkv.session import BlockReport, FlushResult

__all__ = ["Control"]

_log = logging.getLogger("tierkv.blocking")
_CLIENT = "tierkv_adapters.remote.client:RemoteManager"
_HINT = "reinstall the package: pip install -e ."


class Control(NamedSessions):
    """Questions to the engine, here or elsewhere."""

    @property
    def metrics_port(self) -> int | None:
        """Loopback port on which ``/metrics`` is served; None if it is not.

        Raises:
            ClosedError: if the manager is not open, or was handed over.
        """
        return self.engine.metrics_port

    def stats(self) -> EngineStats:
        """Snapshot of the engine; ``sessions`` counts those created and not destroyed."""
        if self._there is not None:
            return self._there.stats()
        return self.call(self.astats)

    async def astats(self) -> EngineStats:
        """As :meth:`stats`, on the engine's loop."""
        self._bury()
        return dataclasses.replace(self.engine.stats(), sessions=len(self._names))

    def health(self) -> dict[str, str]:
        """State in words: ``"status"``, and how bytes travel in each tier. Works when closed."""
        try:
            tiers = self.stats().tiers
        except ClosedError:
            return {"status": "closed"}
        return {"status": "open", **{name: tier.mode for name, tier in tiers.items()}}

    def flush(self) -> FlushResult:
        """Wait for the copies under way and make everything durable that can be.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        if self._there is not None:
            return self._there.flush()
        return self.call(self.engine.flush)

    def reset(self) -> int:
        """Clear every session and forget every block nobody is reading; return how many copies."""
        if self._there is not None:
            gone = self._there.reset()
            self._names.renew(*(entry.name for entry in self._names.all()))
            return gone
        return self.call(self.areset)

    async def areset(self) -> int:
        """As :meth:`reset`, on the engine's loop."""
        self._bury()
        gone = await self.engine.reset()
        self._names.renew(*(entry.name for entry in self._names.all()))
        return gone

    # ------------------------------------------------------------------ about prompts

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> list[BlockReport]:
        """Tell, per block of a prompt, where it is or why it is nowhere. Changes nothing.

        Args:
            token_ids: The prompt.
            session: As which session to look (tenant, salt, fidelity, private tail); None takes
                the current one, or looks for the default tenant if none is current.
            space: Space to work in; None takes the only one bound.
            media: Content behind placeholder tokens.

        Raises:
            ConfigError: if there is no such session, or no space to work in.
        """
        name = session if session is not None else self.current_session()
        if self._there is not None:
            return self._there.explain(token_ids, session=name, space=space, media=media)
        return self.call(self.aexplain, token_ids, name, self.space(space), media)

    async def aexplain(
        self,
        token_ids: Sequence[int],
        name: str | None,
        space: Space,
        media: Sequence[Media] = (),
    ) -> list[BlockReport]:
        """As :meth:`explain`, on the engine's loop."""
        if name is None:
            return self.engine.explain(token_ids, space, fidelity=self._fidelity, media=media)
        return await self.handle(name, space).aexplain(token_ids, media=media)

    def prefetch(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """Start bringing a prefix into the fastest tier; see :meth:`tierkv.Engine.prefetch`.

        It does not wait for the bytes. Nothing is brought where there is nothing.

        Args:
            token_ids: The prompt; None takes the history of the session.
            session: As which session to look; None takes the current one, or looks for the
                default tenant if none is current.
            space: Space to work in; None takes those that the session was used in, or the only
                one bound.
            media: Content behind placeholder tokens of the prompt; a history has its own.

        Raises:
            ConfigError: if there is neither a session nor a prompt, no such session, or no space
                to work in.
        """
        name = session if session is not None else self.current_session()
        if self._there is not None:
            self._there.prefetch(token_ids, session=name, space=space, media=media)
        else:
            self.call(self.aprefetch, token_ids, name, space, media)

    async def aprefetch(
        self,
        token_ids: Sequence[int] | None,
        name: str | None,
        space: Space | None,
        media: Sequence[Media] = (),
    ) -> None:
        """As :meth:`prefetch`, on the engine's loop."""
        if name is None:
            await self.engine.prefetch(
                tokens=token_ids, space=self.space(space), fidelity=self._fidelity, media=media
            )
            return
        entry = self._names.get(name)
        self._bury()
        for place in self._places(entry, space):
            await self.engine.prefetch(
                session=name,
                tenant=entry.tenant,
                tokens=token_ids,
                space=place,
                salt=entry.salt,
                fidelity=entry.fidelity,
                media=media,
            )

    def hint(
        self,
        *,
        next_in: float | str | None = None,
        stop_reason: str | None = None,
        session: str | None = None,
        space: Space | None = None,
    ) -> None:
        """Tell when a session will be back; see :meth:`tierkv.session.Session.hint`.

        Args:
            next_in: Seconds (or text such as ``"2m"``) until its next turn, as far as expected.
            stop_reason: Why its turn ended: ``"tool_use"``, ``"end_turn"``, or any short text.
            session: Session it is about; None takes the current one.
            space: Space to work in; None takes those that the session was used in, or the only
                one bound.

        Raises:
            ConfigError: if neither is given or one makes no sense, there is no such session, or
                no space to work in.
        """
        name = self._named(session)
        if self._there is not None:
            self._there.hint(next_in=next_in, stop_reason=stop_reason, session=name, space=space)
        else:
            self.call(self.ahint, name, space, next_in, stop_reason)

    async def ahint(
        self,
        name: str,
        space: Space | None,
        next_in: float | str | None,
        stop_reason: str | None,
    ) -> None:
        """As :meth:`hint`, on the engine's loop."""
        for place in self._places(self._names.get(name), space):
            async with self.handle(name, place) as session:
                session.hint(next_in=next_in, stop_reason=stop_reason)

    def _places(self, entry: SessionEntry, space: Space | None) -> list[Space]:
        """The spaces that are meant: the one named, else those that the session was used in."""
        if space is None and entry.spaces:
            return list(entry.spaces.values())
        return [self.space(space)]

    # ------------------------------------------------------------------ elsewhere

    def hand_over(self, to: Elsewhere | str | os.PathLike[str], *, awaited: bool = False) -> None:
        """Close this manager's own engine, and go on as a client of one in another process.

        For serving engines whose workers keep the KV: sessions that were created here are created
        there, and everything about sessions and about the whole works on, against that engine.
        What the engine here held in memory is dropped with it. KV is not carried from process to
        process: after this :meth:`load`, :meth:`store`, :meth:`call` and :attr:`engine` raise an
        error that says where it is. Closing the manager ends the connection, not that engine.

        Args:
            to: Path of the other engine's socket, or a connection to it, which becomes this
                manager's own.
            awaited: Whether the engine there is yet to come, so that nobody need answer now.

        Raises:
            ConfigError: if a session of the same name is there that was opened otherwise; nothing
                has changed then.
            ClosedError: if no engine answers there (nothing has changed; not if it is awaited), or
                this manager was closed or handed over before.
        """
        self._loop.refuse_inside()
        if self._loop.is_over():
            raise ClosedError(f"{self!r} was closed or handed over before; make a new manager")
        there = to if not isinstance(to, str) and not hasattr(to, "__fspath__") else None
        if there is None:
            client: Any = registry.load(_CLIENT, what="hand_over", hint=_HINT)
            there = client(to)
        try:
            if not awaited:
                there.stats()  # is anybody there at all?
            moved = self._move([], there)
        except BaseException:
            if there is not to:
                there.close()
            raise
        self._there = there
        self._loop.moved(
            f"the engine of this manager is the one behind {there.where}, in another process: KV "
            "is loaded and stored there; open another CacheManager for KV of your own"
        )
        # whoever creates a session from now on sees where it belongs; those in between come now
        try:
            self._move(moved, there)
        except TierKVError as error:
            _log.warning("%s: a session was not handed over: %s", self.config.name, error)
        self._loop.close()

    def close(self) -> CloseReport | None:
        """Write what is queued, sync and close. Idempotent, and bounded by ``close_timeout``.

        Calls that other threads are waiting for end with :class:`~tierkv.errors.ClosedError`. The
        engine that this manager was handed over to, if it was, goes on.

        Returns:
            What was not written; None if the manager was never open, or its tiers hang.
        """
        report = super().close()
        if self._there is not None:
            self._there.close()
        return report

    def _check_here(self) -> None:
        """Say where the engine is, if it is elsewhere, before anything else is found missing."""
        if self._there is not None:
            _ = self.engine

    def _move(self, moved: list[str], there: Elsewhere) -> list[str]:
        """Create the sessions there that were not moved before; all of them or none."""
        before = len(moved)
        try:
            for entry in self._names.all():
                if entry.name not in moved:
                    self._create_there(entry, there)
                    moved.append(entry.name)
        except BaseException:
            for name in moved[before:]:
                there.destroy_session(name)
            raise
        return moved
