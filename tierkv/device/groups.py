"""Small and strided pieces between host and device: gathered into few bulk copies.

A copy engine is slow on small pieces (see :mod:`tierkv.device.plan`), kernels are not. So pieces
that together fill a stretch of *host* memory become one group: the group crosses in one copy, from
or to scratch memory on the device that has the same layout, and kernels gather it from there or
scatter it. The pages of a cache that are shorter than a block are such pieces: each is strided in
the block's frame, together they fill it. Arithmetic only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.abc import Move
from tierkv.device.bits import as_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.device.plan import Run

__all__ = ["Group", "Part", "group", "place"]

_ALIGN: Final = 256  # where groups begin in scratch memory: what kernels like


class Part(NamedTuple):
    """One piece of a group.

    Attributes:
        host: Address of its first host byte.
        span: Bytes from there to behind its last one.
        nbytes: Its own bytes.
        device: The device's side, as integers.
        steps: Strides of the host's side, in elements.
        like: The host's side, or a tensor of the same memory.
        move: The piece as a move.
    """

    host: int
    span: int
    nbytes: int
    device: torch.Tensor
    steps: tuple[int, ...]
    like: torch.Tensor
    move: Move


class Group(NamedTuple):
    """Pieces that together fill a stretch of host memory.

    Attributes:
        host: Address of the first host byte.
        nbytes: Bytes of the stretch.
        like: A host tensor of one of them.
        parts: The pieces.
    """

    host: int
    nbytes: int
    like: torch.Tensor
    parts: list[Part]


def group(
    runs: Sequence[Run], strided: Sequence[Move], *, to_host: bool, room: int
) -> tuple[list[Group], list[Move]]:
    """Group what can be grouped.

    Args:
        runs: Contiguous pieces.
        strided: Others.
        to_host: Whether the targets are the host's; else the sources are.
        room: Most bytes of a group; longer pieces are left.

    Returns:
        Groups in the order of their addresses, and the moves that are left: those to the host that
        leave gaps, whose bytes a group would overwrite.
    """
    parts: list[Part] = []
    left: list[Move] = []
    for run in runs:
        move = Move(*run.tensors())
        device, host = move if not to_host else move[::-1]
        address = run.target if to_host else run.source
        like = run.move.target if to_host else run.move.source
        parts.append(Part(address, run.nbytes, run.nbytes, device, host.stride(), like, move))
    for move in strided:
        device, host = move if not to_host else move[::-1]
        size = host.element_size()
        steps = host.stride()
        nbytes, span = host.numel() * size, _span(size, host.shape, steps)
        parts.append(Part(host.data_ptr(), span, nbytes, as_bits(device), steps, host, move))
    fit = [part for part in parts if part.span <= room]
    left += [part.move for part in parts if part.span > room]
    groups = _cluster(fit, room)
    if not to_host:  # what lies between pieces is read, too, and used by nobody
        return groups, left
    whole = [one for one in groups if _filled(one)]
    apart = [part for one in groups if not _filled(one) for part in one.parts]
    left += [part.move for part in apart if part.span != part.nbytes]
    whole += _cluster([part for part in apart if part.span == part.nbytes], room)
    return sorted(whole, key=lambda one: one.host), left


def _cluster(parts: list[Part], room: int) -> list[Group]:
    """Pieces whose stretches touch or overlap, together."""
    groups: list[Group] = []
    for part in sorted(parts, key=lambda part: part.host):
        last = groups[-1] if groups else None
        if last is not None:
            offset = part.host - last.host
            nbytes = max(last.nbytes, offset + part.span)
            if (
                offset <= last.nbytes
                and offset % part.device.element_size() == 0
                and nbytes <= room
            ):
                last.parts.append(part)
                groups[-1] = last._replace(nbytes=nbytes)
                continue
        groups.append(Group(part.host, part.span, part.like, [part]))
    return groups


def _filled(one: Group) -> bool:
    """Whether every byte of the stretch is of a piece; targets of one batch do not overlap."""
    return sum(part.nbytes for part in one.parts) == one.nbytes


@lru_cache(maxsize=4096)  # the pieces of a batch are mostly alike
def _span(size: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """Bytes from a tensor's first to behind its last one."""
    return (sum(step * (n - 1) for step, n in zip(steps, shape, strict=True)) + 1) * size


def place(groups: Sequence[Group], room: int) -> list[list[tuple[int, Group]]]:
    """Rounds of (offset in scratch memory, group), each of which fits into ``room`` bytes."""
    rounds: list[list[tuple[int, Group]]] = []
    at = room
    for one in groups:
        if not rounds or at + one.nbytes > room:
            rounds.append([])
            at = 0
        rounds[-1].append((at, one))
        at += (one.nbytes + _ALIGN - 1) & -_ALIGN
    return rounds
