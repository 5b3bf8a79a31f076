"""The seams: what a backend, a codec, a policy, an observer and a view must do.

Third parties implement these and prove it with the suites of :mod:`tierkv.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar

from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch

    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import Layer, TensorSpec

__all__ = [
    "Backend",
    "BackendStats",
    "Buffer",
    "BytesCodec",
    "IoResult",
    "IoStatus",
    "MemoryBackend",
    "Observer",
    "Policy",
    "ReadRequest",
    "StoredPart",
    "TensorBytesCodec",
    "TensorCodec",
    "Threads",
    "View",
    "WriteItem",
]

_T = TypeVar("_T")

# --------------------------------------------------------------------------- buffers and I/O


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
        details: Further named figures for people and tests.
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

    @abstractmethod
    def stats(self) -> BackendStats:
        """Snapshot; cheap, callable from any thread."""


class MemoryBackend(Backend):
    """A tier whose bytes the engine can address: frames are built in place and read in place."""

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

    @abstractmethod
    def discard(self, part: PartId, generation: int) -> None:
        """Synchronous :meth:`Backend.delete` of one part."""


# --------------------------------------------------------------------------- codecs


class TensorCodec(ABC):
    """Turns a tensor into another tensor (a rotation, a delta, a projection) and back.

    One frozen dataclass a file. Instances hold no mutable state and are used from many threads.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def output(
        self, shape: tuple[int, ...], dtype: str, tensor: str
    ) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the encoded tensor; equal input always gives equal output."""

    @abstractmethod
    def encode(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Return the encoded tensor; never a view that the caller could mutate."""

    @abstractmethod
    def decode(self, data: torch.Tensor, tensor: str, into: torch.Tensor) -> None:
        """Write the decoded values into ``into`` (any strides)."""


class TensorBytesCodec(ABC):
    """Turns one tensor of one block into bytes and back (serialisation, quantisation).

    One frozen dataclass a file. Instances hold no mutable state and are used from many threads
    at once; contexts of native libraries are per call or per thread.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """Whether this tensor can be encoded; if not, the chain falls back to ``raw``."""

    @abstractmethod
    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Exact length of the encoding of a tensor of this shape and dtype."""

    @abstractmethod
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Write exactly :meth:`encoded_bytes` bytes.

        Args:
            source: CPU tensor of the stored shape (``[heads, tokens, dim]`` or a state's);
                any strides.
            tensor: Name of the tensor in its layer (``"k"``, ``"v"``, ...).
            out: Where the bytes go.

        Raises:
            CodecError: if these values cannot be encoded within the stated bound (the engine then
                stores them with the lossless fallback).
        """

    @abstractmethod
    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Write the decoded values into ``into``: stored shape and dtype, any strides.

        Raises:
            CodecError: if ``data`` is not exactly one encoding of that shape.
        """

    @abstractmethod
    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Largest |decoded - source| per element, broadcastable to ``source``; 0 if lossless."""


class BytesCodec(ABC):
    """Turns bytes into fewer bytes, losslessly (a compressor). Same rules as above."""

    name: ClassVar[str]

    @abstractmethod
    def encode(self, data: memoryview, out: memoryview) -> int | None:
        """Compress ``data`` into ``out`` and return the length, or None if it does not fit."""

    @abstractmethod
    def decode(self, data: memoryview, out: memoryview) -> None:
        """Decompress into ``out``, filling it exactly.

        Raises:
            CodecError: if ``data`` is anything but exactly one whole encoding of ``len(out)``
                bytes. Lengths inside ``data`` are never trusted for an allocation.
        """


# --------------------------------------------------------------------------- decisions


class Policy(ABC):
    """Orders the evictable parts of one tier (one partition of it). Sans-IO.

    Parts are dense row numbers. ``clock`` counts accesses, not seconds. A row is *tracked* from
    :meth:`insert` to :meth:`remove`; it is *evictable* only between :meth:`release` and
    :meth:`hold` (the core holds rows that are leased or have children). Every call is O(log n) or
    better; victims come from evictable rows alone, so held rows cost nothing.
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(self, row: int, nbytes: int, clock: int) -> None:
        """Start tracking a row that became resident (held)."""

    @abstractmethod
    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""

    @abstractmethod
    def hold(self, row: int) -> None:
        """Make a tracked row not evictable. Idempotent."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Stop tracking a row."""

    @abstractmethod
    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable (its prefix is gone)."""

    @abstractmethod
    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None; changes nothing."""

    @abstractmethod
    def rank(self, row: int) -> float:
        """Comparable worth of a tracked row across partitions; the smallest goes first."""

    def resize(self, capacity_parts: float) -> None:  # noqa: B027 - optional, most need none
        """Learn how many mean-sized parts the tier holds (half-lives, ghost sizes)."""


# --------------------------------------------------------------------------- observers, views


class Observer(ABC):
    """Hears what the engine did. Called on the loop: must be quick, must not raise."""

    @abstractmethod
    def lookup(
        self,
        *,
        requested: int,
        reusable: int,
        matched: int,
        by_tier: dict[str, int],
        reason: str | None,
    ) -> None:
        """One match.

        Args:
            requested: Tokens of the prompt.
            reusable: Those that the session had shown before, in whole blocks.
            matched: Those of the loadable prefix.
            by_tier: Matched tokens by tier.
            reason: Why the prefix is not longer (a MissReason value), or None.
        """

    @abstractmethod
    def io(
        self,
        *,
        tier: str,
        direction: str,
        nbytes: int,
        operations: int,
        seconds: float,
        failed: int,
    ) -> None:
        """One backend batch; direction is ``"read"``, ``"write"`` or ``"delete"``."""

    @abstractmethod
    def evicted(self, *, tier: str, reason: str, nbytes: int) -> None:
        """One part left a tier."""

    @abstractmethod
    def corrupted(self, *, tier: str, kind: str) -> None:
        """A copy was found damaged and dropped."""

    @abstractmethod
    def skipped(self, *, tier: str, reason: str, parts: int) -> None:
        """Parts that a store did not put into a tier."""

    @abstractmethod
    def operation(self, *, op: str, tier: str, seconds: float) -> None:
        """A user-visible operation (``"match"``, ``"load"``, ``"store"``, ...) ended."""

    @abstractmethod
    def loop_lag(self, *, seconds: float) -> None:
        """How late the event loop ran a timer."""

    @abstractmethod
    def restarted(self, *, worker: str) -> None:
        """A background worker failed and was restarted."""


class View(ABC):
    """The caller's KV memory, seen token by token: index 0 is always token 0.

    A view owns no memory and copies none; it hands out strided pieces of the caller's tensors.
    """

    owned_by_engine: ClassVar[bool] = False

    @abstractmethod
    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """Tensors that hold tokens ``[start, stop)``, in order.

        Returns:
            Pairs (first token of the piece, tensor ``[heads, tokens, dim]``), which together cover
            the range exactly.

        Raises:
            LayoutError: if the range is not backed by memory.
        """

    def state(self, layer: int, tensor: str) -> torch.Tensor:
        """The whole tensor of a recurrent layer.

        Raises:
            LayoutError: if the view has no state.
        """
        raise LayoutError(f"{type(self).__name__} holds no state (layer {layer}, {tensor!r})")

    def writing(self) -> AbstractContextManager[None]:
        """Entered around every write into the pieces (inference mode, locks)."""
        return nullcontext()
