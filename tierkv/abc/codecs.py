"""The three kinds of a codec chain: tensor to tensor, tensor to bytes, bytes to bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["BytesCodec", "TensorBytesCodec", "TensorCodec"]


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
    needs_coding: ClassVar[bool] = False
    """Whether it leaves it to a bytes codec to make its bytes as few as its name promises."""

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
            source: Tensor of the stored shape (``[heads, tokens, dim]`` or a state's) in host
                memory, or on a device for codecs that take it; any strides.
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
