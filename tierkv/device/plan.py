"""How a batch of copies is best submitted: neighbours merged, sorted into three kinds.

A copy engine (DMA) has a cost for each descriptor: on an H100 over PCIe 5, batched host-to-device
copies ran at 4.0 GB/s in pieces of 4 KiB, 6.7 at 24 KiB, and 39.9 at 28 KiB (figures of vLLM's
issue 42212; other devices have other cliffs, issue 57555). So pieces are merged where both sides
are neighbours, and what is still shorter than 28 KiB is better moved by a kernel. What counts is
the length of a contiguous run, not of a page (issue 57342): a strided tensor whose runs are long
enough is cut into them.

Nothing is submitted here: pure arithmetic on addresses and strides, the same for every device.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.device.bits import check_move

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import Move

__all__ = ["BULK_BYTES", "Axis", "Plan", "Run", "bytes_at", "plan", "run_length"]

BULK_BYTES: Final = 28 << 10
"""Shortest run that goes through a copy engine."""


class Run(NamedTuple):
    """Bytes that are contiguous on both sides.

    Attributes:
        target: Address of the first byte to write.
        source: Address of the first byte to read.
        nbytes: How many.
        move: The move that it begins in; its tensors tell device and storage.
    """

    target: int
    source: int
    nbytes: int
    move: Move

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Target and source as uint8 ``[nbytes]``."""
        return (
            bytes_at(self.target, self.nbytes, self.move.target),
            bytes_at(self.source, self.nbytes, self.move.source),
        )


class Plan(NamedTuple):
    """A batch, ready to be submitted. The tensors of its moves must be kept until it ran.

    Attributes:
        bulk: Runs of at least :data:`BULK_BYTES`, in the order of their targets.
        small: Shorter runs.
        strided: Moves of many short runs each, as they were given.
        merged: How many runs were joined to the one before.
        nbytes: Bytes in all.
    """

    bulk: list[Run]
    small: list[Run]
    strided: list[Move]
    merged: int
    nbytes: int


def plan(moves: Sequence[Move], bulk_bytes: int = BULK_BYTES) -> Plan:
    """Merge and sort a batch of moves; those without elements vanish.

    Neighbours in host memory are merged by address alone. On a device they must share a storage:
    two allocations may touch, and no copy may span them.

    Raises:
        LayoutError: if the sides of a move do not fit.
    """
    runs: list[Run] = []
    strided: list[Move] = []
    nbytes = 0
    for move in moves:
        check_move(move)
        size = move.source.numel() * move.source.element_size()
        nbytes += size
        if not size:
            continue
        if move.target.is_contiguous() and move.source.is_contiguous():
            runs.append(Run(move.target.data_ptr(), move.source.data_ptr(), size, move))
        else:
            length, outer = run_length(move)
            if outer and length < bulk_bytes:
                strided.append(move)
            else:
                runs += _cut(move, length, outer)
    joined = _join(runs)
    bulk = [run for run in joined if run.nbytes >= bulk_bytes]
    small = [run for run in joined if run.nbytes < bulk_bytes]
    return Plan(bulk, small, strided, len(runs) - len(joined), nbytes)


Axis = tuple[int, int, int]
"""Step on the target, step on the source (bytes), size."""


def run_length(move: Move) -> tuple[int, tuple[Axis, ...]]:
    """Bytes of a move's runs that are contiguous on both sides, and the axes that repeat them."""
    target, source = move
    return _run_length(target.element_size(), target.shape, target.stride(), source.stride())


@lru_cache(maxsize=4096)  # the pieces of a batch are mostly alike
def _run_length(
    length: int, shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...]
) -> tuple[int, tuple[Axis, ...]]:
    axes = [
        (t * length, s * length, n) for t, s, n in zip(target, source, shape, strict=True) if n > 1
    ]
    axes.sort(key=lambda axis: -axis[0])
    while axes and axes[-1][0] == axes[-1][1] == length:
        length *= axes.pop()[2]
    return length, tuple(axes)


def _cut(move: Move, length: int, outer: tuple[Axis, ...]) -> list[Run]:
    target, source = move.target.data_ptr(), move.source.data_ptr()
    runs = []
    for at in product(*(range(n) for _, _, n in outer)):
        there = target + sum(i * axis[0] for i, axis in zip(at, outer, strict=True))
        here = source + sum(i * axis[1] for i, axis in zip(at, outer, strict=True))
        runs.append(Run(there, here, length, move))
    return runs


def _join(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.target):
        if joined and _touch(joined[-1], run):
            joined[-1] = joined[-1]._replace(nbytes=joined[-1].nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined


def _touch(one: Run, other: Run) -> bool:
    if one.target + one.nbytes != other.target or one.source + one.nbytes != other.source:
        return False
    return one.move is other.move or (
        _same_memory(one.move.target, other.move.target)
        and _same_memory(one.move.source, other.move.source)
    )


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "cpu":
        return other.device.type == "cpu"
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def bytes_at(address: int, nbytes: int, like: torch.Tensor) -> torch.Tensor:
    """Tensor uint8 ``[nbytes]`` over an address in (or, on the host, next to) ``like``'s memory.

    On the host it keeps nothing alive: that is for whoever holds the plan.
    """
    import torch

    if like.device.type == "cpu":
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)
    storage = like.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=like.device)
    return empty.set_(storage, address - storage.data_ptr(), (nbytes,), (1,))
