"""Passes over a tensor that is coded in steps, in torch.

What :class:`tierkv_codecs.step_loops.Numbers` does in machine code, with the same result to the
bit: sums are made in an order of their own, not in torch's, which depends on the processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv_codecs import rope

if TYPE_CHECKING:
    import torch

    from tierkv_codecs.affine import Groups

__all__ = ["LANES", "TURNS", "Floats"]

LANES: Final = 16
"""Sums over a row are made of so many that take turns."""
TURNS: Final = 8
"""Sums over tokens likewise."""

_Floats = Any  # NDArray[np.float32]
_Angles = tuple["torch.Tensor", "torch.Tensor"]


def _in_turns(numbers: torch.Tensor, axis: int, turns: int) -> torch.Tensor:
    """Sum over an axis: each of some partial sums in turn gets a number; then they are halved."""
    length = numbers.shape[axis]
    parts = numbers.new_zeros([*numbers.shape[:axis], turns, *numbers.shape[axis + 1 :]])
    for at in range(0, length, turns):
        count = min(turns, length - at)
        parts.narrow(axis, 0, count).add_(numbers.narrow(axis, at, count))
    while (half := parts.shape[axis] // 2) > 0:
        parts = parts.narrow(axis, 0, half) + parts.narrow(axis, half, half)
    return parts


class Floats:
    """Numbers as float32; results are new arrays.

    Attributes:
        largest: Largest magnitude; not finite if anything is not.
    """

    def __init__(self, source: torch.Tensor) -> None:
        import torch

        self._numbers = source.to(torch.float32, copy=True).contiguous()
        self._turned: list[torch.Tensor] = []
        self.largest = float(self._numbers.abs().amax())

    def weigh_rows(self, factor: float) -> tuple[_Floats, _Floats]:
        """Sum of squares, and largest magnitude, of each row times ``factor``: ``[rows]``."""
        rows = self._numbers.mul_(factor).view(-1, self._numbers.shape[-1])
        squares = _in_turns(rows.square(), 1, LANES)
        return squares.numpy()[:, 0], rows.abs().amax(1).numpy()

    def encode_rows(self, factor: float, step: _Floats, top: int, room: torch.Tensor) -> None:
        """Codes, after :meth:`weigh_rows`; ``room`` is int8 ``[rows, dim]``."""
        import torch

        rows = self._numbers.view(room.shape).div_(torch.from_numpy(step)[:, None])
        room.copy_(rows.round_().clamp_(-top, top))

    def still(self, groups: Groups) -> Any:
        """Which channels of which groups of tokens are constant: bool, as ``groups.shape``."""
        import torch

        pieces = groups.cut(self._numbers)
        return torch.stack([(p == p[:, :1]).all(1) for p in pieces], 1).numpy()

    def weigh_keys(
        self, factor: float, angles: _Angles, groups: Groups
    ) -> tuple[_Floats, _Floats, _Floats]:
        """Mean, mean square beside it, and largest distance from it, of each channel."""
        import torch

        means, squares, reach = [], [], []
        for piece in groups.cut(self._numbers.mul_(factor)):
            tokens = piece.shape[1]
            turned = rope.turn(piece, (angles[0][:tokens], angles[1][:tokens]))
            share = float(np.float32(1) / np.float32(tokens))
            mean = _in_turns(turned, 1, TURNS).mul_(share)
            apart = turned - mean
            means.append(mean)
            reach.append(apart.abs().amax(1, keepdim=True))
            squares.append(_in_turns(apart.square_(), 1, TURNS).mul_(share))
            self._turned.append(turned)
        found = [torch.cat(each, 1).numpy() for each in (means, squares, reach)]
        return found[0], found[1], found[2]

    def encode_keys(
        self,
        factor: float,
        angles: _Angles,
        groups: Groups,
        inverse: _Floats,
        mean: _Floats,
        top: int,
        room: torch.Tensor,
    ) -> None:
        """Codes, after :meth:`weigh_keys`; ``room`` is int8, of the shape of the source."""
        import torch

        each = torch.from_numpy(inverse), torch.from_numpy(mean)
        for i, (piece, target) in enumerate(zip(self._turned, groups.cut(room), strict=True)):
            by, middle = (part[:, i : i + 1] for part in each)
            target.copy_(piece.mul_(by).round_().sub_(middle).clamp_(-top, top))
