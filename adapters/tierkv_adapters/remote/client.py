"""The sessions and figures of an engine in another process, for synchronous callers."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Any

from tierkv.blocking.names import CurrentSession
from tierkv.blocks import PartId
from tierkv.errors import ClosedError, ConfigError
from tierkv_adapters.remote.asking import Asking
from tierkv_adapters.remote.wire import pack_media, pack_tokens

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from tierkv.blocks import BlockKey, Media
    from tierkv.engine import EngineStats
    from tierkv.layout import Space
    from tierkv.session import BlockReport, FlushResult, SessionInfo

__all__ = ["RemoteHold", "RemoteManager"]


class RemoteManager(Asking):
    """A client of the engine behind a socket: its sessions and figures, not its KV.

    Thread-safe: calls of several threads run side by side, each on a connection of its own. It
    connects when it is first asked, and again when the server was started anew: sessions that
    were created here are then created there again. A forked child needs one of its own.

    Every call raises :class:`~tierkv.errors.ClosedError` if the engine is gone, this was closed,
    or the process was forked; other errors are those that the engine raised, of the same types.

    Args:
        path: Of the socket.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._current = CurrentSession()

    # ------------------------------------------------------------------ sessions

    def create_session(
        self,
        name: str | None = None,
        *,
        tenant: str = "",
        ttl: float | str | None = None,
        fidelity: str | None = None,
        salt: bytes = b"",
        adopt: bool = False,
    ) -> str:
        """Name a new session; see :meth:`tierkv.blocking.CacheManager.create_session`.

        Raises:
            ConfigError: if the name is taken, or an argument is malformed.
            ClosedError: if the engine is gone. It is unknown whether it has the session, if the
                connection broke meanwhile.
        """
        if not isinstance(salt, bytes):
            raise ConfigError(f"salt is bytes, not {type(salt).__name__}")
        name = name if name is not None else str(uuid.uuid4())
        fields: dict[str, Any] = {"name": name, "tenant": tenant, "ttl": ttl, "fidelity": fidelity}
        fields = {k: v for k, v in {**fields, "salt": salt.hex()}.items() if v is not None}
        made = self._ask("create_session", adopt=adopt, **fields)
        self._made[name] = fields
        return str(made)

    def knows_session(self, name: str) -> bool:
        """Whether there is a session of this name."""
        return bool(self._ask("knows_session", name=name))

    def use_session(self, name: str) -> AbstractContextManager[str]:
        """Make a session the current one; as :meth:`tierkv.blocking.CacheManager.use_session`.

        Raises:
            ConfigError: if there is no such session.
        """
        if name not in self._made and not self.knows_session(name):
            raise ConfigError(f"no session {name!r}: create_session({name!r}) first")
        return self._current.use(name)

    def current_session(self) -> str | None:
        """Name of the session that :meth:`use_session` made current here, or None."""
        return self._current.get()

    def clear_session(self, name: str) -> None:
        """Drop a session's history, references and private tail; waits for a turn that runs."""
        self._ask("clear_session", name=name)

    def destroy_session(self, name: str) -> None:
        """Drop a session and its name. Idempotent; never raises, never blocks.

        Safe in ``__del__`` and in any thread: it only leaves a note, of which the engine hears
        before the next call of this object, or when it is closed.
        """
        try:
            self._made.pop(name, None)
            self._marked.put(name)
        except Exception:  # noqa: BLE001 - while the interpreter exits, anything may be gone
            pass

    def sessions(self) -> list[SessionInfo]:
        """Snapshot of every session of the engine that was created and not destroyed."""
        found: list[SessionInfo] = self._ask("sessions")
        return found

    # ------------------------------------------------------------------ the whole

    def stats(self) -> EngineStats:
        """Snapshot of the engine; ``sessions`` counts those created and not destroyed."""
        found: EngineStats = self._ask("stats")
        return found

    def health(self) -> dict[str, str]:
        """State in words, as a manager's; ``{"status": "closed"}`` if the engine is gone."""
        try:
            tiers = self.stats().tiers
        except ClosedError:
            return {"status": "closed"}
        return {"status": "open", **{name: tier.mode for name, tier in tiers.items()}}

    def about(self) -> dict[str, Any]:
        """What the process that serves the engine tells about itself; plain data."""
        return dict(self._ask("about"))

    def flush(self) -> FlushResult:
        """Wait for the copies under way and make everything durable that can be.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        done: FlushResult = self._ask("flush")
        return done

    def reset(self) -> int:
        """Clear every session and forget every block nobody is reading; return how many copies."""
        return int(self._ask("reset"))

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> list[BlockReport]:
        """Per block of a prompt, where it is or why it is nowhere; as a manager's.

        ``space`` has to be bound to the manager that is served; None takes the only one.
        """
        name = session if session is not None else self.current_session()
        body = pack_tokens(token_ids)
        about = {"session": name, "space": _fingerprint(space), "media": pack_media(media)}
        found: list[BlockReport] = self._ask("explain", body, tokens=True, **about)
        return found

    def prefetch(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """Start bringing a prefix into the fastest tier; as a manager's."""
        name = session if session is not None else self.current_session()
        body = b"" if token_ids is None else pack_tokens(token_ids)
        has = token_ids is not None
        about = {"session": name, "space": _fingerprint(space), "media": pack_media(media)}
        self._ask("prefetch", body, tokens=has, **about)

    def hint(
        self,
        *,
        next_in: float | str | None = None,
        stop_reason: str | None = None,
        session: str | None = None,
        space: Space | None = None,
    ) -> None:
        """Tell when a session will be back; as a manager's."""
        name = session if session is not None else self.current_session()
        if name is None:
            raise ConfigError("no session is current: name session=, or use_session(id)")
        where = _fingerprint(space)
        self._ask("hint", session=name, space=where, next_in=next_in, stop_reason=stop_reason)

    def hold(
        self,
        keys: Sequence[BlockKey],
        *,
        space: Space | None = None,
        tenant: str = "",
        salt: bytes = b"",
        fidelity: str = "exact",
        deadline: float | str | None = None,
    ) -> RemoteHold:
        """Bring leading blocks into the engine's memory, verified, and keep them leased there.

        See :meth:`tierkv.Engine.hold`. The engine releases it by itself when this object is closed
        or its process ends.

        Args:
            keys: Keys of the blocks, from the first.
            space: Space of the keys, bound to the manager that is served; None takes the only one.
            tenant: Whose they are.
            salt: Their salt.
            fidelity: ``"exact"``, or ``"lossy"`` if lossy copies are welcome.
            deadline: Seconds, or text, after which nothing further is waited for.
        """
        line = self._lifeline()
        told = self._ask(
            "hold",
            b"".join(keys),
            line=line,
            space=_fingerprint(space),
            tenant=tenant,
            salt=salt.hex(),
            fidelity=fidelity,
            deadline=deadline,
        )
        parts = tuple(PartId(bytes.fromhex(part)) for part in told["parts"])
        return RemoteHold(self, line, int(told["number"]), int(told["blocks"]), parts)


class RemoteHold:
    """Blocks that an engine keeps in memory, leased.

    Attributes:
        blocks: How many leading blocks it holds.
        parts: The parts that a load of those blocks reads.
    """

    def __init__(
        self,
        client: RemoteManager,
        line: str,
        number: int,
        blocks: int,
        parts: tuple[PartId, ...],
    ) -> None:
        self.blocks = blocks
        self.parts = parts
        self._client: RemoteManager | None = client
        self._line = line
        self._number = number

    def __repr__(self) -> str:
        return f"<RemoteHold of {self.blocks} blocks{'' if self._client else ', released'}>"

    def release(self) -> None:
        """Give the lease back. Idempotent; if the engine is gone, so is the lease."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(ClosedError):
                client._ask("release", line=self._line, number=self._number)


def _fingerprint(space: Space | None) -> str | None:
    return None if space is None else space.fingerprint.hex()
