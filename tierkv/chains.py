"""Codec chains: which codecs a section goes through, and how they are written down.

A chain is ``tensor codec* , tensor-to-bytes codec? , bytes codec?``, the three kinds of the zarr
format, joined by plus signs: ``"raw"``, ``"zstd"`` (the same as ``"raw+zstd"``), ``"int8"``,
``"int8+zstd"``. One bytes codec at most: what one compressor leaves, a second does not shrink.
A codec may be followed by a slash and the way in which it groups numbers: ``"int4/token"``.

Layers and tensors may have chains of their own (:func:`parse_chains`): rules joined by commas, each
a chain after the layers, the tensor, or both, that it is for; the first rule that fits counts::

    rules  = rule { "," rule }
    rule   = [ layers ":" ] [ tensor ":" ] chain
    layers = "*" | number | number "-" number      first and last model layer
    tensor = name                                  "K", "V", "latent"; upper case or lower
    chain  = codec [ "/" grouping ] { "+" codec [ "/" grouping ] }

For example ``"K:int4/channel,V:int4/token"``, ``"0-3:raw,*:int8"``, ``"0:raw,K:int8,V:rot4+zstd"``.
What no rule is for is stored raw.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.abc import BytesCodec, TensorBytesCodec, TensorCodec
from tierkv.errors import CodecError, ConfigError, MissingDependencyError
from tierkv.frame import MAX_CHAIN_BYTES
from tierkv.layout import DTYPE_BYTES, TensorSpec
from tierkv.registry import names, resolve
from tierkv.views import over

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer

__all__ = [
    "RAW",
    "Chain",
    "ChainRule",
    "Chains",
    "chain_name",
    "parse_chain",
    "parse_chains",
    "stored_chain",
]

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
        steps = [*self.tensor_codecs, *([self.packer] if self.packer else [])]
        return "+".join(map(_step_name, steps))

    @property
    def name(self) -> str:
        """Canonical name."""
        return chain_name(self.packing, self.squeezer)

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        packer = self.packer is None or self.packer.lossless
        return packer and all(codec.lossless for codec in self.tensor_codecs)

    @property
    def uncoded(self) -> list[str]:
        """Its name, if a step counts on a bytes codec that is not there."""
        missing = self.packer is not None and self.packer.needs_coding and self.squeezer is None
        return [self.name] if missing else []

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

    def of(self, layer: int, tensor: str) -> Chain:
        """Itself: one chain for all sections; see :meth:`Chains.of`."""
        return self

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


class ChainRule(NamedTuple):
    """One rule of :class:`Chains`.

    Attributes:
        first: First model layer that it is for.
        last: Last one; None: to the end.
        tensor: Name of the tensor that it is for; None: every one.
        chain: How those sections are stored.
    """

    first: int
    last: int | None
    tensor: str | None
    chain: Chain

    @property
    def name(self) -> str:
        """As it is written."""
        layers = f"{self.first}-{self.last}:" if self.last is not None else ""
        if self.first == self.last:
            layers = f"{self.first}:"
        tensor = "" if self.tensor is None else f"{self.tensor}:"
        return f"{layers}{tensor}{self.chain.name}"


@dataclass(frozen=True, slots=True)
class Chains:
    """A chain for each layer and tensor; the first rule that fits counts."""

    rules: tuple[ChainRule, ...]

    @property
    def name(self) -> str:
        """Canonical text; :func:`parse_chains` reads it back."""
        return ",".join(rule.name for rule in self.rules)

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit of every section."""
        return all(rule.chain.lossless for rule in self.rules)

    @property
    def uncoded(self) -> list[str]:
        """Names of those chains of which a step counts on a bytes codec that is not there."""
        return [name for rule in self.rules for name in rule.chain.uncoded]

    def of(self, layer: int, tensor: str) -> Chain:
        """Chain of the sections of one tensor of one model layer."""
        for rule in self.rules:
            fits = rule.first <= layer and (rule.last is None or layer <= rule.last)
            if fits and rule.tensor in (None, tensor.lower()):
                return rule.chain
        return _RAW_CHAIN


_RAW_CHAIN = Chain()
_LAYERS = re.compile(r"(\d+)(?:-(\d+))?|\*")


def _step_name(codec: Any) -> str:
    grouping: str = getattr(codec, "grouping", "")
    return f"{codec.name}/{grouping}" if grouping else str(codec.name)


def _make(text: str, step: str) -> Any:
    """Make the codec that one step names."""
    name, slash, grouping = step.partition("/")
    try:
        kind = resolve("codecs", name)
    except ConfigError as error:
        near = difflib.get_close_matches(name.lower(), names("codecs"), 1)
        hint = f"; did you mean {near[0]!r}?" if near and near[0] not in str(error) else ""
        raise ConfigError(f"codec chain {text!r}: {error}{hint}") from error
    if not slash:
        return kind()
    known = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    if "grouping" not in {field.name for field in known}:
        raise ConfigError(
            f"codec chain {text!r}: {name!r} has no groupings; write {name!r} without a slash"
        )
    return kind(grouping=grouping)


def parse_chain(text: str) -> Chain:
    """Read a chain such as ``"int8+zstd"``.

    Raises:
        ConfigError: if a codec is unknown, named twice, or out of order, or the name too long.
        MissingDependencyError: if a codec's library is not installed.
    """
    steps = [step.strip() for step in text.split("+")]
    if not all(steps) or len({s.partition("/")[0] for s in steps}) != len(steps):
        raise ConfigError(
            f"codec chain {text!r}: need different names joined by '+', e.g. 'int8+zstd'"
        )
    tensor_codecs: list[TensorCodec] = []
    packer: TensorBytesCodec | None = None
    squeezer: BytesCodec | None = None
    packed = False
    for step in steps:
        codec = _make(text, step)
        if isinstance(codec, TensorCodec) and not packed and squeezer is None:
            tensor_codecs.append(codec)
        elif isinstance(codec, TensorBytesCodec) and not packed and squeezer is None:
            packed = True
            packer = None if step == RAW else codec
        elif isinstance(codec, BytesCodec) and squeezer is None:
            squeezer = codec
        else:
            raise ConfigError(
                f"codec chain {text!r}: {step!r} is out of place; the order is tensor codecs, at "
                f"most one tensor-to-bytes codec, at most one bytes codec"
            )
    chain = Chain(tuple(tensor_codecs), packer, squeezer)
    if len(chain.name.encode()) > MAX_CHAIN_BYTES:
        raise ConfigError(f"codec chain {text!r} is longer than {MAX_CHAIN_BYTES} bytes")
    return chain


def parse_chains(text: str) -> Chain | Chains:
    """Read a chain for all sections, or rules for layers and tensors (see the module).

    Returns:
        A :class:`Chain` if one is for everything, else :class:`Chains`; both have ``name``,
        ``lossless`` and ``of(layer, tensor)``.

    Raises:
        ConfigError: if a rule or its chain cannot be read, or can never be reached.
        MissingDependencyError: if a codec's library is not installed.
    """
    rules: list[ChainRule] = []
    for part in text.split(","):
        rule = _parse_rule(text, part.strip())
        for other in rules:
            inside = other.first <= rule.first and (
                other.last is None or (rule.last is not None and rule.last <= other.last)
            )
            if inside and other.tensor in (None, rule.tensor):
                raise ConfigError(
                    f"codec rules {text!r}: {part.strip()!r} is never reached, {other.name!r} "
                    f"comes first; put the narrower rule first"
                )
        rules.append(rule)
    only = rules[0]
    if len(rules) == 1 and only[:3] == (0, None, None):
        return only.chain
    return Chains(tuple(rules))


def _parse_rule(text: str, rule: str) -> ChainRule:
    *heads, chain = (part.strip() for part in rule.split(":"))
    first, last, tensor = 0, None, None
    layers = _LAYERS.fullmatch(heads[0]) if heads else None
    if layers is not None:
        heads.pop(0)
        if layers[1] is not None:
            first = int(layers[1])
            last = int(layers[2] or first)
            if last < first:
                raise ConfigError(
                    f"codec rules {text!r}: no layers {layers[0]}; did you mean {last}-{first}?"
                )
    if heads:
        tensor = heads.pop(0).lower()
        if not tensor.isidentifier():
            raise ConfigError(
                f"codec rules {text!r}: {tensor!r} names neither layers nor a tensor; write e.g. "
                f"'0-3:raw', '*:int8' or 'K:int8'"
            )
    if heads or not chain:
        raise ConfigError(
            f"codec rules {text!r}: cannot read {rule!r}; a rule is layers, tensor and chain "
            f"joined by ':', e.g. '0-3:K:int8'"
        )
    return ChainRule(first, last, tensor, parse_chain(chain))


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
