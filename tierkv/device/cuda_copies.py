"""Submitting a planned batch of copies to a CUDA stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tierkv.abc import Move
from tierkv.device.bits import as_bits
from tierkv.device.groups import Group, group, place
from tierkv.device.plan import Run
from tierkv.device.stacking import stack
from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.device.batched import BatchedCopy
    from tierkv.device.cuda_streams import CudaStream
    from tierkv.device.kernels import PieceKernel
    from tierkv.device.pinning import Pinned
    from tierkv.device.plan import Plan

__all__ = ["SCRATCH_BYTES", "CudaCopies", "Sorted", "sort_out"]

_log = logging.getLogger(__name__)

SCRATCH_BYTES: Final = 32 << 20
"""Device memory of a stream for small pieces; more would make the first one arrive later."""


@dataclass(slots=True)
class _Pieces:
    """Pieces of one direction; names as in :class:`tierkv.device.plan.Plan`."""

    bulk: list[Run] = field(default_factory=list)
    small: list[Run] = field(default_factory=list)
    strided: list[Move] = field(default_factory=list)


@dataclass(slots=True)
class Sorted:
    """A plan by direction: inside the device, to the host, from the host."""

    inside: _Pieces = field(default_factory=_Pieces)
    to_host: _Pieces = field(default_factory=_Pieces)
    from_host: _Pieces = field(default_factory=_Pieces)


def sort_out(work: Plan, owns: Callable[[torch.Tensor], bool]) -> Sorted:
    """Sort a plan by direction.

    Raises:
        LayoutError: if a move has no side on the device: it would not wait for the stream.
    """
    out = Sorted()

    def of(move: Move) -> _Pieces:
        ends = owns(move.target), owns(move.source)
        if not any(ends):
            raise LayoutError(
                f"a copy from {move.source.device} to {move.target.device} is not this device's"
            )
        return out.inside if all(ends) else out.from_host if ends[0] else out.to_host

    for run in work.bulk:
        of(run.move).bulk.append(run)
    for run in work.small:
        of(run.move).small.append(run)
    for move in work.strided:
        of(move).strided.append(move)
    return out


class CudaCopies:
    """Submits batches to torch's current stream.

    Args:
        name: Of the device, for messages.
        pinned: Its registered host memory.
        batched: The runtime's call for many copies, if it has one.

    Attributes:
        kernel: Copies strided pieces, once it is compiled.
    """

    def __init__(self, name: str, pinned: Pinned, batched: BatchedCopy | None) -> None:
        self._name = name
        self._pinned = pinned
        self._batched = batched
        self.kernel: PieceKernel | None = None

    @property
    def mode(self) -> str:
        """How copies are submitted."""
        bulk = "batched copies" if self._batched is not None else "one copy a piece"
        return bulk if self.kernel is None else f"{bulk}, strided ones by a kernel"

    def submit(
        self, work: Sorted, on: CudaStream, scratch_of: Callable[[CudaStream], torch.Tensor | None]
    ) -> None:
        """Submit; the caller has made the stream torch's current one."""
        handle: int = on.raw.cuda_stream
        self._send([(run, True) for run in work.inside.bulk], handle)
        _move_runs([run.tensors() for run in work.inside.small])
        self._strided(work.inside.strided)
        for pieces, to_host in ((work.to_host, True), (work.from_host, False)):
            left: list[Move] = []
            if pieces.small or pieces.strided:
                left = self._through_scratch(pieces, on, scratch_of, to_host)
            self._cross(pieces.bulk, handle, to_host)
            for move in left:
                _move(move)

    def _through_scratch(
        self,
        pieces: _Pieces,
        on: CudaStream,
        scratch_of: Callable[[CudaStream], torch.Tensor | None],
        to_host: bool,
    ) -> list[Move]:
        """Submit small and strided pieces; those returned have to go one by one."""
        found, left = group(pieces.small, pieces.strided, to_host=to_host, room=SCRATCH_BYTES)
        rounds = place(found, SCRATCH_BYTES)
        with on.turn:  # what lies in scratch memory between a kernel and a copy must stay there
            scratch = scratch_of(on) if found else None
            if scratch is None:  # no memory for it: slower
                return left + [part.move for one in found for part in one.parts]
            for turn in rounds:
                runs = [_crossing(scratch, at, one, to_host) for at, one in turn]
                if to_host:
                    self._kernels(scratch, turn, gather=True)
                self._cross(runs, on.raw.cuda_stream, to_host)
                if not to_host:
                    self._kernels(scratch, turn, gather=False)
        return left

    def _kernels(
        self, scratch: torch.Tensor, turn: Sequence[tuple[int, Group]], *, gather: bool
    ) -> None:
        """Copy between scratch memory and the pieces of groups."""
        flat: list[tuple[torch.Tensor, torch.Tensor]] = []
        strided: list[Move] = []
        for at, one in turn:
            for part in one.parts:
                piece, offset = part.device, at + part.host - one.host
                if part.steps == (1,) and piece.element_size() == 1:
                    spot = scratch[offset : offset + part.nbytes]
                    flat.append((spot, piece) if gather else (piece, spot))
                    continue
                words = scratch.view(piece.dtype)
                first = words.storage_offset() + offset // piece.element_size()
                spot = words.as_strided(piece.shape, part.steps, first)
                strided.append(Move(spot, piece) if gather else Move(piece, spot))
        _move_runs(flat)
        self._strided(strided)

    def _strided(self, moves: Sequence[Move]) -> None:
        """Copy strided pieces inside the device."""
        left, kernel = moves, self.kernel
        if kernel is not None and moves:
            try:
                left = kernel(moves)
            except Exception as error:  # noqa: BLE001 - Triton's own; torch's copies do the same
                _log.warning("%s: no kernel for strided pieces any more: %s", self._name, error)
                self.kernel = None
        for move in stack(left):
            _move(move)

    def _cross(self, runs: Sequence[Run], handle: int, to_host: bool) -> None:
        self._send(
            [
                piece
                for run in runs
                for piece in self._pinned.cut(run, run.target if to_host else run.source)
            ],
            handle,
        )

    def _send(self, runs: Sequence[tuple[Run, bool]], handle: int) -> None:
        """Submit runs (and whether the batched call takes them); not to the default stream."""
        batch: list[Run] = []
        if self._batched is not None and handle:
            batch = [run for run, fit in runs if fit]
            error = self._batched(batch, handle)
            if error:
                _log.warning("%s: no batched copies from now on: %s", self._name, error)
                self._batched, batch = None, []
        if len(batch) < len(runs):
            for run, fit in runs:
                if not (fit and batch):
                    _move(Move(*run.tensors()))


def _move(move: Move) -> None:
    as_bits(move.target).copy_(as_bits(move.source), non_blocking=True)


def _move_runs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy between byte tensors of the device: many in one launch."""
    import torch

    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _crossing(scratch: torch.Tensor, at: int, one: Group, to_host: bool) -> Run:
    """The copy of a group that is at an offset of scratch memory."""
    far = scratch.data_ptr() + at
    if to_host:
        return Run(one.host, far, one.nbytes, Move(one.like, scratch))
    return Run(far, one.host, one.nbytes, Move(scratch, one.like))
