"""Parts stored raw, on their way into a view in host memory: prepare, verify, write.

What is called per block and section counts as much as the copies themselves. So everything is
looked up for all blocks of a window first, and what lies in rows is copied by address.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Final

from tierkv.errors import CodecError, IntegrityError
from tierkv.mover.blockcopies import Blocks
from tierkv.mover.grids import grid_of, worthwhile
from tierkv.mover.rawcopies import all_raw, copy_pairs, raw_pairs
from tierkv.sections import digests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import View
    from tierkv.mover.scattering import Arrived
    from tierkv.mover.steps import Ready

__all__ = [
    "is_right",
    "land_run",
    "prepare",
    "prepare_all",
    "prepare_together",
    "together_bytes",
    "verify_and_write",
    "write_together",
]

_TOGETHER_BYTES: Final = 1024 * 1024
"""Blocks that were looked at one by one are verified so many bytes at a time, and then written."""


def together_bytes(item: Ready) -> int:
    """How many bytes of blocks like this one to verify before they are written together."""
    known = [part.blocks.together for part in item.parts if part.blocks is not None]
    return max(known, default=_TOGETHER_BYTES)


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
        if worthwhile(len(group), header.sections):
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


def land_run(items: Sequence[Ready], stopped: Callable[[], bool]) -> int:
    """Verify and write the leading blocks that lie in RAM, raw, exact, and of one part each.

    For a worker, inside ``view.writing()``. What this is not for, or what is damaged, has to be
    looked at by itself.

    Args:
        items: Prepared blocks of one host view, in order.
        stopped: Asked between groups of blocks; once it is true, nothing more is written.

    Returns:
        How many are in place: they are marked as done.
    """
    run = list(takewhile(_is_plain, items))
    done = 0
    while done < len(run) and not stopped():
        first = run[done].parts[0]
        blocks, number, checked = first.blocks, first.number, first.checked
        assert blocks is not None
        parts: list[Arrived] = []
        for item in run[done:]:
            part = item.parts[0]
            if part.blocks is not blocks or part.number != number + len(parts):
                break
            if part.checked is not checked:
                break
            parts.append(part)
        due = [part.header.digests for part in parts if part.header is not None]
        loosely = run[0].step.plan.view.owned_by_engine
        right = blocks.land(
            number,
            number + len(parts),
            None if checked else due,
            loosely=loosely,
            stopped=stopped,
        )
        for item in run[done : done + right]:
            item.done = item.parts[0].checked = True
        done += right
        if right < len(parts):
            break
    return done


def _is_plain(item: Ready) -> bool:
    if item.bad is not None or item.step.flights or len(item.parts) != 1:
        return False
    part = item.parts[0]
    header = part.header
    if part.blocks is None or header is None or part.placed:
        return False
    return not header.folded and header.fidelity == "exact"


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
    if blocks is not None and blocks.stepwise and not header.folded:
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
