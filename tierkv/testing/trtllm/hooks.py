"""Calling a connector's hooks: counted, timed by CPU, watched."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tierkv.testing.trtllm.violations import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Hooks", "Watch"]

_SYSTEM: Final = frozenset({"posix", "_socket", "_io", "io", "select", "fcntl", "mmap", "_ssl"})
"""Modules written in C whose functions and objects enter the kernel."""
_MEMORY: Final = (io.BytesIO, io.StringIO)
_FREE: Final = frozenset({"fspath", "getpid"})
"""Functions of theirs that need no kernel."""
_WAITS: Final = frozenset({"wait", "join"})


class Watch:
    """Sees what one call on this thread does: what enters the kernel or waits, and how much it is.

    It looks at calls, not at clocks: what it finds does not depend on how busy the machine is.

    Attributes:
        entered: The first call that did I/O, slept or waited; None: none did.
        calls: Calls of functions, Python's and C's, that were made.
    """

    def __init__(self) -> None:
        self.entered: str | None = None
        self.calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread inside the block."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.calls += 1
            code = frame.f_code
            if code.co_name in _WAITS and code.co_filename == threading.__file__:
                self.entered = self.entered or f"threading's {code.co_name}()"
        elif event == "c_call":
            self.calls += 1
            if self.entered is None and _enters(arg):
                caller = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self.entered = f"{arg.__qualname__}() called at {caller}"


def _enters(function: Any) -> bool:
    if function is time.sleep:
        return True
    holder = getattr(function, "__self__", None)
    if holder is not None and not isinstance(holder, type(sys)):
        return type(holder).__module__ in _SYSTEM and not isinstance(holder, _MEMORY)
    return function.__module__ in _SYSTEM and function.__name__ not in _FREE


class Hooks:
    """Calls hooks in the engine's place.

    Attributes:
        calls: Calls by the hook's name; a worker's hooks count once a rank.
        log: The names in order.
        cpu: CPU seconds of this thread per call, by name. System calls a hook makes are in it,
            what others do meanwhile is not. A watched call is slower.
        guarded: Whether matching is watched for I/O.
        match_calls: Function calls that each guarded match made.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.log: list[str] = []
        self.cpu: defaultdict[str, list[float]] = defaultdict(list)
        self.guarded = True
        self.match_calls: list[int] = []

    def call(self, target: object, name: str, *args: Any) -> Any:
        """What the hook returns.

        Raises:
            Violation: ``signature``: there is no such hook. ``hook-raised``.
        """
        hook = getattr(target, name, None)
        if hook is None:
            raise Violation("signature", f"{type(target).__name__} has no {name}")
        return self.run(name, hook, *args)

    def run(self, name: str, hook: Any, *args: Any) -> Any:
        """Call what was looked up before."""
        self.calls[name] += 1
        self.log.append(name)
        before = time.thread_time()
        try:
            return hook(*args)
        except Exception as error:
            raise Violation("hook-raised", f"{name} raised {error!r}") from error
        finally:
            self.cpu[name].append(time.thread_time() - before)

    def match(self, target: object, *args: Any) -> Any:
        """``get_num_new_matched_tokens``, watched.

        Raises:
            Violation: ``io-in-match``, beside what :meth:`call` raises.
        """
        if not self.guarded:
            return self.call(target, "get_num_new_matched_tokens", *args)
        watch = Watch()
        with watch.watching():
            answer = self.call(target, "get_num_new_matched_tokens", *args)
        self.match_calls.append(watch.calls)
        if watch.entered is not None:
            raise Violation("io-in-match", watch.entered)
        return answer

    def optional(self, target: object, name: str, *args: Any) -> Any:
        """Call a hook that a connector need not have; None where it has none."""
        return self.call(target, name, *args) if hasattr(target, name) else None
