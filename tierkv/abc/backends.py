"""Media that hold frames, and the memory and threads they are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.abc.devices import Device, Event
    from tierkv.blocks import BlockKey, PartId
    from tierkv.frame import Header

__all__ = [
    "OK",
    "Backend",
    "BackendStats",
    "Buffer",
    "DeviceBuffer",
    "IoResult",
    "IoStatus",
    "MemoryBackend",
    "ReadRequest",
    "Resident",
    "ResidentBackend",
    "StoredPart",
    "Threads",
    "WriteItem",
]

_T = TypeVar("_T")


class Threads(Protocol):
    """The door to worker threads that the engine hands to its parts."""

    async def run(self, fn: Callable[..., _T], /, *args: object) -> _T:
        """Run ``fn(*args)`` in a worker thread.

        Returns (or raises) only once the thread is done, even if the caller is cancelled
        meanwhile: the cancellation is re-raised afterwards.
        """


class Buffer(Protocol):
    """A writable, page-aligned piece of engine-owned memory.

    ``memory`` is exactly ``nbytes`` long; the memory behind it reaches to the next multiple of
    4 KiB (``padded``), so that it can be read and written with O_DIRECT. Whoever holds the buffer
    owns it until :meth:`release`; a view of ``memory`` must not outlive that.
    """

    @property
    def nbytes(self) -> int:
        """Requested length in bytes."""

    @property
    def memory(self) -> memoryview:
        """The requested bytes, format ``B``, writable."""

    @property
    def padded(self) -> memoryview:
        """The same memory, rounded up to 4 KiB."""

    def release(self) -> None:
        """Give the memory back; idempotent, callable from any thread."""


class DeviceBuffer(Protocol):
    """A piece of a device's memory that belongs to the engine; a whole number of 4 KiB pages."""

    @property
    def nbytes(self) -> int:
        """Requested length in bytes."""

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory: uint8 ``[page_round(nbytes)]`` on the device, contiguous."""

    def release(self, after: Event | None = None) -> None:
        """Give the memory back once ``after`` (the last work that touches it) is done.

        Idempotent, callable from any thread, never blocks.
        """


class Resident(NamedTuple):
    """A frame in a device's memory, and its header, which the host keeps as well."""

    header: Header
    buffer: DeviceBuffer


class IoStatus(Enum):
    """How one request of a batch ended."""

    OK = "ok"
    MISSING = "missing"  # not there (any more), or another generation is
    SHORT = "short"  # fewer bytes than asked for
    FULL = "full"  # no room
    ERROR = "error"  # the medium failed; see IoResult.error


class IoResult(NamedTuple):
    """Result of one request of a batch; ``error`` carries the cause of ERROR."""

    status: IoStatus
    error: BaseException | None = None


OK = IoResult(IoStatus.OK)


class ReadRequest(NamedTuple):
    """A byte range of one stored frame.

    Attributes:
        part: Which part.
        generation: Which publication of it; another one is MISSING.
        offset: First byte inside the frame; any value.
        length: Bytes to read; ``offset + length`` may not pass the stored length rounded up
            to 4 KiB (bytes after the stored length are undefined).
    """

    part: PartId
    generation: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a tier knows about a part beside its bytes; survives a restart on durable tiers.

    Attributes:
        part: Which part.
        generation: Number of this publication; greater is newer, across restarts.
        parent: Key of the block before, or None for block 0.
        root: Root of its key chain (space + tenant); lets recovery group parts by space.
        nbytes: Length of the frame in bytes.
        tenant: Tenant that stored it.
        exact: Whether the KV was computed without any lossy ancestor or budget.
        lossless: Whether this copy's codec chain is lossless.
        expires: Wall-clock time (``time.time()``) at which it expires, or None.
    """

    part: PartId
    generation: int
    parent: BlockKey | None
    root: BlockKey
    nbytes: int
    tenant: str = ""
    exact: bool = True
    lossless: bool = True
    expires: float | None = None


class WriteItem(NamedTuple):
    """One frame to write: what it is, and the buffer that holds its ``stored.nbytes`` bytes."""

    stored: StoredPart
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class BackendStats:
    """Snapshot of one backend.

    Attributes:
        entries: Parts that a read would find.
        live_bytes: Bytes charged for those parts (see :meth:`Backend.charge`).
        disk_bytes: Real bytes of everything under the root, as ``du`` counts; 0 for memory.
        capacity_bytes: Limit for ``live_bytes`` and ``disk_bytes``.
        mode: How bytes really travel here, e.g. ``"o_direct"``, ``"buffered"``, ``"memory"``.
        details: Further named figures for people and tests. ``"usable_bytes"``, known before
            the tier is opened too, is the part of the capacity that frames can count on.
    """

    entries: int
    live_bytes: int
    disk_bytes: int
    capacity_bytes: int
    mode: str
    details: dict[str, float] = field(default_factory=dict)


class Backend(ABC):
    """One medium that holds frames. Batch-first; decides nothing.

    *Who calls.* Only the engine's own tasks, on one event loop; several batches may be in flight
    at once. The engine never reads a part that it deletes, and never writes a part twice at once.

    *Cancellation.* Callers are engine-owned and are cancelled only by ``aclose``. A backend must
    not return (or raise) while a thread or device may still touch a buffer of that call.

    *Faults.* ``read`` and ``write`` report per item and raise nothing for the medium's faults.
    ``open`` raises :class:`~tierkv.errors.BackendError`.

    *Trust.* Bytes are verified by the engine, not here; lengths are checked here.
    """

    kind: ClassVar[str]
    durable: ClassVar[bool] = False
    """Whether parts survive the process."""
    shared: ClassVar[bool] = False
    """Whether other processes use the same medium: an I/O error says nothing of the bytes then."""

    name: str
    """Name of the tier, unique in the engine."""

    @abstractmethod
    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Take possession; return what is already stored (empty for volatile media).

        Raises:
            BackendError: if the medium cannot be used; nothing is then left open.
        """

    @abstractmethod
    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Fill ``into[i]`` (exactly ``requests[i].length`` bytes) for each request.

        A result other than OK leaves that buffer undefined.
        """

    @abstractmethod
    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Store frames; each OK item is readable at once, each other one not at all.

        A part already stored is replaced by the newer generation; an older one is refused
        with MISSING.
        """

    @abstractmethod
    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget (part, generation) pairs; an absent or newer one is left alone. Idempotent."""

    async def flush(self) -> None:  # noqa: B027 - volatile media have nothing to do
        """Make every completed write and delete survive a crash of the machine.

        Raises:
            BackendError: if the medium refuses.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything; idempotent."""

    @abstractmethod
    def charge(self, nbytes: int) -> int:
        """Bytes of capacity that a frame of ``nbytes`` takes here (>= nbytes). Pure."""

    def longest(self, charged: int) -> int:
        """Most bytes that a frame charged so many can have; the inverse of :meth:`charge`. Pure.

        Rounded up to whole pages it must equal the frame's own pages: so much may be read of it.
        """
        return charged

    @abstractmethod
    def stats(self) -> BackendStats:
        """Snapshot; cheap, callable from any thread."""


class MemoryBackend(Backend):
    """A tier whose bytes the engine can address: frames are built in place and read in place."""

    @property
    def whole(self) -> memoryview | None:
        """All of its memory while it is open, for an accelerator to register; None: it cannot."""
        return None

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer | None:
        """Return memory for a frame, or None when no slab of that size is free now."""

    @abstractmethod
    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        """Publish a filled buffer from :meth:`allocate` without a copy.

        The backend owns the buffer from here on. False (buffer still the caller's) if a newer
        generation is already there.
        """

    @abstractmethod
    def borrow(self, part: PartId, generation: int) -> Buffer | None:
        """The frame in place, or None: a Buffer whose ``release`` does nothing.

        Valid while the caller's lease on the part lasts; must not be written.
        """

    def look(self, part: PartId, generation: int) -> memoryview | None:
        """The ``memory`` of what :meth:`borrow` gives, or None.

        For blocks by the hundred, and blocks so small that an object more for each counts:
        a backend may have a shorter way to say the same.
        """
        buffer = self.borrow(part, generation)
        return None if buffer is None else buffer.memory

    @abstractmethod
    def discard(self, part: PartId, generation: int) -> None:
        """Synchronous :meth:`Backend.delete` of one part."""


class ResidentBackend(Backend):
    """A tier in the memory of a device: frames can be built there and read there.

    Its frames carry checksums that the device can compute itself (``header.folded``), so that
    loads into the device's own memory are verified without a byte crossing to the host.
    :meth:`read` and :meth:`write` work like any backend's, through copies from and to host memory.
    """

    device: Device
    """Valid once the backend is open."""

    @abstractmethod
    def allocate(self, nbytes: int) -> DeviceBuffer | None:
        """Return memory for a frame, or None when the device has none of that size now."""

    @abstractmethod
    def adopt(self, stored: StoredPart, header: Header, buffer: DeviceBuffer) -> bool:
        """Publish a frame that is complete on the device (header included), without a copy.

        The backend owns the buffer from here on. False (buffer still the caller's) if a newer
        generation is already there.
        """

    @abstractmethod
    def borrow(self, part: PartId, generation: int) -> Resident | None:
        """The frame in place, or None; releasing its buffer does nothing.

        Valid while the caller's lease on the part lasts and, if :meth:`touched` was called, until
        that event is done; must not be written.
        """

    @abstractmethod
    def touched(self, part: PartId, generation: int, event: Event) -> None:
        """Say that work submitted before ``event`` reads this frame: its memory outlives it."""

    @abstractmethod
    def discard(self, part: PartId, generation: int) -> None:
        """Synchronous :meth:`Backend.delete` of one part."""

    @abstractmethod
    def shrink(self, capacity: int) -> int:
        """Give device memory that holds no frame back, down to ``capacity`` bytes in all.

        Returns:
            Bytes that are still held; more than ``capacity`` while frames stand in the way.
        """
