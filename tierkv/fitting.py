"""Whether a frame is the one that was asked for: identity, layout, section table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.blocks import KEY_BYTES, split_part
from tierkv.errors import IntegrityError
from tierkv.frame import header_bytes, refuse

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey, PartId
    from tierkv.frame import Header, Section
    from tierkv.layout import Space

__all__ = ["ForeignFrame", "check_identity", "check_layout", "plainly_fits", "section_table"]

_Table = tuple[tuple[int, str, str, tuple[int, ...]], ...]


class ForeignFrame(IntegrityError):
    """A whole frame of the part in question, whose reader named another space, tenant or salt.

    A part's name follows from all of these: it is the reader who is wrong, and the copy is good.
    """


def check_identity(
    header: Header, *, part: PartId, generation: int | None, space: bytes, root: BlockKey
) -> None:
    """Check that the frame is the one asked for (``generation`` None: any).

    Raises:
        ForeignFrame: if it is this part, and of another space, tenant or salt.
        IntegrityError: naming the field that differs.
    """
    if header.part != part:
        raise refuse("it belongs to another part")
    for name, value in (("space", space), ("root", root)):
        if getattr(header, name) != value:
            raise ForeignFrame(f"the frame belongs to another {name} than its reader named")
    if generation not in (None, header.generation):
        raise refuse("it belongs to another generation")


@dataclass(slots=True)
class _Memo:
    """What frames of one group and length must look like, and the last section table that did."""

    header_bytes: int
    table: _Table
    fits: tuple[Section, ...] | None = None


_plans: dict[tuple[bytes, int, int], _Memo] = {}


def _plan(space: Space, group: int, tokens: int) -> _Memo:
    plan = _plans.get(key := (space.fingerprint, group, tokens))
    if plan is None:
        spec = space.layout.groups[group]
        tensors = [(layer.index, t) for layer in spec.layers for t in layer.tensors]
        table = tuple((n, t.name, t.dtype, spec.stored_shape(t, tokens)) for n, t in tensors)
        if len(_plans) >= 512:  # many spaces or partial tails: start over, it is only a memo
            _plans.clear()
        plan = _plans[key] = _Memo(header_bytes(spec), table)
    return plan


def section_table(space: Space, group: int, tokens: int) -> _Table:
    """Sections of a part: (layer, tensor, dtype, shape) in stored order. Remembered by space."""
    return _plan(space, group, tokens).table


def check_layout(header: Header, space: Space) -> None:
    """Check that the section table is the one of the space's group.

    Raises:
        IntegrityError: if group, block size, dtype, shape or order differ.
    """
    group = split_part(header.part)[1]
    if group >= len(space.layout.groups) or header.block_tokens != space.block_tokens:
        raise refuse(f"group {group} or {header.block_tokens} tokens a block do not fit the space")
    plan = _plan(space, group, header.tokens)
    if (
        header.payload_offset != plan.header_bytes
        or header.per_token != space.layout.groups[group].per_token
    ):
        raise refuse(f"the header of {header.payload_offset} bytes does not fit the group")
    if header.sections is plan.fits:
        return  # raw frames share one table, which decode_header remembers
    if tuple(s[:4] for s in header.sections) != plan.table:
        raise refuse("its layers, tensors, dtypes or shapes are not those of the space")
    plan.fits = header.sections
    if header.tokens == header.block_tokens:
        if len(_fitted) >= 512:
            _fitted.clear()
        _fitted[space.fingerprint, header.part[KEY_BYTES:]] = header


# A full block that fits, the last one of its group that was looked at: by fingerprint, and the
# group as it stands in a part's name.
_fitted: dict[tuple[bytes, bytes], Header] = {}


def plainly_fits(
    header: Header, space: Space, part: PartId, generation: int | None, root: BlockKey
) -> bool:
    """Whether :func:`check_identity` and :func:`check_layout` have nothing to say, in few steps.

    It is this very part, and all that its layout is checked by is as in one that was found to fit.
    False if they have to be asked.
    """
    like = _fitted.get((space.fingerprint, part[KEY_BYTES:]))
    return (
        like is not None
        and header.sections is like.sections
        and header.part == part
        and header.generation == generation
        and header.root == root
        and header.space == space.fingerprint
        and header.tokens == like.tokens
        and header.block_tokens == like.block_tokens
        and header.payload_offset == like.payload_offset
        and header.per_token is like.per_token
    )
