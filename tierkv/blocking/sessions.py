"""The sessions of a manager, and the spaces that they live in."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from typing import TYPE_CHECKING

from tierkv.blocking.lifetime import Lifetime
from tierkv.blocking.names import CurrentSession, SessionEntry, SessionFacts, SessionNames
from tierkv.errors import ClosedError, ConfigError, TierKVError
from tierkv.session import SessionInfo
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from tierkv.blocking.elsewhere import Elsewhere
    from tierkv.engine import Engine
    from tierkv.layout import Space
    from tierkv.session import Session

__all__ = ["NamedSessions"]

_FIDELITIES = ("exact", "lossy")


class NamedSessions(Lifetime):
    """Names sessions and opens them in the engine."""

    def __init__(self, engine: Engine, space: Space | None, fidelity: str) -> None:
        super().__init__(engine)
        self._fidelity = fidelity
        self._spaces: dict[bytes, Space] = {}
        self._names = SessionNames()
        self._current = CurrentSession()
        self._there: Elsewhere | None = None  # the engine that this manager was handed over to
        if space is not None:
            self.bind(space)

    def __repr__(self) -> str:
        state = "open" if self._loop.is_open() else "closed"
        if self._there is not None:
            state = f"handed over to {self._there.where}"
        return f"<{type(self).__name__} {self.config.name}: {state}, {len(self._names)} sessions>"

    # ------------------------------------------------------------------ spaces

    def bind(self, space: Space) -> None:
        """Make a space known; adapters do it when they attach. Idempotent."""
        self._spaces.setdefault(space.fingerprint, space)

    def space(self, wanted: Space | bytes | None = None) -> Space:
        """The space to work in: the one named, or the only one bound.

        Args:
            wanted: A space, or the fingerprint of one that is bound.

        Raises:
            ConfigError: if none was bound, or several were and none is named, or none that is
                bound has this fingerprint.
        """
        if isinstance(wanted, bytes):
            if (found := self._spaces.get(wanted)) is None:
                raise ConfigError(f"no space {wanted.hex():.16}... is bound to this manager")
            return found
        if wanted is not None:
            return wanted
        bound = list(self._spaces.values())
        if len(bound) == 1:
            return bound[0]
        many = f"{len(bound)} spaces are" if bound else "no space is"
        raise ConfigError(f"{many} bound to this manager: attach a model, or name space=")

    def leave(self, spaces: Iterable[Space]) -> None:
        """Forget all sessions in spaces that are over, for adapters: on the engine's loop only.

        Their names stay, and what they have in other spaces.
        """
        gone = list(spaces)
        for entry in self._names.all():
            for space in gone:
                if entry.spaces.pop(space.fingerprint, None) is not None:
                    self.engine.forget_session(entry.name, tenant=entry.tenant, space=space)

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
        """Name a new session and return its name.

        Args:
            name: Unique in this manager; None makes one up.
            tenant: Whose it is; tenants never share blocks.
            ttl: How long its blocks live after their last use, e.g. ``"6h"``.
            fidelity: ``"exact"`` or ``"lossy"``; None takes ``"lossy"`` if this manager was
                configured with lossy compression, else ``"exact"``.
            salt: Further secret that blocks must share to be reused.
            adopt: Whether a session of this name that exists is taken as it is, if it was created
                with the same arguments.

        Raises:
            ConfigError: if the name is taken, or an argument is malformed.
        """
        name = name if name is not None else str(uuid.uuid4())
        if not name or not isinstance(name, str):
            raise ConfigError(f"a session's name is a non-empty string, not {name!r}")
        if not isinstance(tenant, str):
            raise ConfigError(f"tenant is a text, not {tenant!r:.80}; leave it out for none")
        if not isinstance(salt, bytes):
            raise ConfigError(f"salt is bytes, not {salt!r:.80}")
        fidelity = fidelity if fidelity is not None else self._fidelity
        if fidelity not in _FIDELITIES:
            raise ConfigError(f"fidelity must be 'exact' or 'lossy', not {fidelity!r}")
        seconds = None if ttl is None else parse_duration(ttl)
        entry = SessionEntry(name, tenant, seconds, fidelity, salt)
        if self._there is not None:
            self._create_there(entry, self._there, adopt=adopt)
            self._names.dead()  # nobody else buries them any more
            adopt = True
        self._names.add(entry, adopt=adopt)
        if self._there is not None:  # in case that it was handed over just now
            self._create_there(entry, self._there)
        return name

    @staticmethod
    def _create_there(entry: SessionEntry, there: Elsewhere, *, adopt: bool = True) -> None:
        there.create_session(
            entry.name,
            tenant=entry.tenant,
            ttl=entry.ttl,
            fidelity=entry.fidelity,
            salt=entry.salt,
            adopt=adopt,
        )

    def knows_session(self, name: str) -> bool:
        """Whether there is a session of this name."""
        if name in self._names:
            return True
        return self._there is not None and self._there.knows_session(name)

    def session_facts(self, name: str) -> SessionFacts:
        """What a session was created with, for adapters that keep its prompt themselves.

        Its ``epoch`` changes when the session begins anew: created again, cleared or reset through
        this manager.

        Raises:
            ConfigError: if there is no such session, or only others created it in the engine that
                this manager was handed over to: ``create_session(name, adopt=True)`` then.
        """
        return self._names.told(name)

    def use_session(self, name: str) -> AbstractContextManager[str]:
        """Make a session the current one of this thread or task while the block runs; nests.

        It is a context variable: it crosses awaits, and other threads and tasks do not see it.
        As usual, a task started inside the block begins with a copy.

        Raises:
            ConfigError: if there is no such session.
        """
        if not self.knows_session(name):
            self._names.get(name)  # says so
        return self._current.use(name)

    def current_session(self) -> str | None:
        """Name of the session that :meth:`use_session` made current here, or None."""
        return self._current.get()

    def handle(self, name: str | None = None, space: Space | None = None) -> Session:
        """A handle on a session, for adapters: on the engine's loop only (inside :meth:`call`).

        Raises:
            ConfigError: if there is no such session, or no space to work in.
            TierKVError: in any other thread: an engine belongs to its loop.
        """
        if not self._loop.is_inside():
            raise TierKVError("handles belong to the engine's loop: use manager.call(...)")
        entry = self._names.get(self._named(name))
        space = self.space(space)
        self._bury()
        session = self.engine.session(
            entry.name,
            tenant=entry.tenant,
            ttl=entry.ttl,
            fidelity=entry.fidelity,
            salt=entry.salt,
            space=space,
        )
        entry.spaces[space.fingerprint] = space
        return session

    def _named(self, name: str | None) -> str:
        name = name if name is not None else self.current_session()
        if name is None:
            raise ConfigError("no session is current: name session=, or use 'with use_session(id)'")
        return name

    def clear_session(self, name: str) -> None:
        """Drop a session's history, references and private tail; the name stays.

        A turn that runs on it is waited for. Shared blocks stay until they are evicted.

        Raises:
            ConfigError: if there is no such session.
            SessionBusyError: if a turn runs and the engine is set to refuse a second one.
        """
        if self._there is not None:
            self._there.clear_session(name)
            self._names.renew(name)
        else:
            self.call(self.aclear_session, name)

    async def aclear_session(self, name: str) -> None:
        """As :meth:`clear_session`, on the engine's loop."""
        entry = self._names.get(name)
        for space in list(entry.spaces.values()):
            async with self.handle(entry.name, space) as session:
                await session.begin_turn()
                try:
                    session.clear()
                finally:
                    session.end_turn()
        self._names.renew(name)

    def destroy_session(self, name: str) -> None:
        """Drop a session and its name. Idempotent; never raises, never blocks.

        Safe in ``__del__``, in any thread, after :meth:`close` and while the interpreter exits:
        it only leaves a note, which every later call honours first.
        """
        try:
            self._names.mark(name)
            if self._there is not None:
                self._there.destroy_session(name)
            else:
                self._loop.soon(self._bury_in_passing)
        except Exception:  # noqa: BLE001 - while the interpreter exits, anything may be gone
            pass

    def _bury_in_passing(self) -> None:
        with contextlib.suppress(ClosedError):  # closed meanwhile: no session is left to forget
            self._bury()

    def _bury(self) -> None:
        for entry in self._names.dead():
            for space in entry.spaces.values():
                self.engine.forget_session(entry.name, tenant=entry.tenant, space=space)

    def sessions(self) -> list[SessionInfo]:
        """Snapshot of every session that was created and not destroyed.

        One that is used in several spaces shows its longest history, and its bytes in all.
        """
        if self._there is not None:
            return self._there.sessions()
        return self.call(self.asessions)

    async def asessions(self) -> list[SessionInfo]:
        """As :meth:`sessions`, on the engine's loop."""
        entries = self._names.all()
        self._bury()
        known: dict[tuple[str, str], SessionInfo] = {}
        for info in sorted(self.engine.sessions(), key=lambda i: i.tokens):
            key = info.tenant, info.id
            if (other := known.get(key)) is not None:
                info = dataclasses.replace(
                    info, nbytes=info.nbytes + other.nbytes, handles=info.handles + other.handles
                )
            known[key] = info
        return [
            known.get((e.tenant, e.name)) or SessionInfo(e.name, e.tenant, 0, 0, 0, 0, e.ttl)
            for e in entries
        ]
