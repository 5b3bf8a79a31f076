"""Machine code is tried before anything depends on it: once a process, on a sample, off the loop.

LLVM makes other instructions for each kind of processor, and nobody has seen all of them: what it
makes is used only if a sample comes out as library calls have it. Where LLVM refuses, or the sample
differs, the library calls go on, and the log says so.

Compiling takes up to some tenths of a second a piece. Where an event loop runs in the thread that
asks, or inside :func:`later`, nothing is compiled, nor is anything heavy imported: the answer is
none for now, and what was asked for is noted. :func:`catch_up` compiles it, in a thread that may
take so long. Nobody waits for a thread that compiles: others take library calls meanwhile. Only a
fork waits, as for :mod:`tierkv.jit.llvm`, so that no child is left with half a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, TypeVarTuple

from tierkv.jit.llvm import compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Refusal", "Tried", "behind", "catch_up", "later", "refusals"]

_log = logging.getLogger(__name__)
_LOOK_S: Final = 0.05
_GAP_S: Final = 0.001  # between pieces: a lock taken again at once passes by a fork that waits
_Code = TypeVar("_Code")
_Key = TypeVarTuple("_Key")


class Refusal(NamedTuple):
    """Machine code that is not used here.

    Attributes:
        family: What it belongs to, such as ``"lanes"``.
        name: Which of the family.
        why: What was wrong.
    """

    family: str
    name: str
    why: str


class _Mode(threading.local):
    notes = False


_mode = _Mode()
_wanted: dict[tuple[Tried[Any, *tuple[Any, ...]], tuple[Any, ...]], None] = {}
_refusals: list[Refusal] = []


class Tried(Generic[_Code, *_Key]):
    """Machine code of one family, made and tried on demand: call it with what it is made for.

    Args:
        family: For people; the log warns once of each.
        make: Compile; None where this machine has no use for it (nothing is logged then).
        right: Whether what was made gives, on a sample, what library calls give.
    """

    def __init__(
        self,
        family: str,
        make: Callable[[*_Key], _Code | None],
        right: Callable[[_Code, *_Key], bool],
    ) -> None:
        self.family = family
        self._make = make
        self._right = right
        self._known: dict[tuple[*_Key], _Code | None] = {}

    def __repr__(self) -> str:
        return f"<Tried {self.family}: {len(self._known)}>"

    def __call__(self, *key: *_Key) -> _Code | None:
        """The machine code; None where there is none, or none yet: then library calls do it."""
        try:
            return self._known[key]
        except KeyError:
            return self._asked(key)

    def known(self, *key: *_Key) -> bool:
        """Whether there is a verdict."""
        return key in self._known

    def settle(self, *key: *_Key) -> _Code | None:
        """As a call, but wait and compile, come what may: for threads that may take so long."""
        with compiling:
            if key not in self._known:
                self._try(key)
            return self._known[key]

    def _asked(self, key: tuple[*_Key]) -> _Code | None:
        if _mode.notes or _in_loop():
            _wanted[self, key] = None
            return None
        if not compiling.acquire(blocking=False):
            return None
        try:
            return self.settle(*key)
        finally:
            compiling.release()

    def _try(self, key: tuple[*_Key]) -> None:
        self._known[key] = None  # for the sample, too, which must not ask for what it is about
        before, _mode.notes = _mode.notes, False
        try:
            code = self._make(*key)
            if code is None or self._right(code, *key):
                self._known[key] = code
            else:
                self._refuse(key, "on a sample it does not do what library calls do")
        except Exception as error:  # noqa: BLE001 - whatever a compiler comes up with, we go on
            self._refuse(key, f"{type(error).__name__}: {error}")
        except BaseException:
            del self._known[key]
            raise
        finally:
            _mode.notes = before

    def _refuse(self, key: tuple[*_Key], why: str) -> None:
        name = ", ".join(map(str, key))
        again = any(refusal.family == self.family for refusal in _refusals)
        _refusals.append(Refusal(self.family, name, why))
        _log.log(
            logging.INFO if again else logging.WARNING,
            "machine code is not used for %s (%s), library calls do the same, slower: %s; other "
            "versions of numba and llvmlite (extra 'fast') may suit this processor",
            *(self.family, name, why),
        )


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Inside, this thread compiles nothing: what is asked for is noted for :func:`catch_up`."""
    before, _mode.notes = _mode.notes, True
    try:
        yield
    finally:
        _mode.notes = before


def catch_up(stopped: Callable[[], bool] = bool) -> int:
    """Compile and try what was asked for in vain, in this thread; how much of it there was.

    Args:
        stopped: Asked before each piece, and while another thread compiles; whatever is left is
            still noted afterwards.
    """
    done = 0
    while not stopped():
        try:
            tried, key = _wanted.popitem()[0]
        except KeyError:  # nothing is left; somebody else may have taken the last
            break
        if tried.known(*key):
            continue
        while not compiling.acquire(timeout=_LOOK_S):
            if stopped():
                _wanted[tried, key] = None
                return done
        try:
            tried.settle(*key)
        finally:
            compiling.release()
        time.sleep(_GAP_S)
        done += 1
    return done


def behind() -> bool:
    """Whether :func:`catch_up` has something to do."""
    return any(not tried.known(*key) for tried, key in list(_wanted))


def refusals() -> tuple[Refusal, ...]:
    """Everything that was refused in this process, oldest first."""
    return tuple(_refusals)
