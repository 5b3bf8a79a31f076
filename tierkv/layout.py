"""Layouts and spaces: the shape of one block of KV, and the complete root of its keys.

A layout is a tuple of *groups* of layers. Layers of one group are stored together: the unit that
is stored, moved, leased and evicted is a **part**, one block of one group. Layers may differ in
heads, head size and dtype.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from math import prod

from tierkv.blocks import BlockKey, Identity, chain_root, encode_fields, space_fingerprint
from tierkv.errors import LayoutError

__all__ = ["DTYPE_BYTES", "Group", "GroupKind", "Layer", "Layout", "Space", "TensorSpec"]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Element sizes in bytes of the dtypes a layout may name (torch's names)."""


def _whole(value: object, least: int, what: str) -> None:
    if type(value) is not int or value < least:
        raise LayoutError(f"{what} must be a whole number of at least {least}, not {value!r}")


def _a(kind: type, value: object, what: str) -> None:
    if not isinstance(value, kind):
        raise LayoutError(f"{what} must be a {kind.__name__}, not {value!r:.80}")


def _tuple_of(kind: type, values: object, what: str) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        raise LayoutError(f"{what} must be a tuple of {kind.__name__}, not {values!r:.80}")


class GroupKind(Enum):
    """How the layers of a group use the tokens before them; decides what a prefix needs."""

    FULL = "full"  # every earlier token: all parts 0..n-1
    SLIDING = "sliding"  # the last `window` tokens: the parts that cover the last window - 1
    LATENT = "latent"  # MLA latents: as FULL
    STATE = "state"  # a recurrent snapshot: the part at the boundary only


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one layer.

    Attributes:
        name: Name inside the layer, e.g. ``"k"``, ``"v"``, ``"latent"``, ``"conv"``.
        dtype: torch's name of the dtype, e.g. ``"bfloat16"``.
        shape: Per token ``(heads, dim)``, stored as ``[heads, tokens, dim]``; for a state
            tensor the whole shape, which has no token axis.
        packing: Free-form name of an inner order that differs from the plain one. Two layouts
            of equal shape but other packing never share blocks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    packing: str = ""

    def __post_init__(self) -> None:
        _a(str, self.name, "the name of a tensor")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise LayoutError(
                f"tensor {self.name!r}: unknown dtype {self.dtype!r} (one of {known})"
            )
        _a(tuple, self.shape, f"tensor {self.name!r}: shape")
        for size in self.shape:
            _whole(size, 0, f"tensor {self.name!r}: a size in shape {self.shape}")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its number in the model, and its tensors in stored order."""

    index: int
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        _whole(self.index, 0, "the number of a layer")
        _tuple_of(TensorSpec, self.tensors, f"layer {self.index}: tensors")

    @classmethod
    def kv(cls, index: int, heads: int, dim: int, dtype: str, v_dim: int | None = None) -> Layer:
        """Layer with one K and one V of ``heads`` heads."""
        return cls(
            index,
            (
                TensorSpec("k", dtype, (heads, dim)),
                TensorSpec("v", dtype, (heads, dim if v_dim is None else v_dim)),
            ),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are stored together because a prefix needs the same blocks of all of them."""

    kind: GroupKind
    layers: tuple[Layer, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        _a(GroupKind, self.kind, "the kind of a group")
        _tuple_of(Layer, self.layers, "the layers of a group")
        if (self.window is not None) != (self.kind is GroupKind.SLIDING):
            raise LayoutError(f"a window belongs to a sliding group, and only there: {self.kind}")
        if self.window is not None:
            _whole(self.window, 1, "the window of a group")
        if not self.layers:
            raise LayoutError("a group needs at least one layer")
        for layer in self.layers:
            names = [t.name for t in layer.tensors]
            if not names or len(set(names)) != len(names):
                raise LayoutError(f"layer {layer.index}: tensor names must be unique: {names}")
            if self.kind is not GroupKind.STATE and any(len(t.shape) != 2 for t in layer.tensors):
                raise LayoutError(f"layer {layer.index}: shape must be (heads, dim) outside STATE")

    @property
    def per_token(self) -> bool:
        """Whether the tensors have a token axis."""
        return self.kind is not GroupKind.STATE

    def stored_shape(self, tensor: TensorSpec, tokens: int) -> tuple[int, ...]:
        """Shape of one block of ``tensor``: ``[heads, tokens, dim]``, or the state's own shape."""
        if not self.per_token:
            return tensor.shape
        heads, dim = tensor.shape
        return (heads, tokens, dim)

    def section_bytes(self, tensor: TensorSpec, tokens: int) -> int:
        """Raw bytes of one block of ``tensor``."""
        return prod(self.stored_shape(tensor, tokens)) * DTYPE_BYTES[tensor.dtype]

    def raw_bytes(self, tokens: int) -> int:
        """Raw bytes of one part of this group."""
        return sum(self.section_bytes(t, tokens) for layer in self.layers for t in layer.tensors)


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups of a model."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        _tuple_of(Group, self.groups, "the groups of a layout")
        indices = [layer.index for group in self.groups for layer in group.layers]
        if not indices:
            raise LayoutError("a layout needs at least one group")
        if len(set(indices)) != len(indices):
            raise LayoutError("a layer may belong to one group only")

    @classmethod
    def uniform(cls, layers: int, heads: int, dim: int, dtype: str) -> Layout:
        """Full attention everywhere, every layer alike.

        >>> Layout.uniform(2, 1, 4, "float32").raw_bytes(64)
        4096
        """
        _whole(layers, 1, "the number of layers")
        stack = tuple(Layer.kv(i, heads, dim, dtype) for i in range(layers))
        return cls((Group(GroupKind.FULL, stack),))

    def raw_bytes(self, tokens: int) -> int:
        """Raw bytes of one block, all groups."""
        return sum(group.raw_bytes(tokens) for group in self.groups)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever any shape, dtype, order or packing differs."""
        fields = tuple(
            (
                g.kind.value,
                g.window,
                tuple(
                    (
                        layer.index,
                        tuple((t.name, t.dtype, t.shape, t.packing) for t in layer.tensors),
                    )
                    for layer in g.layers
                ),
            )
            for g in self.groups
        )
        return hashlib.sha256(encode_fields("tierkv.layout", fields)).digest()


@dataclass(frozen=True, slots=True)
class Space:
    """The complete root of keys: who computed the KV, how it is laid out, tokens per block.

    >>> space = Space(Identity("m", "rev1"), Layout.uniform(2, 1, 4, "float32"), block_tokens=16)
    >>> len(space.fingerprint)
    32
    """

    identity: Identity
    layout: Layout
    block_tokens: int = 64
    fingerprint: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _a(Identity, self.identity, "the identity of a space")
        _a(Layout, self.layout, "the layout of a space")
        _whole(self.block_tokens, 1, "block_tokens")
        value = space_fingerprint(self.identity, self.layout.fingerprint, self.block_tokens)
        object.__setattr__(self, "fingerprint", value)

    def root(self, tenant: str = "", salt: bytes = b"") -> BlockKey:
        """Parent of block 0 for one tenant."""
        return chain_root(self.fingerprint, tenant, salt)
