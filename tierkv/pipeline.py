"""The pipeline: views to frames and back, through a chain of codecs. Synchronous, thread-safe.

A chain is ``tensor codec* , tensor-to-bytes codec? , bytes codec?`` (the three kinds of the zarr
format), written with plus signs: ``"raw"``, ``"zstd"``, ``"int8"``, ``"int8+zstd"``. Each section
is encoded on its own, says in its table row which codecs were really used, and is stored raw when
its chain does not pay: no section is ever longer than its tensor. Where a codec refuses (NaN,
infinities, a dtype it does not support, the state of a recurrent layer) the section takes the
lossless rest of the chain.

Frames are self-describing: reading one needs no pipeline, only :func:`open_frame`,
:func:`verify` and :func:`deliver`. The big copies release the GIL (torch, xxhash, zstd, lz4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tierkv.blocks import split_part
from tierkv.chains import RAW, chain_name, parse_chain, stored_chain
from tierkv.errors import CapacityError, CodecError, LayoutError
from tierkv.frame import Header, Section, checksum, encode_header, header_bytes, padded_bytes
from tierkv.layout import GroupKind
from tierkv.sections import (
    DECODED,
    GATHERED,
    PACKED,
    Pieces,
    bits_over,
    copy_bytes,
    decode_section,
    deliver,
    find_pieces,
    gather,
    layer_range,
    open_frame,
    scratch,
    stored_bytes,
    unsqueeze,
    verify,
)
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import View
    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import Space

__all__ = [
    "Encoded",
    "PartLabel",
    "Pipeline",
    "deliver",
    "layer_range",
    "open_frame",
    "parse_chain",
    "verify",
]


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


class _Step(NamedTuple):
    """One section of a group, as this pipeline wants to store it."""

    layer: int
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    packed_bytes: int | None  # None: the tensor stages do not apply, store its own bytes


class _Plan(NamedTuple):
    steps: tuple[_Step, ...]
    payload_offset: int
    max_bytes: int
    per_token: bool


class _Stored(NamedTuple):
    """How one section came out."""

    chain: str
    nbytes: int
    lossless: bool
    refused: bool = False


class Pipeline:
    """Encodes the parts of one space through one chain. Holds no per-call state."""

    def __init__(self, space: Space, chain: str = "raw") -> None:
        self.space = space
        self._chain = parse_chain(chain)
        self.chain = self._chain.name
        self.lossless = self._chain.lossless
        self._plans: dict[tuple[int, int], _Plan] = {}

    def __repr__(self) -> str:
        return f"<Pipeline {self.chain}>"

    def _plan(self, group: int, tokens: int | None) -> _Plan:
        key = (group, self.space.block_tokens if tokens is None else tokens)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(*key)
        return plan

    def _make_plan(self, group: int, tokens: int) -> _Plan:
        if not 0 <= group < len(self.space.layout.groups):
            raise LayoutError(f"the space has no group {group}")
        if not 0 <= tokens <= self.space.block_tokens:
            raise LayoutError(f"a block holds 0 to {self.space.block_tokens} tokens, not {tokens}")
        spec = self.space.layout.groups[group]
        # the error of a recurrent state would feed every later step: states stay lossless
        packable = spec.kind is not GroupKind.STATE or self.lossless
        steps, nbytes = [], header_bytes(spec)
        for layer in spec.layers:
            for t in layer.tensors:
                shape, raw = spec.stored_shape(t, tokens), spec.section_bytes(t, tokens)
                packed = None
                if packable and self._chain.supports(layer, t, shape):
                    packed = self._chain.packed_bytes(shape, t.dtype, t.name)
                    # one that only reorders may pay after the bytes codec; a loss must pay itself
                    if packed >= raw and not (self.lossless and self._chain.squeezer and raw):
                        packed = None
                steps.append(_Step(layer.index, t.name, t.dtype, shape, raw, packed))
                nbytes += padded_bytes(raw)
        return _Plan(tuple(steps), header_bytes(spec), nbytes, spec.per_token)

    def max_bytes(self, group: int, tokens: int | None = None) -> int:
        """Most bytes that a frame of ``tokens`` tokens (None: a full block) can take."""
        return self._plan(group, tokens).max_bytes

    def fixed_bytes(self, group: int, tokens: int | None = None) -> int | None:
        """Exact length of such a frame, or None if it depends on the values.

        Any codec may refuse a section or not pay, so that only ``raw`` frames have one.
        """
        return self.max_bytes(group, tokens) if self.chain == RAW else None

    def encode(self, label: PartLabel, view: View, start: int, out: memoryview) -> Encoded:
        """Write the frame of one part; raw sections are copied once, from the view into ``out``.

        Args:
            label: Identity of the part; ``label.tokens`` tokens are stored.
            view: Where the KV is. Recurrent groups store its state as it is now.
            start: Token of the view at which the block starts.
            out: At least :meth:`max_bytes` bytes.

        Raises:
            LayoutError: if the view does not fit the space.
            CapacityError: if ``out`` is too small.
        """
        import torch

        plan = self._plan(split_part(label.part)[1], label.tokens)

        def store(index: int, room: memoryview) -> _Stored:
            step = plan.steps[index]
            return self._store(
                step, find_pieces(view, step[:4], start, label.tokens, plan.per_token), room
            )

        with torch.inference_mode():
            return self._write(label, plan, store, out)

    def transcode(self, header: Header, frame: memoryview, out: memoryview) -> Encoded:
        """Encode a verified frame again with this pipeline's chain; identity and label stay.

        A section that went through a lossy codec keeps that encoding and only changes its bytes
        codec: decoding it would neither restore it nor let it pass for lossless.

        Raises:
            CodecError: if a section cannot be decoded.
            CapacityError: if ``out`` is too small.
        """
        import torch

        plan = self._plan(split_part(header.part)[1], header.tokens)

        def store(index: int, room: memoryview) -> _Stored:
            section, step = header.sections[index], plan.steps[index]
            chain = stored_chain(section.chain)
            data = stored_bytes(section, frame, 0)
            mine = "" if step.packed_bytes is None else self._chain.packing
            packing = mine if chain.lossless else chain.packing
            if section.chain == chain_name(packing, self._chain.squeezer):
                copy_bytes(room[: len(data)], data)
                return _Stored(section.chain, len(data), chain.lossless)
            if not chain.lossless:
                kept = self._squeeze(packing, unsqueeze(chain, section, data), room, False)
                if kept is None:
                    raise CodecError(f"a {section.chain!r} section outgrows its own tensor")
                return kept
            if section.chain != RAW:
                data = decode_section(section, data, scratch.take(DECODED, step.raw_bytes))
            return self._store(step, [(0, over(data, step.dtype, step.shape))], room)

        with torch.inference_mode():
            return self._write(header, plan, store, out)

    def _write(
        self,
        label: PartLabel | Header,
        plan: _Plan,
        store: Callable[[int, memoryview], _Stored],
        out: memoryview,
    ) -> Encoded:
        if len(out) < plan.max_bytes:
            raise CapacityError(
                f"a frame may take {plan.max_bytes} bytes, the buffer has {len(out)}"
            )
        offset, sections, raw, refused, lossless = plan.payload_offset, [], 0, 0, True
        for index, step in enumerate(plan.steps):
            stored = store(index, out[offset : offset + step.raw_bytes])
            end = offset + padded_bytes(stored.nbytes)
            out[offset + stored.nbytes : end] = bytes(end - offset - stored.nbytes)
            digest = checksum(out[offset:end])
            row = (*step[:4], stored.chain, offset, stored.nbytes, step.raw_bytes, digest)
            sections.append(Section(*row))
            raw, refused = raw + step.raw_bytes, refused + stored.refused
            lossless = lossless and stored.lossless
            offset = end
        header = Header(
            part=label.part,
            space=self.space.fingerprint,
            root=label.root,
            parent=label.parent,
            generation=label.generation,
            fidelity=label.fidelity,
            tokens=label.tokens,
            block_tokens=self.space.block_tokens,
            tenant=label.tenant,
            expires=label.expires,
            frame_bytes=offset,
            payload_offset=plan.payload_offset,
            sections=tuple(sections),
            per_token=plan.per_token,
        )
        encode_header(header, out)
        return Encoded(offset, raw, lossless, refused)

    def _store(self, step: _Step, pieces: Pieces, room: memoryview) -> _Stored:
        """Encode one section into ``room``, which is as long as its tensor."""
        refused = False
        if step.packed_bytes is not None:
            try:
                stored = self._pack(step, step.packed_bytes, pieces, room)
            except CodecError:
                stored, refused = None, True
            if stored is not None and stored.nbytes < step.raw_bytes:
                return stored
        if self._chain.squeezer is not None:
            memory = scratch.take(GATHERED, step.raw_bytes)
            gather(pieces, bits_over(memory, step.dtype, step.shape))
            stored = self._squeeze("", memory, room, True)
            if stored is not None:
                return stored._replace(refused=refused)
        gather(pieces, bits_over(room, step.dtype, step.shape))
        return _Stored(RAW, step.raw_bytes, True, refused)

    def _pack(self, step: _Step, size: int, pieces: Pieces, room: memoryview) -> _Stored | None:
        whole = pieces[0][1]
        if len(pieces) > 1 or whole.device.type != "cpu":
            memory = scratch.take(GATHERED, step.raw_bytes)
            gather(pieces, bits_over(memory, step.dtype, step.shape))
            whole = over(memory, step.dtype, step.shape)
        if self._chain.squeezer is None:
            self._chain.pack(whole, step.tensor, room[:size])
            return _Stored(self._chain.packing, size, self.lossless)
        packed = scratch.take(PACKED, size)
        self._chain.pack(whole, step.tensor, packed)
        return self._squeeze(self._chain.packing, packed, room, self.lossless)

    def _squeeze(
        self, packing: str, data: memoryview, room: memoryview, lossless: bool
    ) -> _Stored | None:
        """Put packed bytes into ``room``, compressed where that makes them shorter.

        None if they fit neither way.
        """
        squeezer = self._chain.squeezer
        limit = min(len(data), len(room)) - 1
        if squeezer is not None and limit > 0:
            nbytes = squeezer.encode(data, room[:limit])
            if nbytes is not None:
                return _Stored(chain_name(packing, squeezer), nbytes, lossless)
        if len(data) > len(room):
            return None
        copy_bytes(room[: len(data)], data)
        return _Stored(chain_name(packing, None), len(data), lossless)
