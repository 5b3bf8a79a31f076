"""Requests to a server, one at a time for each thread, and what their answers mean."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

from tierkv.errors import ConfigError, TierKVError
from tierkv_adapters.remote.connections import ANSWER_S, Connection, Connections
from tierkv_adapters.remote.records import READERS
from tierkv_adapters.remote.wire import WireError

if TYPE_CHECKING:
    import os
    from types import TracebackType

__all__ = ["Asking"]

_log = logging.getLogger("tierkv.remote")
_WAITS: Final = frozenset({"clear_session", "flush", "hold", "reset"})  # for turns, or for disks
_ONCE: Final = frozenset({"create_session", "hold"})  # asking twice is not the same as once


class Asking:
    """Asks the engine behind a socket, over as many connections as there are callers at once.

    Args:
        path: Of the socket.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._connections = Connections(self._path, self._renewed)
        self._line: Connection | None = None
        self._lining = threading.Lock()
        self._made: dict[str, dict[str, Any]] = {}
        self._marked: SimpleQueue[str] = SimpleQueue()  # reentrant: finalizers put into it
        self._settling = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self._connections.is_closed else "open"
        return f"<{type(self).__name__} of {self._path}: {state}>"

    @property
    def where(self) -> str:
        """Path of the socket."""
        return str(self._path)

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """End the connections; holds are released, the engine goes on. Idempotent."""
        with contextlib.suppress(TierKVError):
            self._settle()
        self._connections.close()
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def __enter__(self) -> Self:
        self._ask("stats")  # is anybody there?
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        connections = getattr(self, "_connections", None)  # None if the constructor failed
        if connections is not None:
            connections.close()
            if self._line is not None:
                self._line.close()

    def _lifeline(self) -> str:
        """Name of a connection that stays open until this is closed: holds are tied to it."""
        with self._lining:
            line = self._line
            if line is None or line.is_stale():
                if line is not None:
                    line.close()
                line = self._line = self._connections.take()
                if self._connections.is_closed:  # just now: whoever closed it saw no line
                    line.close()
                    self._connections.check()
            return line.line

    def _ask(self, op: str, body: bytes = b"", **fields: object) -> Any:
        """Ask the engine, and wait for its answer.

        Interruption: the connection is dropped; what was asked for may still be done there.
        """
        self._settle()
        header = {"op": op, **{k: v for k, v in fields.items() if v is not None}}
        within = None if op in _WAITS else ANSWER_S
        for last in (op in _ONCE, True):
            connection = self._connections.take()
            try:
                _, result = connection.ask(header, body, within)
            except (OSError, WireError) as error:
                connection.close()
                if last or isinstance(error, TimeoutError):
                    raise self._connections.gone(error) from error
                continue
            except TierKVError:
                self._connections.give_back(connection)
                raise
            except BaseException:
                connection.close()
                raise
            self._connections.give_back(connection)
            return self._read(op, result)
        raise AssertionError

    def _read(self, op: str, result: bytes) -> Any:
        try:
            data = json.loads(result)
            return READERS[op](data) if op in READERS else data
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"the engine at {self._path} answered {op!r} in a way that is not understood; "
                "use the same version of tierkv in both processes"
            ) from error

    def _renewed(self, connection: Connection) -> None:
        for name, fields in list(self._made.items()):
            try:
                connection.ask({"op": "create_session", **fields, "adopt": True})
            except ConfigError as error:
                _log.warning("session %r was not created anew: %s", name, error)

    def _settle(self) -> None:
        """Tell the engine which sessions were destroyed here, before it is asked anything else.

        Raises:
            ClosedError: if it is gone; the notes stay.
        """
        with self._settling:
            while not self._marked.empty():
                name = self._marked.get()
                connection = None
                try:
                    connection = self._connections.take()
                    connection.ask({"op": "destroy_session", "name": name})
                except BaseException as error:
                    self._marked.put(name)
                    if connection is not None:
                        connection.close()
                    if isinstance(error, OSError | WireError):
                        raise self._connections.gone(error) from error
                    raise
                self._connections.give_back(connection)
