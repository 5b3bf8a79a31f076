"""Tensors over raw bytes, without a copy."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["over", "spanning"]

_CODES = {"uint8": "|u1", "int16": "=i2", "int32": "=i4", "int64": "=i8"}


class _Exposed:
    """Hands an address to numpy as memory that can be written, whatever it is.

    torch has no read-only tensors and warns about making one; the tensors that are made of
    read-only memory here are only read.
    """

    __slots__ = ("__array_interface__", "_keep")

    __array_interface__: dict[str, Any]

    def __init__(self, keep: memoryview, address: int, count: int, code: str) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": code,
            "data": (address, False),
        }
        self._keep = keep


def spanning(memory: memoryview, address: int, count: int, dtype: str) -> torch.Tensor:
    """Tensor ``[count]`` of integers from ``address`` on: also beyond ``memory`` itself.

    Args:
        memory: A piece of the memory, whose exporter the tensor keeps alive.
        address: Where it begins, a multiple of the integers' size.
        count: How many integers; all of them must be memory of the same exporter.
        dtype: Name of the integers: uint8, int16, int32 or int64.
    """
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(_Exposed(memory, address, count, _CODES[dtype])))


@cache
def _how(dtype: str) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
    """What makes tensors over memory, and the dtype: to import torch takes time every time."""
    import torch

    return torch.frombuffer, getattr(torch, dtype)


def over(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Tensor over the first bytes of ``memory``: no copy. Only read it if ``memory`` is read-only.

    The tensor keeps the memory's exporter alive, not its meaning: it must not outlive the buffer's
    owner.

    Args:
        memory: Contiguous bytes, at least as many as ``shape`` needs.
        dtype: torch's name of the dtype.
        shape: Shape of the tensor, contiguous.
    """
    frombuffer, kind = _how(dtype)
    count = prod(shape)
    if count and not memory.readonly:
        tensor = frombuffer(memory, dtype=kind, count=count)
        # given one by one, sizes take torch half a microsecond less
        return tensor.view(*shape) if shape else tensor.view(shape)
    import numpy as np
    import torch

    if count == 0:
        return torch.empty(shape, dtype=kind)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return spanning(memory, address, count * kind.itemsize, "uint8").view(kind).view(shape)
