"""NVIDIA GPUs through torch; AMD's as well, as torch's ROCm build calls them ``cuda`` (untested).

Two streams beside the model's: one for what leaves the device, one for what comes in. Memory is
protected by events and by references held until they are done, not by ``record_stream``, which
delays reuse for as long as the allocator pleases. Nothing here calls Python from the driver.

*Faults.* After one, CUDA refuses everything until the process ends: every call here is then a
BackendError (or None, or False), which costs loads and stores their result and nobody a crash.

*CUDA graphs.* Captures of other threads are left alone (:mod:`tierkv.device.capture`). Work of a
stream that is being captured has not run and may never run: nothing waits for it, and what would
have to is a BackendError.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from tierkv.abc import Device
from tierkv.device.batched import find_batched_copy
from tierkv.device.capture import Beside
from tierkv.device.cuda_copies import SCRATCH_BYTES, CudaCopies, sort_out
from tierkv.device.cuda_streams import CudaEvent, CudaStream, Events
from tierkv.device.fold import FOLD_ALIGN, fold_tensors
from tierkv.device.keeping import Kept
from tierkv.device.kernels import find_piece_kernel
from tierkv.device.pinning import Pinned
from tierkv.device.plan import plan
from tierkv.device.polling import poll
from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tierkv.abc import Event, Move, Stream
    from tierkv.device.batched import BatchedCopy

__all__ = ["CLOSE_S", "CudaDevice"]

_log = logging.getLogger(__name__)

_PAGE: Final = 4096
CLOSE_S: Final = 10.0
"""Seconds that closing waits for a stream."""
_CAPTURING: Final = (
    "the calling thread is capturing a CUDA graph on its current stream; store and load outside of "
    "the capture"
)


_given_up: list[CudaDevice] = []


class CudaDevice(Device):
    """One GPU.

    Args:
        name: ``"cuda"`` (the first) or ``"cuda:N"``.
        cuda: Stands in for ``torch.cuda``.
        batched: Stands in for the runtime's batched copy; None: found if it is there.

    Raises:
        BackendError: if torch sees no such GPU, or cannot use it.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(
        self, name: str = "cuda:0", *, cuda: Any = None, batched: BatchedCopy | None = None
    ) -> None:
        import torch

        self._cuda = torch.cuda if cuda is None else cuda
        self._index = _find(name, self._cuda)
        self.name = f"cuda:{self._index}"
        self._memory = torch.device(self.name) if cuda is None else torch.device("cpu")
        self._kept = Kept()
        self._pinned = Pinned(self._cuda, self._index, self._memory)
        self._events = Events(self.name, self._cuda.Event)
        self._closed = False
        if batched is None and cuda is None:
            batched = find_batched_copy()
        self._copies = CudaCopies(self.name, self._pinned, batched)
        try:
            with self._here():
                self._stores, self._loads = (
                    CudaStream(
                        self._cuda.Stream(device=self._index), self._events, self._kept.let_go
                    )
                    for _ in range(2)
                )
        except RuntimeError as error:  # e.g. in a child that was forked after CUDA was used
            raise BackendError(self.name, f"torch cannot use it: {error}") from error
        self.stores: Stream = self._stores
        self.loads: Stream = self._loads
        # takes seconds; torch's copies do until then. Not a daemon: threads that are inside of
        # torch when the interpreter ends take the process down with a crash
        self._preparing = threading.Thread(target=self._prepare, name=self.name)
        if cuda is None:
            self._preparing.start()

    def _prepare(self) -> None:
        import torch

        try:
            with self._here():
                self._copies.kernel = find_piece_kernel(self._memory)
                # the weights of checksums: a first use of them waits for its stream
                fold_tensors([torch.zeros(FOLD_ALIGN, dtype=torch.uint8, device=self._memory)])
        except RuntimeError as error:  # no memory just now: later, then
            _log.info("%s: not prepared: %s", self.name, error)

    def ready(self) -> None:
        """Wait until the kernel for strided pieces is compiled, if there is one; for benchmarks."""
        if self._preparing.ident is not None:
            self._preparing.join()

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}: {self._copies.mode}>"

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Let torch's calls of this thread mean this GPU, and leave captures alone."""
        with Beside(), self._cuda.device(self._index):
            yield

    # ------------------------------------------------------------------ memory

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is in this GPU's memory."""
        return tensor.device == self._memory

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Fresh memory from torch's allocator; None instead of its out-of-memory error."""
        whole = self._fresh(nbytes + _PAGE)
        if whole is None:
            return None
        # torch may hand out memory that work of the calling thread's stream still uses
        before = self.current().record()
        try:
            for stream in (self._stores, self._loads):
                stream.wait(before)
        except BackendError as error:
            _log.warning("%s: no memory for the cache: %s", self.name, error)
            return None
        skip = -whole.data_ptr() % _PAGE
        return whole[skip : skip + nbytes]

    def _fresh(self, nbytes: int) -> torch.Tensor | None:
        """Memory that belongs to the calling thread's current stream, as torch sees it."""
        import torch

        try:
            # Asked first: before torch's allocator fails, it waits for the whole device and gives
            # all that it keeps for the model back. That is not worth a cache's memory.
            if nbytes > self.available() + _PAGE:
                return None
            with self._here():
                return torch.empty(nbytes, dtype=torch.uint8, device=self._memory)
        except (self._cuda.OutOfMemoryError, MemoryError):
            return None
        except (BackendError, RuntimeError) as error:
            _log.warning("%s: no memory for the cache: %s", self.name, error)
            return None

    def available(self) -> int:
        """Bytes that are free, and those that torch's allocator keeps unused.

        Raises:
            BackendError: if the device failed.
        """
        cuda = self._cuda
        try:
            with Beside():
                free = int(cuda.mem_get_info(self._index)[0])
                kept = cuda.memory_reserved(self._index) - cuda.memory_allocated(self._index)
        except RuntimeError as error:
            raise BackendError(self.name, f"the device failed: {error}") from error
        return max(free + int(kept) - _PAGE, 0)

    def pin(self, memory: memoryview) -> bool:
        """Register with CUDA, for every GPU. About a second for 4 GiB: use a thread and chunks.

        The first refusal is a warning; copies from and to memory that is not pinned are slower,
        and block the thread that submits them.
        """
        return self._pinned.register(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo :meth:`pin`; what this device did not register is left alone."""
        self._pinned.unregister(memory)

    # ------------------------------------------------------------------ work

    def current(self) -> Stream:
        """Torch's current stream of the calling thread, as it is now.

        A new object each time: the same handle may be another stream in another thread, or later.
        """
        try:
            with self._here():
                raw = self._cuda.current_stream(self._index)
                refuses = _CAPTURING if self._cuda.is_current_stream_capturing() else ""
        except RuntimeError as error:
            raw, refuses = None, f"the device failed: {error}"
        return CudaStream(raw, self._events, refuses=refuses)

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        """Submit one batch.

        Runs of 28 KiB and more go to the copy engine, in one call where the runtime has one;
        smaller and strided pieces pass through scratch memory of the device, by kernels. Host
        memory that is not pinned is copied by the driver while this call waits; what it is read
        from must then be final already.

        Raises:
            LayoutError: if the sides of a move do not fit, or none of them is on the device;
                nothing is submitted then.
            BackendError: if the device failed, or has no memory for it; part of the batch may have
                been submitted.
        """
        work = sort_out(plan(moves), self.owns)
        with self._submitting(stream, tuple(moves)) as on:
            self._copies.submit(work, on, self._scratch)

    def _scratch(self, on: CudaStream) -> torch.Tensor | None:
        """Scratch memory of a stream that is torch's current one."""
        if on.scratch is None:
            on.scratch = self._fresh(SCRATCH_BYTES)
        return on.scratch

    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Submit checksums; the result is in pinned memory. See :meth:`tierkv.abc.Device.folds`.

        Raises:
            BackendError: if the device failed, or has no memory for it.
            ValueError: for a section that is not contiguous bytes.
        """
        import torch

        touched: list[object] = [tuple(sections)]
        with self._submitting(stream, touched):
            numbers = fold_tensors(sections)
            pinned = self._memory.type != "cpu"
            out = torch.empty(len(sections), 2, dtype=torch.int64, pin_memory=pinned)
            touched.append(out)
            out.copy_(numbers, non_blocking=True)
        return out

    @contextmanager
    def _submitting(self, stream: Stream, touched: object) -> Iterator[CudaStream]:
        """Let torch's calls go to a stream; what they touch is kept until they ran."""
        import torch

        if not isinstance(stream, CudaStream):
            raise BackendError(self.name, f"{stream!r} is no stream of a GPU")
        stream.check()
        try:
            # the device first: a stream of another device than the thread's current one would
            # leave by making that one current, which costs hundreds of MiB of its memory
            with torch.inference_mode(), self._here(), self._cuda.stream(stream.raw):
                yield stream
        except RuntimeError as error:
            raise BackendError(self.name, f"cannot take work: {error}") from error
        finally:
            self._kept.keep(stream.record(), touched)  # some of it may be under way

    async def wait(self, event: Event) -> None:
        """Poll; of each stream only the oldest event, 50 us to 1 ms apart.

        Raises:
            BackendError: if the device failed.
        """
        if isinstance(event, CudaEvent):
            await event.stream.until(event)
        else:
            await poll(event.query)

    def close(self) -> None:
        """Wait for the engine's streams, let go of their memory and of registrations.

        Never raises: a device that failed does nothing any more. One that hangs is given up after
        10 s; what its work touches is then kept for as long as the process lives.
        """
        if self._closed:
            return
        self._closed = True
        self.ready()
        if all(_ends(stream.record()) for stream in (self._stores, self._loads)):
            self._stores.scratch = self._loads.scratch = None
            self._kept.clear()
            self._pinned.close()
        else:
            _log.error("%s hangs and is given up", self.name)
            _given_up.append(self)


def _ends(event: CudaEvent) -> bool:
    """Wait for an event in this thread, not for ever; whether it is over."""
    end = time.monotonic() + CLOSE_S
    try:
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(1e-4)
    except BackendError as error:
        _log.warning("closing over a failure: %s", error)
    return True


def _find(name: str, cuda: Any) -> int:
    """Number of the device of that name."""
    kind, _, number = name.partition(":")
    count = cuda.device_count() if cuda.is_available() else 0
    if not count:
        raise BackendError(
            name, "torch sees no GPU here; use a CUDA (or ROCm) build of torch, or device='cpu'"
        )
    if kind != CudaDevice.kind or not (number or "0").isdecimal() or int(number or 0) >= count:
        raise BackendError(name, f"no such device; there are {[f'cuda:{i}' for i in range(count)]}")
    return int(number or 0)
