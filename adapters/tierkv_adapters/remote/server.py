"""Serves a manager to other processes of the same user, on the manager's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from typing import TYPE_CHECKING, Any, Final, Self

from tierkv.errors import ClosedError, ConfigError, TierKVError
from tierkv.workers import Signal
from tierkv_adapters.remote.ending import first_of
from tierkv_adapters.remote.holds import Holds
from tierkv_adapters.remote.listening import Listening, listen
from tierkv_adapters.remote.operations import Fields, Operations
from tierkv_adapters.remote.records import dump, error_to
from tierkv_adapters.remote.streams import Stream
from tierkv_adapters.remote.wire import (
    HEAD,
    WIRE,
    WireError,
    decode_header,
    encode,
    peer_is_me,
    sizes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from tierkv.blocking import CacheManager
    from tierkv.engine import Engine
    from tierkv.workers import Job

__all__ = ["RemoteServer"]

_log = logging.getLogger("tierkv.remote")
_MOST_CONNECTIONS: Final = 256
_HELLO_S: Final = 10.0
_LONG: Final = 200  # rows that take a millisecond to write


class RemoteServer:
    """Lets other processes of this user ask a manager, through a unix socket.

    It runs as jobs of the manager's engine: closing the manager closes it, and whatever a client
    sends ends at most that client's connection. Requests of one connection are answered in turn;
    those of different connections run side by side.

    Args:
        manager: What is served; open.
        path: Of the socket; its folder is made, or has to be this user's alone (0700).
        about: Tells, as JSON-like values, about what the manager serves here. Called on the loop.
    """

    def __init__(
        self,
        manager: CacheManager,
        path: str | os.PathLike[str],
        about: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._manager = manager
        self._wanted = path
        self._instance = secrets.token_hex(8)
        self._operations = Operations(manager, about)
        self._holds = Holds(manager, self._operations)
        self._stop = Signal()
        self._job: Job[None] | None = None
        self._listening: Listening | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def __repr__(self) -> str:
        state = "open" if self._job is not None and not self._job.done() else "closed"
        return f"<RemoteServer {os.fspath(self._wanted)}: {state}>"

    @property
    def path(self) -> str:
        """Absolute path of the socket.

        Raises:
            ClosedError: if it was never started.
        """
        if self._listening is None:
            raise ClosedError("this server was never started")
        return str(self._listening.path)

    # ------------------------------------------------------------------ life

    def start(self) -> Self:
        """Begin to serve; returns when clients can connect.

        Raises:
            ConfigError: if the path is taken by a living server or by something else, is too
                long, or its folder is open to others.
            ClosedError: if it was started before, or the manager is not open.
        """
        if self._listening is not None:
            raise ClosedError("a server is started once; make a new one")
        listening = listen(self._wanted)
        try:
            self._manager.call(self._start, listening)
        except BaseException:
            listening.close()
            raise
        self._listening = listening
        return self

    def close(self) -> None:
        """Stop serving: connections end, holds are released, the socket's file goes. Idempotent.

        Requests under way are not waited for; their clients see a closed connection.
        """
        if self._job is None:
            return
        with contextlib.suppress(ClosedError):  # the manager was closed, and this with it
            self._manager.call(self._end, self._job)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _start(self, listening: Listening) -> None:
        engine = self._manager.engine

        # a coroutine: jobs are started in a task, where anyio knows which library runs the loop
        async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                engine.workers.spawn(self._converse, engine, reader, writer, name="converse")
            except ClosedError:
                writer.transport.abort()

        server = await asyncio.start_unix_server(came, sock=listening.sock)
        try:
            self._job = engine.workers.spawn(
                self._until_stopped, engine.core.closing, server, listening, name="serve"
            )
        except BaseException:
            server.close()
            raise
        _log.info("serving %s at %s", engine.config.name, listening.path)

    async def _end(self, job: Job[None]) -> None:
        self._stop.set()
        with contextlib.suppress(TierKVError):
            await job.wait()

    async def _until_stopped(
        self, closing: Signal, server: asyncio.Server, listening: Listening
    ) -> None:
        try:
            await first_of(closing, self._stop)
        finally:
            self._stop.set()
            server.close()
            listening.close()
            self._holds.close()
            for writer in list(self._writers):
                writer.transport.abort()  # one that reads nothing is not waited for

    # ------------------------------------------------------------------ conversations

    async def _converse(
        self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        line = secrets.token_hex(8)
        self._writers.add(writer)
        try:
            if not peer_is_me(writer.get_extra_info("socket")):
                _log.warning("a process of another user was refused")
            elif len(self._writers) > _MOST_CONNECTIONS:
                error = error_to(ConfigError(f"{_MOST_CONNECTIONS} connections are open already"))
                writer.write(encode({"ok": False, "error": error}))
            elif not self._stop.is_set():
                self._holds.came(line)
                await self._answer_all(engine, reader, writer, line)
        except (ConnectionError, EOFError, TimeoutError):
            pass  # it is gone, or said nothing: so be it
        except WireError as error:
            _log.warning("a connection is closed: %s", error)
        finally:
            self._writers.discard(writer)
            self._holds.gone(line)
            # what the kernel has taken still arrives; a peer that reads nothing is given up
            writer.transport.abort()

    async def _answer_all(
        self,
        engine: Engine,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: str,
    ) -> None:
        async with asyncio.timeout(_HELLO_S):
            header, _ = await _receive(reader)
        if header.get("op") != "hello" or header.get("wire") != WIRE:
            told = f"this engine speaks version {WIRE} here; use the same version of tierkv"
            writer.write(encode({"ok": False, "error": error_to(ConfigError(told))}))
            return
        hello = {"ok": True, "wire": WIRE, "instance": self._instance, "line": line}
        hello["engine"] = engine.config.name
        writer.write(encode(hello))
        while True:
            await writer.drain()
            header, body = await _receive(reader)
            if header.get("op") == "subscribe":
                writer.write(encode({"ok": True}))
                stream = Stream(engine, writer)
                engine.workers.spawn(_until_gone, reader, stream, name="subscriber")
                await stream.run()
                return
            writer.write(await self._answer(Fields(header, body)))

    async def _answer(self, fields: Fields) -> bytes:
        """Carry a request out."""
        try:
            name = fields.get("op", str)
            operation = self._operations.table.get(name) or self._holds.table.get(name)
            if operation is None:
                raise ConfigError(f"there is no operation {name!r:.80}")
            result = await operation(fields)
            if isinstance(result, list) and len(result) > _LONG:
                body = await self._manager.engine.workers.run(dump, result)
            else:
                body = dump(result)
            return encode({"ok": True}, body)
        except Exception as error:  # noqa: BLE001 - the client hears of it; the engine goes on
            return encode({"ok": False, "error": error_to(error)})


async def _until_gone(reader: asyncio.StreamReader, stream: Stream) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read(1)  # a subscriber has nothing more to say: anything ends it
    stream.end()


async def _receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    header, body = sizes(await reader.readexactly(HEAD.size))
    data = await reader.readexactly(header + body)
    return decode_header(data[:header]), data[header:]
