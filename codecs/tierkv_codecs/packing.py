"""Codes of a few bits in bytes, in an order that wide registers like.

Codes stand in rows. A code of ``b`` bits is cut into fields of 4, 2 and 1 bits (3 = 2 + 1, 6 =
4 + 2), and every field has an area of its own. An area of ``w``-bit fields has ``8 // w`` codes to
a byte, from rows that are far apart: byte row ``r`` holds in its lowest bits row ``r``, above it
row ``r + step`` and so on, ``step`` being the number of byte rows. Both ways, whole rows of bytes
are shifted and masked at once. Rows that are missing at the end count as zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.views import over
from tierkv_codecs.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["FIELDS", "fields", "pack", "packed_bytes", "unpack"]

FIELDS: Final[dict[int, tuple[int, ...]]] = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2)}
"""Widths of the fields of a code, lowest bits first."""


def fields(rows: int, bits: int) -> Iterator[tuple[int, int, int]]:
    """Triples (width of the field, its lowest bit in the code, byte rows of its area)."""
    low = 0
    for width in FIELDS[bits]:
        yield width, low, -(-rows // (8 // width))
        low += width


def packed_bytes(rows: int, dim: int, bits: int) -> int:
    """Bytes that ``rows`` rows of ``dim`` codes take."""
    return dim * sum(step for _, _, step in fields(rows, bits))


def pack(codes: torch.Tensor, bits: int, out: memoryview) -> None:
    """Write ``codes``, uint8 ``[rows, dim]`` and contiguous, to ``out``."""
    rows, dim = codes.shape
    at = 0
    loop = kernel("pack_field")
    for width, low, step in fields(rows, bits):
        area = over(out[at:], "uint8", (step, dim))
        at += step * dim
        if loop is not None:
            loop(codes.numpy(), low, width, area.numpy())
            continue
        area.zero_()
        for part in range(8 // width):
            piece = codes[part * step : (part + 1) * step]
            field = piece.bitwise_right_shift(low).bitwise_and_((1 << width) - 1)
            area[: len(piece)].bitwise_or_(field.bitwise_left_shift_(part * width))


def unpack(data: memoryview, bits: int, codes: torch.Tensor) -> None:
    """Undo :func:`pack`; ``data`` has at least the bytes it takes."""
    rows, dim = codes.shape
    at = 0
    for width, low, step in fields(rows, bits):
        area = over(data[at:], "uint8", (step, dim))
        at += step * dim
        for part in range(8 // width):
            piece = codes[part * step : (part + 1) * step]
            field = area[: len(piece)].bitwise_right_shift(part * width)
            field.bitwise_and_((1 << width) - 1)
            if low:
                piece.bitwise_or_(field.bitwise_left_shift_(low))
            else:
                piece.copy_(field)
