"""Files and device memory without a stop in host memory that the engine would have to provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc.backends import IoResult, ReadRequest, StoredPart
    from tierkv.abc.devices import Device

__all__ = ["DirectBackend", "DirectIo"]


class DirectIo(ABC):
    """Batches between a tier's files and the memory of one device.

    Frames get here what they get in :meth:`tierkv.abc.Backend.read` and ``write``: the same
    publication, results per item, nothing raised for the medium's faults. Only the memory differs:
    tensors are uint8, one-dimensional, contiguous, in the memory of that device, and whole 4 KiB
    pages long.

    *Order.* There is no stream here. The caller has awaited the event behind the last work that
    writes a tensor (or reads one that is to be filled) before it calls; when a call ends, the
    bytes are there.

    *Cancellation.* A call ends only when nothing touches its tensors any more; the cancellation is
    re-raised then.

    *Trust.* Bytes are verified by the caller, on the device.

    Attributes:
        mode: How bytes really travel: ``"gds"`` (the disk and the device talk to each other) or
            ``"posix"`` (through buffers of the library in host memory).
    """

    mode: str

    @abstractmethod
    async def read_device(
        self, requests: Sequence[ReadRequest], into: Sequence[torch.Tensor]
    ) -> list[IoResult]:
        """Fill the first ``requests[i].length`` bytes of ``into[i]`` for each request.

        What follows them in the last page is undefined, as is all of a tensor whose result is not
        OK. Offsets that are multiples of 4 KiB are quickest.

        Raises:
            ValueError: if a tensor is none of the kind described above.
        """

    @abstractmethod
    async def write_device(
        self, items: Sequence[tuple[StoredPart, torch.Tensor]]
    ) -> list[IoResult]:
        """Store frames, the first ``stored.nbytes`` bytes of each tensor.

        What follows them in the last page is set to zero, in the tensor as well: it may hold
        somebody else's bytes, and the file shall not.

        Raises:
            ValueError: if a tensor is none of the kind described above.
        """


@runtime_checkable
class DirectBackend(Protocol):
    """A backend that may reach the memory of devices."""

    def direct(self, device: Device) -> DirectIo | None:
        """The direct way to that device's memory, or None: go through host memory.

        Quick; the answer for a device holds while the backend is open.
        """
