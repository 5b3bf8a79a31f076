"""Names of a manager's sessions, and the notes that destroyed ones leave."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tierkv.errors import ConfigError

__all__ = ["SessionNames", "SessionOptions"]


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is opened in the engine, whatever the space."""

    tenant: str
    ttl: float | str | None
    fidelity: str
    salt: bytes


class SessionNames:
    """Which sessions exist. Thread-safe; no call waits for the engine.

    A name is buried in two steps, because ``__del__`` may run at any moment in any thread, even
    inside this class: :meth:`mark` only appends to a reentrant queue, and whatever is called
    next carries it out.
    """

    def __init__(self) -> None:
        self._known: dict[str, SessionOptions] = {}
        self._marked: SimpleQueue[str] = SimpleQueue()
        self._dead: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self.all())

    def add(self, name: str, options: SessionOptions) -> None:
        """Add a name.

        Raises:
            ConfigError: if it exists.
        """
        self._sweep()
        with self._guard:
            taken = name in self._known
            if not taken:
                self._known[name] = options
        if taken:
            raise ConfigError(f"session {name!r} exists; destroy it first, or use another name")

    def get(self, name: str) -> SessionOptions:
        """Options of a session.

        Raises:
            ConfigError: if there is none of that name.
        """
        self._sweep()
        options = self._known.get(name)
        if options is None:
            raise ConfigError(f"no session {name!r}: create_session({name!r}) first")
        return options

    def all(self) -> dict[str, SessionOptions]:
        """Every session."""
        self._sweep()
        return dict(self._known)

    def mark(self, name: str) -> None:
        """Note that a session is gone. Never raises, never waits, reentrant."""
        self._marked.put(name)

    def dead(self) -> list[tuple[str, str]]:
        """(name, tenant) of sessions gone since the last call; for the engine's loop."""
        self._sweep()
        out = []
        while True:
            try:
                out.append(self._dead.get_nowait())
            except Empty:
                return out

    def _sweep(self) -> None:
        while True:
            try:
                name = self._marked.get_nowait()
            except Empty:
                return
            options = self._known.pop(name, None)  # one dict operation: atomic, no lock
            if options is not None:
                self._dead.put((name, options.tenant))
