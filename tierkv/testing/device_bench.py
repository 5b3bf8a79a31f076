"""How the suite of devices gets its device, and what its checks share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierkv.abc import Move
from tierkv.testing.shuttle import Shuttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from tierkv.abc import Device

__all__ = ["DeviceBench", "noise", "plain"]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes in host memory, the same for the same seed."""
    import torch

    return torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes)), dtype=torch.uint8)


def plain(tensor: torch.Tensor) -> bytes:
    """The bytes of a host tensor (uint8)."""
    return bytes(tensor.contiguous().view(-1).numpy())


class DeviceBench(ABC):
    """Base of the suite."""

    @abstractmethod
    def make(self) -> Device:
        """Return a new device."""

    def model(self, device: Device, work: Callable[[], object]) -> None:
        """Do ``work`` (torch calls) as a slow kernel of the model, on ``device.current()``.

        Where torch's calls on the device's tensors are asynchronous themselves, calling it is
        enough; something slow before it shows more.
        """
        work()

    def shuttle(self, device: Device, nbytes: int) -> Shuttle:
        """Return the user of the device that the checks of ordering look at."""
        return Shuttle(device, nbytes)

    @contextmanager
    def device(self) -> Iterator[Device]:
        """A new device; closed at the end."""
        device = self.make()
        try:
            yield device
        finally:
            device.close()

    def filled(self, device: Device, data: torch.Tensor) -> torch.Tensor:
        """Device memory with these bytes."""
        memory = device.allocate(max(data.numel(), 1))
        assert memory is not None, "the check wants more memory than the device has"
        memory = memory[: data.numel()]
        device.copy([Move(memory, data)], device.loads)
        device.loads.record().synchronize()
        return memory

    def bytes_of(self, device: Device, memory: torch.Tensor) -> bytes:
        """What is in device memory (contiguous) once the device's streams are done."""
        import torch

        out = torch.zeros(memory.numel(), dtype=torch.uint8)
        device.stores.wait(device.loads.record())
        device.copy([Move(out, memory.view(-1))], device.stores)
        device.stores.record().synchronize()
        return plain(out)
