"""A checksum that devices can compute with plain integer arithmetic.

Two lanes of a multilinear hash (Carter and Wegman's universal family, in the form that Lemire and
Kaser measured in "Strongly universal string hashing is fast", 2014): the data are 32-bit words
``x``, cut into tiles of 16,384; with odd 64-bit weights ``w`` by place in the tile and ``v`` by
tile, a lane is ``sum(v[tile] * sum(w[place] * x))`` mod 2**64, plus a multiple of the length. The
weights come from splitmix64 (Steele, Lea and Flood, 2014) and are the same for ever.

*What it finds.* A change within one word, always: an odd weight times less than 2**32 is never 0
mod 2**64. Any other change that does not know the weights goes unseen with a probability of about
2**-32 a lane at worst (changes of the top bits alone), 2**-64 for both. It is no defence against
somebody who wants to forge a frame; neither is xxh3.

*Speed.* 2-4 GB/s on one core of this project's test machine (shared, AVX-512; 8 KiB sections at the
lower end), where xxh3 is ten times as fast: it is meant for devices, and for frames on their way to
and from them. Sums mod 2**64 do not depend on the order of summing, so that every device gives the
same numbers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from tierkv.device.plan import bytes_at
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["FOLD_ALIGN", "fold", "fold_digests", "fold_rows", "fold_tensors"]

FOLD_ALIGN: Final = 64
"""Sections that are folded have a multiple of this many bytes."""

_TILE: Final = 16_384  # words; the tile, its words as int64 and both lanes' weights fit in L2
_ROUND_WORDS: Final = 2 << 20  # of a device's memory per step: 16 MiB of int64 for each temporary
_SEEDS: Final = (0x7469_6572_6B76_0001, 0x7469_6572_6B76_0002)  # one a lane; "tierkv" + lane
_TILES_APART: Final = 1 << 32  # where the weights of tiles begin in the stream of a lane
_LENGTH_APART: Final = 1 << 48  # ... and the weight of the length


class _Weights:
    """The weights on one device, made on first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.places = self._table(0, _TILE)
        self.length = self._table(_LENGTH_APART, 1)
        self._tiles = [self._table(_TILES_APART, 1024)]  # enough for sections of 64 MiB

    def tiles(self, count: int) -> torch.Tensor:
        """Weights of the first ``count`` tiles, int64 ``[2, count]``."""
        if count > self._tiles[-1].shape[1]:  # the longest section so far decides
            # shorter tables stay: work on other streams may still read their memory
            self._tiles.append(self._table(_TILES_APART, 1 << (count - 1).bit_length()))
        return self._tiles[-1][:, :count]

    def _table(self, first: int, count: int) -> torch.Tensor:
        import numpy as np
        import torch

        rows = []
        for seed in _SEEDS:
            at = np.arange(first + 1, first + count + 1, dtype=np.uint64)
            z = np.uint64(seed) + at * np.uint64(0x9E37_79B9_7F4A_7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
            rows.append((z ^ (z >> np.uint64(31))) | np.uint64(1))
        return torch.from_numpy(np.stack(rows).view(np.int64)).to(self._device)


_weights: dict[torch.device, _Weights] = {}
_scratch = threading.local()


def _weights_on(device: torch.device) -> _Weights:
    found = _weights.get(device)
    if found is None:
        found = _weights.setdefault(device, _Weights(device))
    return found


def fold(data: memoryview) -> bytes:
    """Return the 16-byte device checksum of a buffer.

    Args:
        data: Contiguous bytes, a multiple of :data:`FOLD_ALIGN`. The GIL is free meanwhile.

    Raises:
        ValueError: for another length.
    """
    (digest,) = fold_digests(fold_tensors([over(data, "uint8", (data.nbytes,))]))
    return digest


def fold_digests(numbers: torch.Tensor) -> list[bytes]:
    """The 16 bytes for each row of :func:`fold_tensors` (a host tensor): little-endian lanes."""
    data = numbers.contiguous().numpy().astype("<i8", copy=False).tobytes()
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def fold_tensors(sections: Sequence[torch.Tensor]) -> torch.Tensor:
    """Checksums of several sections, wherever their memory is.

    Neighbours of equal size (the sections of a frame) go together. On an accelerator, temporary
    memory stays below 50 MiB; nothing waits for the device, but the first call and a section longer
    than all before, which bring their weights there.

    Args:
        sections: uint8, one axis, contiguous, a multiple of :data:`FOLD_ALIGN` long; all on one
            device.

    Returns:
        int64 ``[len(sections), 2]`` on that device.

    Raises:
        ValueError: for a section of another kind.
    """
    import torch

    for section in sections:
        _check(section)
    with torch.inference_mode():
        if not sections:
            return torch.empty(0, 2, dtype=torch.int64)
        compute = _fold_on_cpu if sections[0].device.type == "cpu" else fold_rows
        return torch.cat([compute(rows) for rows in _rows(sections)])


def _check(section: torch.Tensor) -> None:
    size = section.shape[0] if section.dim() == 1 else -1
    if section.element_size() != 1 or size < 0 or size % FOLD_ALIGN or not section.is_contiguous():
        raise ValueError(
            f"need contiguous bytes, a multiple of {FOLD_ALIGN}, to fold; got {section.dtype} "
            f"{tuple(section.shape)}"
        )


def _fold_on_cpu(rows: torch.Tensor) -> torch.Tensor:
    """As :func:`fold_rows`, in pieces that stay in the cache."""
    import torch

    count = rows.shape[0]
    if not rows.numel():
        return torch.zeros(count, 2, dtype=torch.int64)
    if rows.data_ptr() % 4:  # only bytes of odd memory given to `fold`; sections are aligned
        rows = rows.clone()
    weights, wide = _weights_on(rows.device), _wide()
    words = rows.view(torch.int32)
    total = (weights.length * rows.shape[1]).repeat(1, count)  # [lanes, sections]
    sums = torch.empty(2, count, dtype=torch.int64)
    tile_weights = weights.tiles(-(-words.shape[1] // _TILE))
    for number, tile in enumerate(torch.split(words, _TILE, 1)):
        size = tile.shape[1]
        step = _TILE // size
        for low in range(0, count, step):
            some = tile[low : low + step]
            block = wide[: some.numel()].view(some.shape).copy_(some)
            if step == 1:
                sums[:, low] = torch.mv(weights.places[:, :size], block[0])
                continue
            for lane in (0, 1):
                out = sums[lane, low : low + step]
                torch.mv(block, weights.places[lane, :size], out=out)
        total += sums * tile_weights[:, number : number + 1]
    return total.T


def _wide() -> torch.Tensor:
    import torch

    found: torch.Tensor | None = getattr(_scratch, "wide", None)
    if found is None:
        found = _scratch.wide = torch.empty(_TILE, dtype=torch.int64)
    return found


def fold_rows(rows: torch.Tensor) -> torch.Tensor:
    """Checksums of equally long sections at equal distance: the form for accelerators.

    Args:
        rows: uint8 ``[sections, bytes]``, rows contiguous.

    Returns:
        int64 ``[sections, 2]``.
    """
    import torch

    if not rows.numel():
        return torch.zeros(rows.shape[0], 2, dtype=torch.int64, device=rows.device)
    weights = _weights_on(rows.device)
    words = rows.view(torch.int32)
    count, size = words.shape
    tiles = -(-size // _TILE)
    total = (weights.length[:, 0] * rows.shape[1]).repeat(count, 1)
    tile_weights = weights.tiles(tiles)
    step = max(1, _ROUND_WORDS // _TILE)  # tiles a round
    for low in range(0, count, step):
        some = words[low : low + step]
        many = max(1, step // some.shape[0])
        for first in range(0, tiles, many):
            for piece, at, n in _whole_and_rest(some, first, min(first + many, tiles)):
                wide = piece.to(torch.int64)  # [sections, tiles, words]
                for lane in (0, 1):
                    sums = (wide * weights.places[lane, : wide.shape[2]]).sum(2)
                    sums *= tile_weights[lane, at : at + n]
                    total[low : low + step, lane] += sums.sum(1)
    return total


def _whole_and_rest(
    words: torch.Tensor, first: int, last: int
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Tiles ``[first, last)`` of every row as ``[rows, tiles, words]``, first tile, tiles."""
    whole = min(last, words.shape[1] // _TILE)
    if whole > first:
        body = words[:, first * _TILE : whole * _TILE]
        yield body.view(body.shape[0], whole - first, _TILE), first, whole - first
    if last > whole:
        yield words[:, whole * _TILE :].unsqueeze(1), whole, 1


def _rows(sections: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Runs of neighbours of equal size, each as one tensor ``[sections, bytes]``."""
    begin = 0
    for end in range(1, len(sections) + 1):
        if end < len(sections) and _follows(sections[end - 1], sections[end]):
            continue
        first, size = sections[begin], sections[begin].shape[0]
        if end - begin > 1:
            first = bytes_at(first.data_ptr(), (end - begin) * size, first)
        yield first.view(end - begin, size)
        begin = end


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    size = one.shape[0]
    if other.shape[0] != size or not size or other.data_ptr() != one.data_ptr() + size:
        return False
    # in host memory the address is enough; two allocations of a device may touch by chance
    return one.device.type == "cpu" or (
        other.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
    )
