"""The engine on a loop in a thread of its own, and the portal that carries calls to it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from tierkv.engine import Engine
from tierkv.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from tierkv.config import EngineConfig
    from tierkv.engine import CloseReport

__all__ = ["EngineThread"]

_T = TypeVar("_T")
_NOT_OPEN = "the manager is not open: use it inside its 'with'"


class EngineThread:
    """Opens an engine in a daemon thread and calls it from any other thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._guard = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._report: CloseReport | None = None

    def open(self) -> Self:
        """Start the engine in its thread.

        Raises:
            ClosedError: if it was opened before.
            BackendError: if a tier cannot be used.
        """
        if self._thread is not None:
            raise ClosedError("a manager is opened once; make a new one")
        ready = threading.Event()
        # a daemon: a script that forgets close() must still end
        self._thread = threading.Thread(
            target=anyio.run,
            args=(self._serve, ready),
            name=f"{self.config.name}-loop",
            daemon=True,
        )
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    async def _serve(self, ready: threading.Event) -> None:
        engine = Engine(self.config)
        try:
            async with BlockingPortal() as portal:
                await engine.start()
                self._engine, self._portal = engine, portal
                ready.set()
                await portal.sleep_until_stopped()
        except Exception as error:  # noqa: BLE001 - open() raises it in the caller's thread
            self._failure = error
        finally:
            ready.set()

    def close(self) -> CloseReport | None:
        """Write what is queued, sync and close; bounded by ``close_timeout``. Idempotent."""
        with self._guard:
            portal, self._portal = self._portal, None
        if portal is None or self._engine is None or self._thread is None:
            return self._report
        self._report = portal.call(self._engine.aclose)
        with contextlib.suppress(RuntimeError):
            portal.call(portal.stop)
        self._thread.join()
        return self._report

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_portal", None) is not None:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)

    @property
    def engine(self) -> Engine:
        """The engine behind this manager; its methods belong to :meth:`call`.

        Raises:
            ClosedError: if the manager is not open.
        """
        if self._portal is None or self._engine is None:
            raise ClosedError(_NOT_OPEN)
        return self._engine

    def call(self, fn: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run ``await fn(*args)`` on the engine's loop and wait for the result.

        Raises:
            ClosedError: if the manager is not open.
        """
        portal = self._portal
        if portal is None:
            raise ClosedError(_NOT_OPEN)
        return portal.call(fn, *args)

    def poke(self, fn: Callable[..., object], *args: object) -> None:
        """Run ``fn(*args)`` on the loop soon, if there is one; never raises, never waits."""
        engine = self._engine
        if engine is not None and self._portal is not None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: nothing is left to do
                engine.call_soon_threadsafe(fn, *args)
