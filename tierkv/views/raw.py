"""Tensors over raw bytes, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["over"]


class _Exposed:
    """Hands the address of read-only memory to numpy as if it could be written.

    torch has no read-only tensors and warns about making one; the tensors made here are only read.
    """

    __slots__ = ("__array_interface__", "_keep")

    __array_interface__: dict[str, Any]

    def __init__(self, memory: memoryview) -> None:
        import numpy as np

        interface: dict[str, Any] = dict(np.frombuffer(memory, np.uint8).__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._keep = memory


def over(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Tensor over the first bytes of ``memory``: no copy. Only read it if ``memory`` is read-only.

    The tensor keeps the memory's exporter alive, not its meaning: it must not outlive the buffer's
    owner.

    Args:
        memory: Contiguous bytes, at least as many as ``shape`` needs.
        dtype: torch's name of the dtype.
        shape: Shape of the tensor, contiguous.
    """
    import numpy as np
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=kind)
    if not memory.readonly:
        return torch.frombuffer(memory, dtype=kind, count=count).view(shape)
    nbytes = count * kind.itemsize
    return torch.from_numpy(np.asarray(_Exposed(memory[:nbytes]))).view(kind).view(shape)
