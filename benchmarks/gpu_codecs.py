"""Codecs in device memory: the bytes of the host's codecs, and how fast they are made.

Rows of :mod:`benchmarks.gpu_check`. A batch is the sections of many blocks: bfloat16, 8 heads, 64
tokens, 128 numbers, shuffled in device memory as the pages of a serving engine are. Speeds are of
the raw bytes, beside a copy of them inside the device; what a demotion to host memory takes is
measured beside the copy of the raw bytes to pinned memory, which it is to beat.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.report import paired
from tierkv.registry import resolve
from tierkv_codecs.triton import coding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.report import Paired
    from tierkv.abc import TensorBytesCodec

__all__ = ["CODECS", "Batch", "Seen", "seen"]

CODECS = ("int8", "fp8", "int4", "rot4")
_SHAPE = (8, 64, 128)
_COMPARED = 4  # sections of a batch that the host encodes as well


class Seen(NamedTuple):
    """One number about one codec.

    Attributes:
        what: What it is.
        value: The number.
        exact: Whether it has to be 0.
    """

    what: str
    value: float
    exact: bool = False


class Batch:
    """Sections in device memory, room for their encodings, and sections to decode into.

    Args:
        where: The device.
        sections: How many; the first ones are compared with the host's.
        shape: Heads, tokens, dim.
    """

    def __init__(self, where: str, sections: int, shape: tuple[int, ...] = _SHAPE) -> None:
        self.shape = shape
        pool = torch.randn((2 * sections, *shape), device=where).bfloat16()
        places = torch.randperm(2 * sections).tolist()
        self.sources = [pool[at] for at in places[:sections]]
        self.targets = [pool[at] for at in places[sections:]]
        self.plain = torch.empty((sections, *shape), dtype=pool.dtype, device=where)
        self.copied = torch.empty_like(self.plain)
        self.gpu = self.plain.is_cuda
        self.host = torch.empty(self.plain.shape, dtype=pool.dtype, pin_memory=self.gpu)

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.gpu:
            torch.cuda.synchronize()

    def timed(
        self, theirs: Callable[[], object], ours: Callable[[], object], repeats: int
    ) -> Paired:
        """Both in turns, to their end."""

        def to_the_end(work: Callable[[], object]) -> None:
            work()
            self.wait()

        return paired(lambda: to_the_end(theirs), lambda: to_the_end(ours), repeats)


def _wrong(codec: TensorBytesCodec, batch: Batch, tensor: str, room: torch.Tensor) -> int:
    """Sections that the device encodes or decodes differently."""
    wrong, size = 0, codec.encoded_bytes(batch.shape, "bfloat16", tensor)
    for number in range(min(_COMPARED, len(batch.sources))):
        out = memoryview(bytearray(size))
        codec.encode(batch.sources[number].cpu(), tensor, out)
        back = torch.empty(batch.shape, dtype=torch.bfloat16)
        codec.decode(out, tensor, back)
        same = bytes(room[number, :size].cpu().numpy()) == bytes(out)
        wrong += not (same and torch.equal(batch.targets[number].cpu(), back))
    return wrong


def seen(
    where: str, *, sections: int = 1024, repeats: int = 15, batch: Batch | None = None
) -> Iterator[Seen]:
    """Check and measure every codec.

    Args:
        where: The device: ``"cuda"``; ``"cpu"`` in Triton's interpreter.
        sections: Of a batch: 128 KiB each, and twice as much memory.
        repeats: Interleaved pairs.
        batch: The batch, if not one of ``sections`` sections.
    """
    batch = batch or Batch(where, sections)
    nbytes = batch.plain.numel() * batch.plain.element_size()
    for name, tensor in product(CODECS, "kv"):
        codec: TensorBytesCodec = resolve("codecs", name)()
        place = batch.plain.device
        room = coding.room(codec, batch.shape, "bfloat16", tensor, place, len(batch.sources))
        refused = coding.encode(codec, batch.sources, tensor, room)
        heads = [memoryview(row.numpy()) for row in room[:, :8].cpu()]

        def encode(
            codec: TensorBytesCodec = codec, tensor: str = tensor, room: torch.Tensor = room
        ) -> None:
            coding.encode(codec, batch.sources, tensor, room)

        def decode(
            codec: TensorBytesCodec = codec,
            tensor: str = tensor,
            room: torch.Tensor = room,
            heads: list[memoryview] = heads,
        ) -> None:
            coding.decode(codec, room, heads, tensor, batch.targets)

        decode()
        wrong = sum(refused) + _wrong(codec, batch, tensor, room)
        yield Seen(f"{name} {tensor}: sections unlike the host's", wrong, exact=True)
        for way, work in (("encode", encode), ("decode", decode)):
            speed = batch.timed(lambda: batch.copied.copy_(batch.plain), work, repeats)
            yield Seen(f"{name} {tensor}: {way}, of a device copy", speed.ratio.median)
            yield Seen(f"{name} {tensor}: {way}, GB/s", nbytes / speed.b.median / 1e9)
        yield _demotion(f"{name} {tensor}", batch, room, encode, repeats)


def _demotion(
    name: str, batch: Batch, room: torch.Tensor, encode: Callable[[], None], repeats: int
) -> Seen:
    """Encode and copy the encodings to pinned memory, against copying the sections there."""
    out = torch.empty(room.shape, dtype=torch.uint8, pin_memory=batch.gpu)

    def ours() -> None:
        encode()
        out.copy_(room, non_blocking=True)

    speed = batch.timed(lambda: batch.host.copy_(batch.plain, non_blocking=True), ours, repeats)
    return Seen(f"{name}: encode and copy to the host, of a raw copy there", speed.ratio.median)
