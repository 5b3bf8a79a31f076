"""The life of a manager: open, call, close, and what happens to one that is forgotten."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tierkv.blocking.portal import EngineLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from tierkv.blocking.calls import Pending
    from tierkv.engine import CloseReport, Engine

__all__ = ["Lifetime"]

_T = TypeVar("_T")


class Lifetime:
    """Opens and closes a manager's engine, and carries calls to it."""

    def __init__(self, engine: Engine) -> None:
        self.config = engine.config
        self._loop = EngineLoop(engine)

    def open(self) -> Self:
        """Start the engine in a thread of its own.

        Raises:
            ClosedError: if it was opened before.
            ConfigError: if a setting cannot be honoured.
            BackendError: if a tier cannot be used.
        """
        self._loop.open()
        return self

    def close(self) -> CloseReport | None:
        """Write what is queued, sync and close. Idempotent, and bounded by ``close_timeout``.

        Calls that other threads are waiting for end with :class:`~tierkv.errors.ClosedError`.

        Returns:
            What was not written; None if the manager was never open, or its tiers hang.
        """
        return self._loop.close()

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
        loop = getattr(self, "_loop", None)  # None if the constructor failed
        if loop is not None and loop.is_open():
            loop.stop_soon()
            text = f"manager {self.config.name!r} was never closed"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    @property
    def engine(self) -> Engine:
        """The engine behind this manager; its methods belong to :meth:`call`.

        Raises:
            ClosedError: if the manager is not open.
        """
        return self._loop.engine

    def call(self, fn: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run ``await fn(*args)`` on the engine's loop and wait for the result.

        Interruption: a KeyboardInterrupt cancels the work, waits until it has ended, and is
        raised again; the manager stays usable.

        Raises:
            ClosedError: if the manager is not open, or is closed meanwhile.
            TierKVError: if called on the engine's own loop, which would wait for itself.
        """
        return self._loop.call(fn, *args)

    def submit(
        self,
        fn: Callable[..., Awaitable[_T]],
        *args: Any,
        done: Callable[[Pending[_T]], object] | None = None,
    ) -> Pending[_T]:
        """Start ``await fn(*args)`` on the engine's loop, and return at once.

        For callers that may not wait, such as the step of a serving engine. Any thread may call
        it; what one thread submits begins in that order. The work sees the context of the caller
        (:meth:`use_session`).

        Args:
            fn: What to run, with the engine's methods.
            *args: Its arguments.
            done: Called on the loop's thread, once, when the work has ended in whatever way, also
                when the manager is closed under it. It must not block; what it raises is logged.

        Returns:
            The work under way: ask it whether it has ended, wait for it, or cancel it.

        Raises:
            ClosedError: if the manager is not open; ``done`` is not called then.

        Interruption: work whose submission is interrupted is cancelled.
        """
        return self._loop.submit(fn, *args, done=done)
