"""Codec chains: which codecs a section goes through, and how they are written down.

A chain is ``tensor codec* , tensor-to-bytes codec? , bytes codec?``, the three kinds of the zarr
format, joined by plus signs: ``"raw"``, ``"zstd"`` (the same as ``"raw+zstd"``), ``"int8"``,
``"int8+zstd"``. One bytes codec at most: what one compressor leaves, a second does not shrink.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from tierkv.abc import BytesCodec, TensorBytesCodec, TensorCodec
from tierkv.errors import CodecError, ConfigError, MissingDependencyError
from tierkv.frame import MAX_CHAIN_BYTES
from tierkv.layout import DTYPE_BYTES, TensorSpec
from tierkv.registry import resolve
from tierkv.views import over

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer

__all__ = ["RAW", "Chain", "chain_name", "parse_chain", "stored_chain"]

RAW = "raw"
"""The chain, and the codec, that stores a tensor's own bytes."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A parsed chain.

    Attributes:
        tensor_codecs: Applied first, in this order.
        packer: Turns the tensor into bytes; None stores its own bytes.
        squeezer: Compresses those bytes; None leaves them.
    """

    tensor_codecs: tuple[TensorCodec, ...] = ()
    packer: TensorBytesCodec | None = None
    squeezer: BytesCodec | None = None

    @property
    def packing(self) -> str:
        """Name without the bytes codec; empty if the tensor's own bytes are taken."""
        names = [codec.name for codec in self.tensor_codecs]
        return "+".join([*names, self.packer.name] if self.packer else names)

    @property
    def name(self) -> str:
        """Canonical name."""
        return chain_name(self.packing, self.squeezer)

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        packer = self.packer is None or self.packer.lossless
        return packer and all(codec.lossless for codec in self.tensor_codecs)

    def _outputs(
        self, shape: tuple[int, ...], dtype: str, tensor: str
    ) -> list[tuple[tuple[int, ...], str]]:
        stages = [(shape, dtype)]
        for codec in self.tensor_codecs:
            stages.append(codec.output(*stages[-1], tensor))
        return stages

    def supports(self, layer: Layer, spec: TensorSpec, shape: tuple[int, ...]) -> bool:
        """Whether the tensor stages exist and can take such a tensor."""
        if self.packer is None:
            return bool(self.tensor_codecs)
        last, dtype = self._outputs(shape, spec.dtype, spec.name)[-1]
        inner = (last[0], last[2]) if len(last) == 3 else last
        return self.packer.supports(layer, TensorSpec(spec.name, dtype, inner, spec.packing))

    def packed_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Bytes between the tensor stages and the bytes codec."""
        last, last_dtype = self._outputs(shape, dtype, tensor)[-1]
        if self.packer is None:
            return prod(last) * DTYPE_BYTES[last_dtype]
        return self.packer.encoded_bytes(last, last_dtype, tensor)

    def pack(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Apply the tensor stages; fills ``out``, which has :meth:`packed_bytes` bytes.

        Raises:
            CodecError: if a codec refuses these values.
        """
        for codec in self.tensor_codecs:
            source = codec.encode(source, tensor)
        if self.packer is not None:
            self.packer.encode(source, tensor, out)
            return
        dtype = str(source.dtype).removeprefix("torch.")
        over(out, dtype, tuple(source.shape)).copy_(source)

    def unpack(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Undo :meth:`pack`; writes the decoded values into ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        import torch

        dtype = str(into.dtype).removeprefix("torch.")
        stages = self._outputs(tuple(into.shape), dtype, tensor)
        if not self.tensor_codecs and self.packer is not None:
            self.packer.decode(data, tensor, into)
            return
        shape, last_dtype = stages[-1]
        if self.packer is None:
            if len(data) != prod(shape) * DTYPE_BYTES[last_dtype]:
                raise CodecError(f"{self.name}: {len(data)} bytes do not hold {last_dtype} {shape}")
            current = over(data, last_dtype, shape)
        else:
            current = torch.empty(shape, dtype=getattr(torch, last_dtype))
            self.packer.decode(data, tensor, current)
        for codec, (before, kind) in zip(
            reversed(self.tensor_codecs), reversed(stages[:-1]), strict=True
        ):
            target = torch.empty(before, dtype=getattr(torch, kind))
            codec.decode(current, tensor, target)
            current = target
        into.copy_(current)


def chain_name(packing: str, squeezer: BytesCodec | None) -> str:
    """Name of a chain from its two halves."""
    return "+".join(n for n in (packing, squeezer.name if squeezer else "") if n) or RAW


def parse_chain(text: str) -> Chain:
    """Read a chain such as ``"int8+zstd"``.

    Raises:
        ConfigError: if a codec is unknown, named twice, or out of order, or the name too long.
        MissingDependencyError: if a codec's library is not installed.
    """
    names = [name.strip() for name in text.split("+")]
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(
            f"codec chain {text!r}: need different names joined by '+', e.g. 'int8+zstd'"
        )
    tensor_codecs: list[TensorCodec] = []
    packer: TensorBytesCodec | None = None
    squeezer: BytesCodec | None = None
    packed = False
    for name in names:
        codec = resolve("codecs", name)()
        if isinstance(codec, TensorCodec) and not packed and squeezer is None:
            tensor_codecs.append(codec)
        elif isinstance(codec, TensorBytesCodec) and not packed and squeezer is None:
            packed = True
            packer = None if name == RAW else codec
        elif isinstance(codec, BytesCodec) and squeezer is None:
            squeezer = codec
        else:
            raise ConfigError(
                f"codec chain {text!r}: {name!r} is out of place; the order is tensor codecs, at "
                f"most one tensor-to-bytes codec, at most one bytes codec"
            )
    chain = Chain(tuple(tensor_codecs), packer, squeezer)
    if len(chain.name.encode()) > MAX_CHAIN_BYTES:
        raise ConfigError(f"codec chain {text!r} is longer than {MAX_CHAIN_BYTES} bytes")
    return chain


@lru_cache(maxsize=64)
def stored_chain(name: str) -> Chain:
    """Chain named by a stored section.

    Raises:
        CodecError: if it cannot be decoded here: a codec is unknown or not installed.
    """
    try:
        return parse_chain(name)
    except (ConfigError, MissingDependencyError) as error:
        raise CodecError(f"a stored section needs the codec chain {name!r}: {error}") from error
