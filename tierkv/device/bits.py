"""Copies that keep every bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.errors import LayoutError

if TYPE_CHECKING:
    import torch

    from tierkv.abc import Move

__all__ = ["as_bits", "check_move", "copy_move"]

_KINDS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN payloads and odd booleans then survive a copy.

    Raises:
        LayoutError: if its elements are larger than 8 bytes.
    """
    import torch

    name = _KINDS.get(tensor.dtype.itemsize)
    if name is None:
        raise LayoutError(f"elements of {tensor.dtype} have no integer of their size")
    kind: torch.dtype = getattr(torch, name)
    return tensor if tensor.dtype == kind else tensor.view(kind)


def check_move(move: Move) -> None:
    """Refuse a move whose sides do not fit: copies would broadcast, or convert, silently.

    Raises:
        LayoutError: naming both sides.
    """
    target, source = move
    same_size = target.dtype.itemsize == source.dtype.itemsize
    if target.shape != source.shape or not same_size:
        raise LayoutError(
            f"cannot copy {source.dtype} {tuple(source.shape)} to {target.dtype} "
            f"{tuple(target.shape)}: shapes and element sizes must be the same"
        )


def copy_move(move: Move) -> None:
    """Do one checked move now, without the GIL, in inference mode that the caller entered."""
    as_bits(move.target).copy_(as_bits(move.source))
