"""Virtual time: an event loop whose clock jumps, and media that cost time on it.

For measurements that must come out the same on every machine: :func:`run_virtual` runs a program
on a loop that, whenever nothing is ready, moves its clock to the next timer instead of sleeping.
Work given to threads is done at once, in the call that gives it, and takes no time; what takes time
is what says so: :class:`Throttled` backends and :class:`VirtualDevice`.

Limits: threads that the program starts itself are outside of this time, and so are sockets; a
program that waits for them while a timer is running gets time-outs at once.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

from tierkv.abc import Backend, Event, Stream
from tierkv.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    import torch

    from tierkv.abc import (
        BackendStats,
        IoResult,
        Move,
        ReadRequest,
        StoredPart,
        Threads,
        WriteItem,
    )
    from tierkv.blocks import PartId

__all__ = ["Throttled", "VirtualDevice", "VirtualLoop", "VirtualStream", "run_virtual"]

_T = TypeVar("_T")

_ROUNDING_S: Final = 1e-9  # sums of seconds are not exact
_GUARD_S: Final = 60.0  # real seconds without timer, thread or I/O after which a program hangs


class _Jumping(selectors.DefaultSelector):
    """A selector that moves a clock instead of waiting for a timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:  # no timer: something outside has to come
            events = super().select(_GUARD_S)
            if not events:
                raise RuntimeError("the program waits for something that can never happen")
        elif timeout > 0:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose :meth:`time` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now


@contextmanager
def _threads_at_once() -> Iterator[None]:
    """Let pools run what this thread submits in the call itself."""
    owner, real = threading.get_ident(), ThreadPoolExecutor.submit

    def submit(
        self: ThreadPoolExecutor, fn: Callable[..., _T], /, *args: Any, **kwargs: Any
    ) -> Future[_T]:
        if threading.get_ident() != owner:
            return real(self, fn, *args, **kwargs)
        if self._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        done: Future[_T] = Future()
        done.set_running_or_notify_cancel()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as in a thread: whoever waits gets it
            done.set_exception(error)
        return done

    ThreadPoolExecutor.submit = submit  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = real  # type: ignore[method-assign]


def run_virtual(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a program in virtual time, in a loop of its own, and return its result.

    Give an engine that runs in it ``clock=asyncio.get_running_loop().time``.

    Raises:
        RuntimeError: if it waits for what can never happen.
    """
    with _threads_at_once(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def _now() -> float:
    return asyncio.get_running_loop().time()


# --------------------------------------------------------------------------- device


class _Due(Event):
    """Done when the loop's clock has come to ``at``."""

    __slots__ = ("at", "device")

    def __init__(self, device: VirtualDevice, at: float) -> None:
        self.device = device
        self.at = at

    def query(self) -> bool:
        self.device.settle()
        return _now() >= self.at - _ROUNDING_S

    def synchronize(self) -> None:
        if not self.query():
            raise RuntimeError("a thread cannot block in virtual time: await device.wait(event)")


class VirtualStream(Stream):
    """Work that takes time on the loop's clock, one piece after the other.

    Attributes:
        free_at: When everything submitted so far is done.
        busy_s: Seconds of work so far.
    """

    __slots__ = ("_device", "busy_s", "free_at")

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.free_at = 0.0
        self.busy_s = 0.0

    def record(self) -> Event:
        """Return an event behind everything submitted so far."""
        return _Due(self._device, max(self.free_at, _now()))

    def wait(self, event: Event) -> None:
        """Begin what is submitted from now on when ``event`` is done, or later."""
        if isinstance(event, _Due):
            self.free_at = max(self.free_at, event.at)
        elif not event.query():
            raise RuntimeError(f"{event!r} is not of this virtual time")

    def submit(self, seconds: float, run: Callable[[], object] | None = None) -> None:
        """Work of ``seconds``, at whose end ``run()`` happens."""
        self.free_at = max(self.free_at, _now()) + seconds
        self.busy_s += seconds
        if run is not None:
            self._device.later(self.free_at, run)


class _Pending(NamedTuple):
    at: float
    number: int
    run: Callable[[], object]


class VirtualDevice(CpuDevice):
    """CPU memory as a device whose copies take ``latency + bytes / bandwidth`` of virtual time.

    A copy happens at the end of its time. Directions do not share bandwidth. Only inside
    :func:`run_virtual`; give it to an engine with ``devices.add``.

    Args:
        bandwidth: Bytes a second in each direction.
        latency: Seconds for each submission.
        fold_bandwidth: Bytes a second of checksums; None: they take no time.

    Attributes:
        compute: The model's stream; ``compute.submit(seconds, fn)`` stands for a kernel.
    """

    kind: ClassVar[str] = "virtual"

    def __init__(
        self, bandwidth: float, latency: float = 0.0, fold_bandwidth: float | None = None
    ) -> None:
        super().__init__()
        self.name = "virtual:0"
        self.bandwidth, self.latency, self.fold_bandwidth = bandwidth, latency, fold_bandwidth
        self.stores: Stream = VirtualStream(self)
        self.loads: Stream = VirtualStream(self)
        self.compute = VirtualStream(self)
        self._pending: list[_Pending] = []
        self._number = 0

    def current(self) -> Stream:
        """The model's stream."""
        return self.compute

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        """Submit a batch; it happens at the end of its time."""
        nbytes = sum(move.source.numel() * move.source.element_size() for move in moves)
        kept = list(moves)
        seconds = self.latency + nbytes / self.bandwidth
        self._on(stream).submit(seconds, lambda: CpuDevice.copy(self, kept, stream))

    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Submit checksums; they happen at the end of their time."""
        import torch

        numbers = torch.zeros(len(sections), 2, dtype=torch.int64)
        kept = list(sections)
        nbytes = sum(section.numel() for section in kept)
        seconds = nbytes / self.fold_bandwidth if self.fold_bandwidth else 0.0
        self._on(stream).submit(seconds, lambda: numbers.copy_(CpuDevice.folds(self, kept, stream)))
        return numbers

    def later(self, at: float, run: Callable[[], object]) -> None:
        """Let ``run()`` happen at ``at``."""
        self._number += 1
        heapq.heappush(self._pending, _Pending(at, self._number, run))

    def settle(self) -> None:
        """Do what is due by now, in the order of time."""
        while self._pending and self._pending[0].at <= _now() + _ROUNDING_S:
            heapq.heappop(self._pending).run()

    async def wait(self, event: Event) -> None:
        """Sleep on the loop until the event's time."""
        while not event.query():  # noqa: ASYNC110 - the time is known: it sleeps once
            await asyncio.sleep(event.at - _now() if isinstance(event, _Due) else 1e-3)

    def close(self) -> None:
        """Do what is pending, whatever the time is."""
        while self._pending:
            heapq.heappop(self._pending).run()

    def _on(self, stream: Stream) -> VirtualStream:
        if not isinstance(stream, VirtualStream):
            raise TypeError(f"{stream!r} is no stream of this device")
        return stream


# --------------------------------------------------------------------------- backend


class Throttled(Backend):
    """A backend whose reads and writes take ``latency + bytes / bandwidth`` of the loop's time.

    One transfer at a time, in the order of calls; a memory tier becomes a plain one.

    Args:
        inner: Who holds the bytes.
        bandwidth: Bytes a second.
        latency: Seconds for each batch.
        duplex: Whether a read and a write can go on at the same time.

    Attributes:
        busy_s: Seconds of transfers so far.
        batches: Calls of ``read`` and ``write`` so far.
    """

    kind: ClassVar[str] = "throttled"

    def __init__(
        self, inner: Backend, bandwidth: float, latency: float = 0.0, *, duplex: bool = False
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.durable = inner.durable  # type: ignore[misc]
        self.bandwidth, self.latency = bandwidth, latency
        self.busy_s = 0.0
        self.batches = 0
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock() if duplex else self._reading

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Open the inner backend."""
        return await self.inner.open(threads)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Wait for the medium, take the time, read."""
        async with self._reading:
            await self._transfer(sum(request.length for request in requests))
            return await self.inner.read(requests, into)

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Wait for the medium, take the time, write."""
        async with self._writing:
            await self._transfer(sum(item.stored.nbytes for item in items))
            return await self.inner.write(items)

    async def _transfer(self, nbytes: int) -> None:
        seconds = self.latency + nbytes / self.bandwidth
        self.busy_s += seconds
        self.batches += 1
        await asyncio.sleep(seconds)

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Delete at once."""
        await self.inner.delete(parts)

    async def flush(self) -> None:
        """Flush at once."""
        await self.inner.flush()

    async def aclose(self) -> None:
        """Close the inner backend."""
        await self.inner.aclose()

    def charge(self, nbytes: int) -> int:
        """As the inner backend charges."""
        return self.inner.charge(nbytes)

    def longest(self, charged: int) -> int:
        """As the inner backend says."""
        return self.inner.longest(charged)

    def stats(self) -> BackendStats:
        """Of the inner backend."""
        return self.inner.stats()
