"""Parts stored raw, on their way into a view in host memory: prepare, verify, write.

What is called per block and section counts as much as the copies themselves. So everything is
looked up for all blocks of a window first, and what lies in rows is copied by address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import CodecError, IntegrityError
from tierkv.mover.blockcopies import Blocks
from tierkv.mover.grids import WORTHWHILE, grid_of
from tierkv.mover.rawcopies import all_raw, copy_pairs, raw_pairs
from tierkv.sections import digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import View
    from tierkv.mover.scattering import Arrived
    from tierkv.mover.steps import Ready

__all__ = [
    "is_right",
    "prepare",
    "prepare_all",
    "prepare_together",
    "together_bytes",
    "verify_and_write",
    "write_together",
]

_TOGETHER_BYTES = 1024 * 1024
"""Blocks are verified, and then copied while they are in the cache still, so many bytes at once: a
large block by itself, small ones together, which saves calls."""
_LOOSE_BYTES = 32 * 1024 * 1024
"""Where torch copies a section of many blocks in one operation, that is worth more: what a caller
that is cancelled may have to wait for."""


def together_bytes(item: Ready) -> int:
    """How many bytes of blocks like this one to verify before they are written together."""
    loose = any(part.blocks is not None and part.blocks.grid.loose for part in item.parts)
    return _LOOSE_BYTES if loose else _TOGETHER_BYTES


def prepare_all(opened: Sequence[tuple[Arrived, int, Ready]], view: View) -> None:
    """Prepare opened parts, each with its first token and its block; note what is damaged.

    Raises:
        LayoutError: if the view does not fit.
    """
    left = prepare_together([(part, start) for part, start, _ in opened], view)
    names = {id(part) for part, _ in left}
    for part, start, item in opened if left else ():
        if id(part) in names:
            try:
                prepare(part, view, start)
            except CodecError:
                item.bad = item.bad or part


def prepare_together(parts: Sequence[tuple[Arrived, int]], view: View) -> list[tuple[Arrived, int]]:
    """Find out at once what has to be copied for opened parts, each with its first token.

    For a worker, inside ``view.writing()``.

    Returns:
        Those that have to be looked at one by one: see :func:`prepare`.

    Raises:
        LayoutError: if the view does not hold a block.
    """
    alike: dict[tuple[int, int], list[tuple[Arrived, int]]] = {}
    rest: list[tuple[Arrived, int]] = []
    for part, start in parts:
        header = part.header
        assert header is not None
        whole = part.base == 0 and header.frame_bytes <= len(part.memory)
        if whole and header.per_token and all_raw(header):
            alike.setdefault((id(header.sections), header.tokens), []).append((part, start))
        else:
            rest.append((part, start))
    for group in alike.values():
        header = group[0][0].header
        assert header is not None
        grid = None
        starts, frames = [start for _, start in group], [part.memory for part, _ in group]
        if len(group) * len(header.sections) >= WORTHWHILE:
            grid = grid_of(view, header.sections, header.tokens, starts, writing=True)
        if grid is None:
            rest += group
            continue
        blocks = Blocks(grid, view, starts, frames)
        for number, (part, _) in enumerate(group):
            part.blocks, part.number = blocks, number
    return rest


def prepare(part: Arrived, view: View, start: int) -> None:
    """Find out what has to be copied for an opened part that is stored raw. For a worker.

    It takes as long as many small copies do, and longer when a large one has just emptied the
    caches: do it for all blocks of a window first, inside ``view.writing()``.

    Raises:
        IntegrityError: if a section is not inside the frame.
        LayoutError: if the view does not fit.
    """
    header = part.header
    assert header is not None
    if not part.placed and all_raw(header):
        part.copies = raw_pairs(header, header.sections, part.memory, part.base, view, start)


def write_together(parts: Sequence[Arrived]) -> None:
    """Write verified parts that :func:`prepare_together` has prepared; inside ``view.writing()``.

    For a worker.
    """
    first = 0
    while first < len(parts):
        blocks, number = parts[first].blocks, parts[first].number
        assert blocks is not None
        last = first + 1
        while last < len(parts) and parts[last].blocks is blocks:
            if parts[last].number != number + last - first:
                break
            last += 1
        blocks.scatter(number, number + last - first)
        first = last


def is_right(item: Ready) -> bool:
    """Verify a block whose parts lie in RAM and are prepared, exact KV, with few calls.

    Returns:
        Whether that was so, and all is right. If not, it has to be examined part by part.
    """
    if item.step.flights:
        return False
    for part in item.parts:
        header, blocks = part.header, part.blocks
        if blocks is None or header is None or header.folded or header.fidelity != "exact":
            return False
        if not (part.checked or blocks.right(part.number, header.digests)):
            return False
        part.checked = True
    return True


def verify_and_write(part: Arrived) -> bool:
    """Verify and copy section by section, each copied while it is in the cache. For a worker.

    Inside ``view.writing()``. Only for a view that the engine owns: damage is found when the
    sections before it are written.
    False if nothing was prepared, or if it was verified already: nothing is done then.

    Raises:
        IntegrityError: if a section is damaged.
    """
    header, copies, blocks = part.header, part.copies, part.blocks
    if header is None or part.checked:
        return False
    if blocks is not None and blocks.grid.tiles and not header.folded:
        if not blocks.checked_scatter(part.number, header.digests):
            raise IntegrityError("a section is damaged; treat the part as missing")
        part.checked = part.written = True
        return True
    if copies is None:
        return False
    sections = [
        (section, digest)
        for section, digest in zip(header.sections, header.digests, strict=True)
        if section.nbytes
    ]
    memory, base = part.memory, part.base
    for (section, digest), pairs in zip(sections, copies, strict=True):
        stored = memory[section.offset - base : section.end - base]
        if digests([stored], header.folded) != [digest]:
            raise IntegrityError(f"layer {section.layer}, {section.tensor!r} is damaged")
        copy_pairs(pairs)
    part.checked = part.written = True
    return True
