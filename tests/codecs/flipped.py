"""A third party's tensor-to-tensor codec: none is shipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import TensorCodec

if TYPE_CHECKING:
    import torch

__all__ = ["Flipped"]


@dataclass(frozen=True)
class Flipped(TensorCodec):
    """Channels in reverse order, heads and tokens exchanged."""

    name: ClassVar[str] = "flipped"
    lossless: ClassVar[bool] = True

    def output(
        self, shape: tuple[int, ...], dtype: str, tensor: str
    ) -> tuple[tuple[int, ...], str]:
        return (shape[1], shape[0], shape[2]), dtype

    def encode(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        return source.transpose(0, 1).flip(2)

    def decode(self, data: torch.Tensor, tensor: str, into: torch.Tensor) -> None:
        into.copy_(data.flip(2).transpose(0, 1))
