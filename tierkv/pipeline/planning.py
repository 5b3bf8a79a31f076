"""What a frame will look like: its label, its sections, and how each of them is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tierkv.chains import RAW
from tierkv.errors import LayoutError
from tierkv.frame import Section, header_bytes, padded_bytes
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey, PartId
    from tierkv.chains import Chain, Chains
    from tierkv.layout import Space

__all__ = ["Encoded", "PartLabel", "Plan", "Step", "Stored", "make_plan"]


@dataclass(frozen=True, slots=True)
class PartLabel:
    """What a frame says about its part, beside the numbers.

    Attributes:
        part: Which part.
        generation: Number of this publication.
        root: Root of its key chain.
        parent: Key of the block before; None for block 0.
        fidelity: ``"exact"`` or ``"derived:<how>"``.
        tokens: Valid tokens.
        tenant: Tenant that stores it.
        expires: Wall-clock time at which it expires, or None.
    """

    part: PartId
    generation: int
    root: BlockKey
    parent: BlockKey | None
    fidelity: str
    tokens: int
    tenant: str = ""
    expires: float | None = None


class Encoded(NamedTuple):
    """What encoding a part came to.

    Attributes:
        nbytes: Length of the frame.
        raw_bytes: Bytes of its tensors.
        lossless: Whether no section went through a lossy codec.
        fallbacks: Sections whose values the codec refused, stored losslessly instead.
    """

    nbytes: int
    raw_bytes: int
    lossless: bool
    fallbacks: int


class Step(NamedTuple):
    """One section of a group, as this pipeline wants to store it."""

    layer: int
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    packed_bytes: int | None  # None: the tensor stages do not apply, store its own bytes
    chain: Chain


class Plan(NamedTuple):
    """The sections of a group, and where they are in a frame that is raw all through."""

    steps: tuple[Step, ...]
    offsets: tuple[int, ...]
    payload_offset: int
    max_bytes: int
    per_token: bool
    raw_bytes: int
    layers: dict[int, slice]  # numbers of the steps of each model layer
    raw: tuple[Section, ...]  # the section table of a raw frame

    def numbers(self, layer: int | None) -> range:
        """Numbers of the steps of one model layer; None: of all."""
        every = range(len(self.steps))
        return every if layer is None else every[self.layers.get(layer, slice(0))]


class Stored(NamedTuple):
    """How one section came out."""

    chain: str
    nbytes: int
    lossless: bool
    refused: bool = False


def make_plan(space: Space, chains: Chain | Chains, group: int, tokens: int) -> Plan:
    """Plan the frames of one group and number of tokens.

    Raises:
        LayoutError: if there is no such group, or a block holds no such number.
    """
    if not 0 <= group < len(space.layout.groups):
        raise LayoutError(f"the space has no group {group}")
    if not 0 <= tokens <= space.block_tokens:
        raise LayoutError(f"a block holds 0 to {space.block_tokens} tokens, not {tokens}")
    spec = space.layout.groups[group]
    steps: list[Step] = []
    table: list[Section] = []
    offsets, layers, nbytes = [], {}, header_bytes(spec)
    for layer in spec.layers:
        layers[layer.index] = slice(len(steps), len(steps) + len(layer.tensors))
        for t in layer.tensors:
            shape, raw = spec.stored_shape(t, tokens), spec.section_bytes(t, tokens)
            packed, chain = None, chains.of(layer.index, t.name)
            # the error of a recurrent state would feed every later step: states stay lossless
            packable = spec.kind is not GroupKind.STATE or chain.lossless
            if packable and chain.supports(layer, t, shape):
                packed = chain.packed_bytes(shape, t.dtype, t.name)
                # one that only reorders may pay after the bytes codec; a loss must pay itself
                if packed >= raw and not (chain.lossless and chain.squeezer and raw):
                    packed = None
            steps.append(Step(layer.index, t.name, t.dtype, shape, raw, packed, chain))
            offsets.append(nbytes)
            table.append(Section(layer.index, t.name, t.dtype, shape, RAW, nbytes, raw, raw))
            nbytes += padded_bytes(raw)
    total = sum(step.raw_bytes for step in steps)
    places = (tuple(steps), tuple(offsets), header_bytes(spec), nbytes)
    return Plan(*places, spec.per_token, total, layers, tuple(table))
