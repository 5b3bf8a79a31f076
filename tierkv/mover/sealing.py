"""Two kinds of section checksums: one that hosts compute fast, one that devices can compute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tierkv.frame import encode_header
from tierkv.sections import digests

if TYPE_CHECKING:
    from tierkv.frame import Header

__all__ = ["reseal"]


def reseal(header: Header, frame: memoryview, *, folded: bool) -> Header:
    """Give a verified frame the section checksums of its new tier, in place. In a thread.

    The header's own checksum is renewed with it. Between verifying and resealing the memory is
    trusted, as it is while a frame is encoded.

    Args:
        header: Of this frame; its sections were checked by :func:`tierkv.sections.verify`.
        frame: The whole frame, writable.
        folded: Whether a device must be able to check it.

    Returns:
        The header as it is in the frame now.
    """
    if header.folded == folded:
        return header
    fresh = digests([frame[s.offset : s.end] for s in header.sections], folded)
    sealed = replace(header, folded=folded, digests=tuple(fresh))
    encode_header(sealed, frame)
    return sealed
