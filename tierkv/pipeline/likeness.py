"""What the frames of one kind have in common: compared where they are looked at, copied where made.

A header tells what is where in a frame. To read or write one takes microseconds, which is what all
the rest costs where blocks are small. But of the full, raw blocks of one group, space and tenant
all headers are alike but for a few fields. So once one of them was read with every check, others
are compared with it (:class:`Like`): all of what tells where tensors are, and whose frame it is.
And once one was written with every check, others are its copies with fields of their own
(:class:`Stamp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from tierkv.blocks import KEY_BYTES
from tierkv.chains import RAW
from tierkv.frame import encode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.blocks import BlockKey, PartId
    from tierkv.frame import Header

__all__ = ["Like", "Spot", "Stamp", "likeness"]

# Where these are in a header (see tierkv.frame): magic; version; flags, of which two bits are of
# the one block; lengths of header and frame; generation; tokens; part; space and root; then, behind
# the parent, the sizes of all that follows, and tenant, fidelity and section table themselves.
_SUM: Final = 8
_VERSION: Final = 24
_FLAGS: Final = 26
_OF_ONE: Final = 0b11
_HAS_PARENT: Final = 0b01
_LENGTHS: Final = 27  # and the upper half of the flags
_GENERATION: Final = 40
_TOKENS: Final = 48
_EXPIRY: Final = 56
_PART: Final = 64
_SPACE: Final = 98
_PARENT: Final = 162
_SIZES: Final = 194
_TEXTS: Final = 210


class Spot(NamedTuple):
    """One tensor in each frame of a kind.

    Attributes:
        frombuffer: ``torch.frombuffer``.
        dtype: Its dtype.
        elements: How many it has.
        offset: Bytes from the start of the frame.
        shape: Its shape.
    """

    frombuffer: Callable[..., torch.Tensor]
    dtype: torch.dtype
    elements: int
    offset: int
    shape: tuple[int, ...]


class Like:
    """What is the same in the frames of one kind; made by :func:`likeness`.

    Attributes:
        tokens: Tokens of a block.
        spots: Where each tensor is, by layer and name.
    """

    __slots__ = (
        "_end",
        "_flags",
        "_lengths",
        "_magic",
        "_nbytes",
        "_owner",
        "_texts",
        "_tokens",
        "_version",
        "spots",
        "tokens",
    )

    def __init__(
        self, header: Header, frame: memoryview, spots: dict[tuple[int, str], Spot]
    ) -> None:
        self.tokens = header.tokens
        self.spots = spots
        self._nbytes = header.frame_bytes
        head = bytes(frame[: header.payload_offset])
        self._magic, self._version = head[:8], head[_VERSION:_FLAGS]
        self._flags = head[_FLAGS] & ~_OF_ONE
        self._lengths, self._tokens = head[_LENGTHS:_GENERATION], head[_TOKENS:_EXPIRY]
        self._owner = head[_SPACE:_PARENT]
        self._end = _begin_of_digests(head, header)
        self._texts = head[_SIZES : self._end]

    def has(self, frame: memoryview, part: PartId, generation: int) -> bool:
        """Whether a frame is of this kind, and this part in this generation.

        Every byte of the header is compared that says so, or says where in the frame a tensor is.
        Nothing is summed: the rest of the header (checksums of sections, parent, expiry, padding)
        is not looked at, and neither is the payload.
        """
        head = frame[: self._end].tobytes()
        begins = head.startswith
        return (
            begins(self._lengths + generation.to_bytes(8, "little") + self._tokens, _LENGTHS)
            and begins(part + self._owner, _PART)
            and head.endswith(self._texts)
            and begins(self._magic)
            and begins(self._version, _VERSION)
            and head[_FLAGS] & ~_OF_ONE == self._flags
            and len(frame) >= self._nbytes
        )


def likeness(header: Header, frame: memoryview) -> Like | None:
    """What a frame shares with others of its kind.

    Args:
        header: Its header, which passed every check.
        frame: The frame.

    Returns:
        None if it is not a full block that is stored raw: others differ from each other, and are
        read one by one. Nor for memory that torch must not be given.
    """
    if header.tokens != header.block_tokens or header.folded or frame.readonly:
        return None
    if any(s.chain != RAW or not s.nbytes or not s.shape for s in header.sections):
        return None
    import torch

    spots: dict[tuple[int, str], Spot] = {}
    for layer, tensor, dtype, shape, _, offset, nbytes, _ in header.sections:
        kind: torch.dtype = getattr(torch, dtype)
        spot = Spot(torch.frombuffer, kind, nbytes // kind.itemsize, offset, shape)
        spots[layer, tensor] = spot
    return Like(header, frame, spots)


def _begin_of_digests(head: bytes | bytearray, header: Header) -> int:
    """Where the checksums are: behind them come zeros, before them texts that users choose."""
    return head.rindex(b"".join(header.digests), _TEXTS)


class Stamp:
    """Writes the headers of frames that differ in part, parent, generation and checksums only.

    Args:
        header: Of one of them; its checksums count for nothing but their number.

    Raises:
        ConfigError: as :func:`tierkv.frame.encode_header`.
    """

    __slots__ = ("_digests", "_head", "_size")

    def __init__(self, header: Header) -> None:
        self._size = size = header.payload_offset
        head = bytearray(size)
        encode_header(header, memoryview(head))
        low = _begin_of_digests(head, header)
        self._digests = slice(low, low + sum(map(len, header.digests)))
        self._head = head

    def write(
        self,
        out: memoryview,
        part: PartId,
        parent: BlockKey | None,
        generation: int,
        digests: Sequence[bytes],
    ) -> None:
        """Write one, as :func:`tierkv.frame.encode_header` would."""
        head = self._head
        if parent is None:
            head[_FLAGS] &= ~_HAS_PARENT
            head[_PARENT:_SIZES] = bytes(KEY_BYTES)
        else:
            head[_FLAGS] |= _HAS_PARENT
            head[_PARENT:_SIZES] = parent
        head[_GENERATION:_TOKENS] = generation.to_bytes(8, "little")
        head[_PART:_SPACE] = part
        head[self._digests] = b"".join(digests)
        head[_SUM:_VERSION] = xxhash.xxh3_128_digest(memoryview(head)[_VERSION:])
        out[: self._size] = head
