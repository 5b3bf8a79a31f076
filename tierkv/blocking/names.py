"""Names of a manager's sessions, which of them is current, and the notes that dead ones leave."""

from __future__ import annotations

import contextlib
import itertools
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.layout import Space

__all__ = ["CurrentSession", "SessionEntry", "SessionFacts", "SessionNames"]

_T = TypeVar("_T")
# one variable for all managers: contexts keep their variables alive for ever
_CURRENT: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("tierkv-sessions", default=())
_serial = itertools.count(1)


class CurrentSession:
    """Which session of one manager is current in this thread or task."""

    def __init__(self) -> None:
        self._me = next(_serial)

    def get(self) -> str | None:
        """Name of the current session, or None."""
        return next((name for owner, name in _CURRENT.get() if owner == self._me), None)

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[str]:
        """Make ``name`` current while the block runs; nests."""
        others = (pair for pair in _CURRENT.get() if pair[0] != self._me)
        token = _CURRENT.set(((self._me, name), *others))
        try:
            yield name
        finally:
            # left in another context than it was entered in (a generator that was collected,
            # a framework that runs both halves in a pool): this context never had the name
            with contextlib.suppress(ValueError):
                _CURRENT.reset(token)


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """How a session is opened in the engine, and the spaces in which it was.

    ``spaces`` (by fingerprint) is changed on the engine's loop only.
    """

    name: str
    tenant: str
    ttl: float | None
    fidelity: str
    salt: bytes = field(repr=False)
    spaces: dict[bytes, Space] = field(default_factory=dict)

    def facts(self) -> tuple[object, ...]:
        """What it was created with."""
        return self.name, self.tenant, self.ttl, self.fidelity, self.salt


class SessionFacts(NamedTuple):
    """What a session was created with, for adapters that carry its name to another engine.

    Attributes:
        name: Its name.
        tenant: Whose it is.
        ttl: Seconds that its blocks live after their last use, or None.
        salt: Further secret that blocks must share to be reused.
        epoch: Changes whenever the session begins anew: it was created again, cleared, or reset.
    """

    name: str
    tenant: str
    ttl: float | None
    salt: bytes
    epoch: int


class SessionNames:
    """Which sessions exist. Thread-safe; no call waits for the engine.

    A name is buried in two steps, because ``__del__`` may run at any moment in any thread, even
    inside this class: :meth:`mark` only appends to a reentrant queue, and whatever is called
    next carries it out before it looks.
    """

    def __init__(self) -> None:
        self._known: dict[str, SessionEntry] = {}
        self._epochs: dict[str, int] = {}
        self._marked: SimpleQueue[str] = SimpleQueue()
        self._dead: SimpleQueue[SessionEntry] = SimpleQueue()
        self._guard = threading.RLock()

    def __len__(self) -> int:
        return len(self.all())

    def __contains__(self, name: object) -> bool:
        with self._guard:
            self._sweep()
            return name in self._known

    def add(self, entry: SessionEntry, *, adopt: bool = False) -> None:
        """Add a session; one that is there and was opened alike may be welcome.

        Raises:
            ConfigError: if the name is taken.
        """
        with self._guard:
            self._sweep()
            known = self._known.get(entry.name)
            if known is None:
                self._known[entry.name] = entry
                self._epochs[entry.name] = next(_serial)
            elif not adopt:
                raise ConfigError(
                    f"session {entry.name!r} exists; destroy it first, or use another name"
                )
            elif known.facts() != entry.facts():
                raise ConfigError(
                    f"session {entry.name!r} exists with another tenant, ttl, fidelity or salt; "
                    "destroy it first, or use another name"
                )

    def get(self, name: str) -> SessionEntry:
        """The session of this name.

        Raises:
            ConfigError: if there is none.
        """
        with self._guard:
            self._sweep()
            entry = self._known.get(name)
        if entry is None:
            raise ConfigError(f"no session {name!r}: create_session({name!r}) first")
        return entry

    def all(self) -> list[SessionEntry]:
        """Every session."""
        with self._guard:
            self._sweep()
            return list(self._known.values())

    def told(self, name: str) -> SessionFacts:
        """What a session was created with, and since when it has its history.

        Raises:
            ConfigError: if there is none of this name.
        """
        with self._guard:
            entry = self.get(name)
            return SessionFacts(name, entry.tenant, entry.ttl, entry.salt, self._epochs[name])

    def renew(self, *names: str) -> None:
        """Note that these sessions began anew: their history was dropped."""
        with self._guard:
            self._sweep()
            for name in names:
                if name in self._epochs:
                    self._epochs[name] = next(_serial)

    def mark(self, name: str) -> None:
        """Note that a session is gone. Never raises, never waits, reentrant."""
        self._marked.put(name)

    def dead(self) -> list[SessionEntry]:
        """Sessions gone since the last call; for the engine's loop."""
        with self._guard:
            self._sweep()
            return _drained(self._dead)

    def _sweep(self) -> None:
        # under the guard: else a name taken off the queue could still be known to the next call
        for name in _drained(self._marked):
            entry = self._known.pop(name, None)
            self._epochs.pop(name, None)
            if entry is not None:
                self._dead.put(entry)


def _drained(queue: SimpleQueue[_T]) -> list[_T]:
    out: list[_T] = []
    if queue.empty():  # nearly always, and much cheaper than the exception
        return out
    with contextlib.suppress(Empty):
        while True:
            out.append(queue.get_nowait())
    return out
