"""The pipeline of one space and one chain."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from tierkv.abc import Move
from tierkv.blocks import split_part
from tierkv.chains import RAW, chain_name, parse_chains, stored_chain
from tierkv.errors import CodecError
from tierkv.frame import Header, Section, encode_header, padded_bytes
from tierkv.pipeline.planning import Encoded, PartLabel, Plan, Step, Stored, make_plan
from tierkv.pipeline.raw import check_room, fill_section, section_memory
from tierkv.pipeline.storing import squeeze, store_coarser, store_section
from tierkv.sections import (
    DECODED,
    Pieces,
    copy_bytes,
    decode_section,
    digests,
    find_pieces,
    scratch,
    stored_bytes,
    unsqueeze,
)
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.abc import View
    from tierkv.layout import Space

__all__ = ["Pipeline"]


class Pipeline:
    """Encodes the parts of one space through one chain. Holds no per-call state."""

    def __init__(self, space: Space, chain: str = "raw") -> None:
        self.space = space
        self._chains = parse_chains(chain)
        self.chain = self._chains.name
        self.lossless = self._chains.lossless
        self._plans: dict[tuple[int, int], Plan] = {}

    def __repr__(self) -> str:
        return f"<Pipeline {self.chain}>"

    def _plan(self, group: int, tokens: int | None) -> Plan:
        key = (group, self.space.block_tokens if tokens is None else tokens)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(self.space, self._chains, *key)
        return plan

    def max_bytes(self, group: int, tokens: int | None = None) -> int:
        """Most bytes that a frame of ``tokens`` tokens (None: a full block) can take."""
        return self._plan(group, tokens).max_bytes

    def raw_bytes(self, group: int, tokens: int | None = None) -> int:
        """Bytes of the tensors of such a frame."""
        return self._plan(group, tokens).raw_bytes

    def fixed_bytes(self, group: int, tokens: int | None = None) -> int | None:
        """Exact length of such a frame, or None if it depends on the values.

        Any codec may refuse a section or not pay, so that only ``raw`` frames have one.
        """
        return self.max_bytes(group, tokens) if self.chain == RAW else None

    def encode(
        self, label: PartLabel, view: View, start: int, out: memoryview, *, folded: bool = False
    ) -> Encoded:
        """Write the frame of one part; raw sections are copied once, from the view into ``out``.

        Args:
            label: Identity of the part; ``label.tokens`` tokens are stored.
            view: Where the KV is, in host memory. Recurrent groups store its state as it is now.
            start: Token of the view at which the block starts.
            out: At least :meth:`max_bytes` bytes.
            folded: Whether the checksums are those of devices (:attr:`Header.folded`).

        Raises:
            LayoutError: if the view does not fit the space.
            CapacityError: if ``out`` is too small.
        """
        import torch

        plan = self._plan(split_part(label.part)[1], label.tokens)

        def pieces(step: Step) -> Pieces:
            return find_pieces(view, step[:4], start, label.tokens, plan.per_token)

        def store(index: int, room: memoryview) -> Stored:
            return store_section(plan.steps[index], pieces(plan.steps[index]), room)

        with torch.inference_mode():
            if self.chain != RAW:
                return self._write(label, plan, store, out, folded=folded)
            check_room(plan, out)
            found = []
            base = ctypes.addressof(ctypes.c_char.from_buffer(out))
            for step, offset in zip(plan.steps, plan.offsets, strict=True):
                room = out[offset : offset + padded_bytes(step.raw_bytes)]
                found.append(fill_section(step, pieces(step), room, base + offset, folded=folded))
            if folded:
                found = digests(section_memory(plan, out), folded=True)
        return self._finish(label, plan, found, out, folded=folded)

    def moves(
        self,
        label: PartLabel,
        view: View,
        start: int,
        out: torch.Tensor,
        layer: int | None = None,
    ) -> list[Move]:
        """The copies that bring one part out of a view into the raw sections of a frame.

        Args:
            label: As in :meth:`encode`.
            view: Where the KV is, on whichever device.
            start: Token of the view at which the block starts.
            out: uint8 ``[>= max_bytes]``, on whichever device.
            layer: Model layer to copy; None copies all.

        Raises:
            LayoutError: if the view does not fit the space.
        """
        plan = self._plan(split_part(label.part)[1], label.tokens)
        out_moves = []
        for number in plan.numbers(layer):
            step, offset = plan.steps[number], plan.offsets[number]
            found = find_pieces(view, step[:4], start, label.tokens, plan.per_token)
            target = out[offset : offset + step.raw_bytes].view(found[0][1].dtype).view(step.shape)
            if len(found) == 1:
                out_moves.append(Move(target, found[0][1]))
                continue
            for at, piece in found:
                out_moves.append(Move(target.narrow(1, at, piece.shape[1]), piece))
        return out_moves

    def spans(self, label: PartLabel, layer: int | None = None) -> list[tuple[int, int, int]]:
        """Of each raw section (of ``layer``): where it begins, ends, and ends with padding."""
        plan = self._plan(split_part(label.part)[1], label.tokens)
        found = [(plan.offsets[n], plan.steps[n].raw_bytes) for n in plan.numbers(layer)]
        return [(at, at + size, at + padded_bytes(size)) for at, size in found]

    def table(self, group: int, tokens: int) -> tuple[Section, ...]:
        """The section table of a raw frame."""
        return self._plan(group, tokens).raw

    def header(self, label: PartLabel, found: Sequence[bytes], *, folded: bool) -> Header:
        """Header of a raw frame whose sections have these checksums."""
        plan = self._plan(split_part(label.part)[1], label.tokens)
        return self._header(label, plan, plan.raw, found, plan.max_bytes, folded=folded)

    def seal(self, label: PartLabel, out: memoryview, *, folded: bool = False) -> Encoded:
        """Make a frame of raw sections that are in place in ``out`` (see :meth:`moves`)."""
        plan = self._plan(split_part(label.part)[1], label.tokens)
        for _, low, high in self.spans(label):
            out[low:high] = bytes(high - low)
        found = digests(section_memory(plan, out), folded=folded)
        return self._finish(label, plan, found, out, folded=folded)

    def encode_gathered(
        self, label: PartLabel, raw: memoryview, out: memoryview, *, folded: bool = False
    ) -> Encoded:
        """Write the frame of one part whose raw sections are in ``raw`` (see :meth:`moves`).

        Raises:
            CapacityError: if ``out`` is too small.
        """
        import torch

        plan = self._plan(split_part(label.part)[1], label.tokens)

        def store(index: int, room: memoryview) -> Stored:
            step, at = plan.steps[index], plan.offsets[index]
            whole = over(raw[at : at + step.raw_bytes], step.dtype, step.shape)
            return store_section(step, [(0, whole)], room)

        with torch.inference_mode():
            return self._write(label, plan, store, out, folded=folded)

    def _finish(
        self,
        label: PartLabel,
        plan: Plan,
        found: Sequence[bytes],
        out: memoryview,
        *,
        folded: bool,
    ) -> Encoded:
        encode_header(
            self._header(label, plan, plan.raw, found, plan.max_bytes, folded=folded), out
        )
        return Encoded(plan.max_bytes, plan.raw_bytes, True, 0)

    def transcode(
        self, header: Header, frame: memoryview, out: memoryview, *, coarser: bool = False
    ) -> Encoded:
        """Encode a verified frame again with this pipeline's chain; identity and label stay.

        A section that went through a lossy codec keeps that encoding and only changes its bytes
        codec: decoding it would neither restore it nor let it pass for lossless. Where ``coarser``
        is said, another lossy codec is put on top of it if that makes the section shorter.

        Raises:
            CodecError: if a section cannot be decoded.
            CapacityError: if ``out`` is too small.
        """
        import torch

        plan = self._plan(split_part(header.part)[1], header.tokens)

        def store(index: int, room: memoryview) -> Stored:
            section, step = header.sections[index], plan.steps[index]
            chain = stored_chain(section.chain)
            data = stored_bytes(section, frame, 0)
            mine = "" if step.packed_bytes is None else step.chain.packing
            packing = mine if chain.lossless else chain.packing
            if coarser and not (chain.lossless or step.chain.lossless or mine == packing):
                shorter = store_coarser(step, section, data, room)
                if shorter is not None:
                    return shorter
            if section.chain == chain_name(packing, step.chain.squeezer):
                copy_bytes(room[: len(data)], data)
                return Stored(section.chain, len(data), chain.lossless)
            if not chain.lossless:
                kept = squeeze(step, packing, unsqueeze(chain, section, data), room, False)
                if kept is None:
                    raise CodecError(f"a {section.chain!r} section outgrows its own tensor")
                return kept
            if section.chain != RAW:
                data = decode_section(section, data, scratch.take(DECODED, step.raw_bytes))
            return store_section(step, [(0, over(data, step.dtype, step.shape))], room)

        with torch.inference_mode():
            return self._write(header, plan, store, out)

    def _write(
        self,
        label: PartLabel | Header,
        plan: Plan,
        store: Callable[[int, memoryview], Stored],
        out: memoryview,
        *,
        folded: bool = False,
    ) -> Encoded:
        check_room(plan, out)
        offset, refused, lossless = plan.payload_offset, 0, True
        rows: list[Section] = []
        found: list[bytes] = []
        for index, step in enumerate(plan.steps):
            stored = store(index, out[offset : offset + step.raw_bytes])
            end = offset + padded_bytes(stored.nbytes)
            out[offset + stored.nbytes : end] = bytes(end - offset - stored.nbytes)
            found += digests([out[offset:end]], folded)
            rows.append(Section(*step[:4], stored.chain, offset, stored.nbytes, step.raw_bytes))
            refused, lossless = refused + stored.refused, lossless and stored.lossless
            offset = end
        encode_header(self._header(label, plan, tuple(rows), found, offset, folded=folded), out)
        return Encoded(offset, plan.raw_bytes, lossless, refused)

    def _header(
        self,
        label: PartLabel | Header,
        plan: Plan,
        sections: tuple[Section, ...],
        found: Sequence[bytes],
        nbytes: int,
        *,
        folded: bool,
    ) -> Header:
        return Header(
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
            frame_bytes=nbytes,
            payload_offset=plan.payload_offset,
            sections=sections,
            digests=tuple(found),
            per_token=plan.per_token,
            folded=folded,
        )
