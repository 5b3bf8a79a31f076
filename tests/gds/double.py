"""A device whose memory comes from the test double of the CUDA driver."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

import torch

from tierkv.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Move, Stream

_PAGE = 4096


class Driver:
    """The double's own calls; the library was found by its name, as kvikio finds it."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self._lib.double_alloc.restype = ctypes.c_void_p
        self._lib.double_alloc.argtypes = (ctypes.c_size_t,)
        self._lib.double_delay.argtypes = (ctypes.c_long,)
        for name in ("double_to_device", "double_to_host"):
            getattr(self._lib, name).restype = ctypes.c_long

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, full of 0xC5; it lives as long as the process."""
        pages = -(-max(nbytes, 1) // _PAGE) * _PAGE
        address = self._lib.double_alloc(pages)
        assert address is not None
        memory = (ctypes.c_uint8 * pages).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def delay(self, seconds: float) -> None:
        """Let every copy between device and host take so long from now on."""
        self._lib.double_delay(int(seconds * 1e6))

    @property
    def copied(self) -> tuple[int, int]:
        """Bytes copied by kvikio so far: to the device, to the host."""
        return self._lib.double_to_device(), self._lib.double_to_host()


class DoubleDevice(CpuDevice):
    """Copies and checksums on the CPU, memory that the driver's double takes for a device's."""

    kind: ClassVar[str] = "double"

    def __init__(self, name: str = "double") -> None:
        super().__init__()
        self.name = name
        self.driver = Driver()
        self.copies = 0
        self._ranges: list[tuple[int, int]] = []

    def owns(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < end for start, end in self._ranges)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        memory = self.driver.allocate(nbytes)
        self._ranges.append((memory.data_ptr(), memory.data_ptr() + nbytes))
        return memory

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        self.copies += len(moves)
        super().copy(moves, stream)
