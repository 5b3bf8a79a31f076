"""The engines of a serving engine that is yet to be built: known by their sockets beforehand."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from tierkv.errors import ClosedError, ConfigError, TierKVError
from tierkv.session import SessionInfo
from tierkv_adapters.remote.client import RemoteManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import Media
    from tierkv.engine import EngineStats
    from tierkv.layout import Space
    from tierkv.session import BlockReport, FlushResult

__all__ = ["AwaitedEngines"]

_T = TypeVar("_T")


class AwaitedEngines:
    """The engines of a serving engine's ranks, as one :class:`~tierkv.blocking.Elsewhere`.

    Nothing need listen at the sockets yet. Sessions that are created before are created there when
    the engines have come. What changes something is asked of every rank, as each has its part of
    the KV; what only tells something, of the first: the ranks' parts of a block are stored,
    and found, together. Thread-safe.

    Args:
        sockets: Of the ranks, the first one first.
        awaited: What is to come, for messages: ``"the vLLM engine"``.
    """

    def __init__(self, sockets: Sequence[str], awaited: str) -> None:
        self.clients = tuple(RemoteManager(socket) for socket in sockets)
        self._awaited = awaited
        self._waiting: dict[str, dict[str, Any]] = {}
        self._came = False
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        return f"<AwaitedEngines at {self.where}: {'come' if self._came else 'awaited'}>"

    @property
    def where(self) -> str:
        """Socket of the first one."""
        return self.clients[0].where

    def reached(self) -> bool:
        """Whether the engines have come; if so, the sessions that waited for them are there."""
        with self._guard:
            if not self._came:
                try:
                    for client in self.clients:
                        client.stats()
                except ClosedError:
                    return False
                for name in list(self._waiting):  # sessions may be destroyed meanwhile, unlocked
                    if (fields := self._waiting.get(name)) is not None:
                        for client in self.clients:
                            client.create_session(name, adopt=True, **fields)
                        if self._waiting.pop(name, None) is None:
                            for client in self.clients:
                                client.destroy_session(name)
                self._came = True
            return True

    def _ready(self) -> None:
        if not self.reached():
            raise ClosedError(
                f"{self._awaited} is not there (yet): nothing answers at {self.where}. Build it "
                "from the arguments that attach() returned, and keep it"
            )

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
        """Name a new session, here until the engines have come.

        Raises:
            ConfigError: if the name is taken, or an argument is malformed.
        """
        if name is None:
            raise ConfigError("a session of several engines needs its name beforehand")
        fields = {"tenant": tenant, "ttl": ttl, "fidelity": fidelity, "salt": salt}
        if not self.reached():
            with self._guard:
                if not self._came:
                    known = self._waiting.get(name)
                    if known is not None and (not adopt or known != fields):
                        raise ConfigError(f"session {name!r} exists; destroy it first")
                    self._waiting[name] = fields
                    return name
        for client in self.clients:
            client.create_session(
                name, tenant=tenant, ttl=ttl, fidelity=fidelity, salt=salt, adopt=adopt
            )
        return name

    def knows_session(self, name: str) -> bool:
        """Whether there is a session of this name."""
        if not self.reached():
            return name in self._waiting
        return self.clients[0].knows_session(name)

    def clear_session(self, name: str) -> None:
        """As a manager's, on every rank."""
        self._ready()
        self._everywhere(lambda client: client.clear_session(name))

    def destroy_session(self, name: str) -> None:
        """As a manager's, on every rank: it never raises and never blocks."""
        self._waiting.pop(name, None)
        for client in self.clients:
            client.destroy_session(name)

    def sessions(self) -> list[SessionInfo]:
        """As a manager's; those that wait for the engines have nothing yet."""
        if not self.reached():
            return [
                SessionInfo(name, fields["tenant"], 0, 0, 0, 0, fields["ttl"])
                for name, fields in list(self._waiting.items())
            ]
        return self.clients[0].sessions()

    # ------------------------------------------------------------------ the whole

    def stats(self) -> EngineStats:
        """As a manager's, of the first rank."""
        self._ready()
        return self.clients[0].stats()

    def flush(self) -> FlushResult:
        """As a manager's, on every rank."""
        self._ready()
        return self._everywhere(lambda client: client.flush())

    def reset(self) -> int:
        """As a manager's, on every rank; how many copies the first one forgot."""
        self._ready()
        return self._everywhere(lambda client: client.reset())

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> list[BlockReport]:
        """As a manager's, of the first rank."""
        self._ready()
        return self.clients[0].explain(token_ids, session=session, space=space, media=media)

    def prefetch(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """As a manager's, on every rank."""
        self._ready()
        self._everywhere(lambda c: c.prefetch(token_ids, session=session, space=space, media=media))

    def hint(
        self,
        *,
        next_in: float | str | None = None,
        stop_reason: str | None = None,
        session: str | None = None,
        space: Space | None = None,
    ) -> None:
        """As a manager's, on every rank."""
        self._ready()
        self._everywhere(
            lambda client: client.hint(
                next_in=next_in, stop_reason=stop_reason, session=session, space=space
            )
        )

    def close(self) -> None:
        """End the connections; the engines go on. Idempotent."""
        for client in self.clients:
            client.close()

    def _everywhere(self, ask: Callable[[RemoteManager], _T]) -> _T:
        """Ask every rank, also behind one that failed.

        Returns:
            What the first one answered.

        Raises:
            TierKVError: the first error, once all were asked.
        """
        answers: list[_T] = []
        failures: list[TierKVError] = []
        for client in self.clients:
            try:
                answers.append(ask(client))
            except TierKVError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers[0]
