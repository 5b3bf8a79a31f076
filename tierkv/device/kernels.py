"""One kernel launch for many strided pieces of equal shape, where Triton is installed.

torch copies one strided tensor a launch; the pages of a batch are hundreds, at any distance. The
kernel takes a table of addresses instead. It moves 32-bit words, so that no bit can change.

Without Triton (or on a device where it fails its own test) torch's copies do the same, slower.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tierkv.abc import Move
from tierkv.device.plan import run_length

try:  # comes with CUDA builds of torch
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    triton = tl = None

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.device.plan import Axis

__all__ = ["PieceKernel", "find_piece_kernel"]

_log = logging.getLogger(__name__)

_WORD: Final = 4
_BLOCK: Final = 1024  # words of one program
_FEWEST: Final = 4  # pieces from which on a launch with a table pays
_MOST_BLOCKS: Final = 65_535  # of a launch's second axis
_NUMBERS: Final = ("pieces", "words", "outer", "inner", "t_outer", "t_inner", "s_outer", "s_inner")


def _copy_pieces(
    table: tl.tensor,
    pieces: tl.tensor,
    words: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    t_outer: tl.tensor,
    t_inner: tl.tensor,
    s_outer: tl.tensor,
    s_inner: tl.tensor,
    BLOCK: tl.constexpr,  # type: ignore[name-defined, unused-ignore]
) -> None:
    """Compiled: one program copies a block of words of one piece; steps are in words."""
    piece = tl.program_id(0)
    target = tl.load(table + piece).to(tl.pointer_type(tl.int32))
    source = tl.load(table + pieces + piece).to(tl.pointer_type(tl.int32))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word, row = at % words, at // words
    i_inner, i_outer = (row % inner).to(tl.int64), (row // inner).to(tl.int64)
    inside = at < words * outer * inner
    value = tl.load(source + i_outer * s_outer + i_inner * s_inner + word, mask=inside)
    tl.store(target + i_outer * t_outer + i_inner * t_inner + word, value, mask=inside)


class PieceKernel:
    """The kernel for one device.

    Args:
        memory: The device.
    """

    def __init__(self, memory: torch.device) -> None:
        # numbers are not specialised: each new shape would be compiled, for half a second
        self._kernel = triton.jit(_copy_pieces, do_not_specialize=list(_NUMBERS))
        self._memory = memory

    def __call__(self, moves: Sequence[Move]) -> list[Move]:
        """Submit what it can take to torch's current stream; returns the rest."""
        alike: dict[tuple[int, tuple[Axis, ...]], list[Move]] = {}
        rest: list[Move] = []
        for move in moves:
            length, axes = run_length(move)
            steps = (length, *(step for axis in axes for step in axis[:2]))
            ends = (move.target.data_ptr(), move.source.data_ptr())
            if len(axes) > 2 or any(n % _WORD for n in (*steps, *ends)):
                rest.append(move)
            else:
                alike.setdefault((length, axes), []).append(move)
        for (length, over), same in alike.items():
            if len(same) < _FEWEST or not self._launch(length // _WORD, over, same):
                rest += same
        return rest

    def _launch(self, words: int, axes: tuple[Axis, ...], same: Sequence[Move]) -> bool:
        import torch

        (t1, s1, outer), (t2, s2, inner) = ((0, 0, 1), (0, 0, 1), *axes)[-2:]
        blocks = -(-words * outer * inner // _BLOCK)
        if blocks > _MOST_BLOCKS:
            return False
        ends = [[m.target.data_ptr() for m in same], [m.source.data_ptr() for m in same]]
        on_device = self._memory.type != "cpu"
        table = torch.tensor(ends, dtype=torch.int64, pin_memory=on_device)
        self._kernel[(len(same), blocks)](
            table.to(self._memory, non_blocking=True),
            len(same),
            *(words, outer, inner),
            *(step // _WORD for step in (t1, t2, s1, s2)),
            BLOCK=_BLOCK,
        )
        return True

    def works(self) -> bool:
        """Compile it, and compare what it does on a sample with torch's copies."""
        import torch

        source = torch.arange(6 * 5 * 48 * 8, device=self._memory).to(torch.int16)
        found, right = torch.zeros_like(source), torch.zeros_like(source)
        pages = source.view(6, 48, 5, 8)  # pages of tokens, heads, dim
        for target in (found, right):
            frames = target.view(6, 5, 48, 8)
            moves = [Move(frames[5 - i], pages[i].transpose(0, 1)) for i in range(6)]
            if target is found:
                if self(moves):
                    return False
            else:
                for move in moves:
                    move.target.copy_(move.source)
        return bool(torch.equal(found, right))


def find_piece_kernel(memory: torch.device) -> PieceKernel | None:
    """The kernel, compiled and tested; None without Triton, or where it does not work.

    Takes seconds the first time: for a thread of its own.
    """
    if triton is None:
        return None
    try:
        kernel = PieceKernel(memory)
        if kernel.works():
            return kernel
        _log.warning("%s: the kernel for strided pieces copies wrongly and is not used", memory)
    except Exception as error:  # noqa: BLE001 - no compiler, no driver, another Triton: all the same
        _log.info("%s: no kernel for strided pieces: %s", memory, error)
    return None
