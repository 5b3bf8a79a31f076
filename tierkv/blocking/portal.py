"""The life of an engine on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import warnings
from typing import TYPE_CHECKING

import anyio

from tierkv.blocking.carrying import CallCarrier
from tierkv.errors import ClosedError
from tierkv.workers import Signal

if TYPE_CHECKING:
    from tierkv.engine import CloseReport, Engine

__all__ = ["EngineLoop"]

_log = logging.getLogger("tierkv.blocking")
_MARGIN_S = 5.0

_ending: set[EngineLoop] = set()
"""Loops that were told to close and have not ended."""


def _let_end() -> None:
    """Wait for those that are closing; while they still have threads to close with."""
    for loop in list(_ending):
        loop.join()


# Before atexit, and before the threads of executors end, which a close needs; in the standard
# library as long as those, who use it for just that, but not documented. Without it a close that is
# under way when the interpreter exits is cut short, and says so.
getattr(threading, "_register_atexit", bool)(_let_end)


class EngineLoop(CallCarrier):
    """Runs an engine on a loop in a daemon thread and carries calls to it. Thread-safe.

    The thread refers to this object, never to the manager: a manager that is forgotten can be
    collected, and says so.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.config.name)
        self._engine = engine
        self._stop: Signal | None = None
        self._stopping = self._over = False
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._report: CloseReport | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open() else "closed" if self._thread else "new"
        return f"<EngineLoop {self._name}: {state}, {len(self._pending)} calls>"

    @property
    def engine(self) -> Engine:
        """The engine; its methods belong to :meth:`call`.

        Raises:
            ClosedError: if it is not open.
        """
        if not self.is_open():
            raise self._closed()
        return self._engine

    def is_over(self) -> bool:
        """Whether it was closed, is being closed, or its engine is elsewhere."""
        return self._stopping or bool(self._moved)

    def moved(self, where: str) -> None:
        """Take no more calls: ``where``, a sentence, tells why, and where the engine is now."""
        with self._guard:
            self._moved = where
            self._accepting = False

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Start the loop and the engine.

        Raises:
            ClosedError: if it was opened before.
            ConfigError: if a setting cannot be honoured.
            BackendError: if a tier cannot be used. No thread is left behind.
        """
        with self._guard:
            if self._moved and self._thread is None:
                return  # there is nothing to open here
            if self._thread is not None:
                raise ClosedError("a manager is opened once; make a new one")
            self._pid = os.getpid()
            # a daemon: a script that forgets close() must still end
            self._thread = threading.Thread(
                target=self._main, name=f"{self._name}-loop", daemon=True
            )
            self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            # interrupted: nobody else will close what is being opened; and whoever owns its files
            # may remove them next
            self.close()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            self._thread.join()
            try:
                raise failure
            finally:
                del failure
        atexit.register(self._forgotten)

    def _main(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - raised by open(), or logged
            if self._ready.is_set():
                _log.exception("%s: the loop of the manager ended", self._name)
            self._failure = error
        finally:
            with self._guard:
                self._accepting, self._stopping, self._over = False, True, True
                _ending.discard(self)
                left = list(self._pending)
            for call in left:
                call.end(None, ClosedError("the loop of the manager ended"))
            atexit.unregister(self._forgotten)
            self._ready.set()

    async def _serve(self) -> None:
        engine, stop = self._engine, Signal()
        with self._guard:
            self._loop, self._stop = asyncio.get_running_loop(), stop
            if self._stopping:
                return
        try:
            await engine.start()
        except BaseException:
            await engine.aclose()
            raise
        try:
            async with asyncio.TaskGroup() as calls:
                with self._guard:
                    self._calls = calls
                    self._accepting = not self._stopping
                self._ready.set()
                await stop.wait()
                self._report = await engine.aclose()  # calls under way may end well meanwhile
                for call in list(self._pending):
                    call.abort()
        finally:
            await engine.aclose()  # for a loop that dies; else it was done above

    def close(self) -> CloseReport | None:
        """Close the engine and end the thread. Idempotent, from any number of threads.

        Bounded: after about ``close_timeout`` for each thing that hangs, the thread is given up.

        Returns:
            What was not written; None if it was never open, belongs to another process, or hangs.

        Raises:
            TierKVError: if called on the engine's own loop.
        """
        if self._thread is None or self._pid != os.getpid():
            return None
        self.refuse_inside()
        self.stop_soon()
        self.join()
        return self._report

    def join(self) -> None:
        """Wait for the thread that was told to end, for as long as things may take that hang."""
        thread, config = self._thread, self._engine.config
        if thread is None or self._pid != os.getpid():
            return
        thread.join(float(config.close_timeout) * (len(config.tiers) + 3) + _MARGIN_S)
        if thread.is_alive():
            _ending.discard(self)
            _log.error("%s: closing hangs; its thread is given up", self._name)

    def stop_soon(self) -> None:
        """Take no more calls and begin to close, without waiting."""
        with self._guard:
            self._accepting, self._stopping = False, True
            if self._thread is not None and not self._over:
                _ending.add(self)
            if self._loop is not None and self._stop is not None:
                # calls handed over before this are begun before it: none is lost
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._stop.set)

    def _forgotten(self) -> None:
        # the interpreter exits; worker threads are gone already, so nothing more can be written
        if self.is_open():
            self._accepting = False
            text = f"manager {self._name!r} was never closed: what was queued is not written"
            _log.warning("%s", text)
            warnings.warn(text, ResourceWarning, stacklevel=1)
