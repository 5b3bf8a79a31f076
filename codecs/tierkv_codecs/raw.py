"""``raw``: a tensor's own bytes.

The pipeline copies raw sections straight between views and frames; this is the same format behind
the codec seam, for whoever encodes single tensors, and the baseline of the conformance suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import TensorBytesCodec
from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["Raw"]

_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _as_bits(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    # integers of the same size: a copy then keeps every bit, NaN payloads included
    import torch

    name = _BITS[tensor.dtype.itemsize]
    return tensor.view(getattr(torch, name)), name


@dataclass(frozen=True, slots=True)
class Raw(TensorBytesCodec):
    """Every dtype, every bit."""

    name: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """Every tensor."""
        return True

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Elements times their size."""
        return prod(shape) * DTYPE_BYTES[dtype]

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Write the elements in C order."""
        bits, name = _as_bits(source)
        over(out, name, tuple(source.shape)).copy_(bits)

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Read the elements in C order.

        Raises:
            CodecError: if the length is not exactly that of ``into``.
        """
        if len(data) != into.numel() * into.dtype.itemsize:
            raise CodecError(
                f"raw: {len(data)} bytes are not {into.dtype} of shape {tuple(into.shape)}"
            )
        bits, name = _as_bits(into)
        bits.copy_(over(data, name, tuple(into.shape)))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Zero."""
        import torch

        return torch.zeros((1,) * source.dim())
