"""What the ``nvme`` tier makes of the disk: its batches against raw O_DIRECT calls, side by side.

Both sides move the same frames between a disk and page-aligned memory, with as many threads and as
many calls in flight. The raw side has a file that was written once, an offset for each frame, and
nothing else: no index, no journal, no checks. Ratios only: absolute figures are the machine's.

``python -m benchmarks.disk --json``; a helper for :mod:`benchmarks.datapath` as well.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.report import About, Cell, arguments, emit, paired
from tierkv.abc import OK, ReadRequest, WriteItem
from tierkv.buffers import Arena
from tierkv.config import Tier
from tierkv.testing.bench import part
from tierkv.workers import Workers
from tierkv_backends.nvme import NvmeBackend
from tierkv_backends.nvme.shards import DEPTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer

__all__ = ["RawFile", "TierFile", "direct_works", "rows"]

_PAGE: Final = 4096
_MIB: Final = 1 << 20
_BATCH: Final = 128 * _MIB
SIZES: Final = (2 * _MIB, 8 * _MIB, 32 * _MIB)


def direct_works(directory: str | os.PathLike[str]) -> bool:
    """Whether plain O_DIRECT calls work in a directory; uses nothing of the tier's own code."""
    path = Path(directory) / f"direct-{os.getpid()}"
    page = mmap.mmap(-1, _PAGE)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.pwritev(fd, [page], 0) == _PAGE and os.preadv(fd, [page], 0) == _PAGE
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


def _memory(count: int, nbytes: int) -> list[Buffer]:
    """Page-aligned buffers that were written once."""
    arena = Arena(count * (-(-nbytes // _PAGE) * _PAGE))
    made: list[Buffer] = []
    for number in range(count):
        buffer = arena.allocate(nbytes)
        assert buffer is not None
        with memoryview(os.urandom(_PAGE)) as noise:
            for at in range(0, nbytes, _PAGE):
                buffer.padded[at : at + _PAGE] = noise
        buffer.memory[:8] = number.to_bytes(8, "little")
        made.append(buffer)
    return made


class RawFile:
    """The ceiling: threads that call ``preadv`` and ``pwritev`` on one file, frame by frame.

    It writes to two places in turn, as whoever keeps a frame until its successor is written must.
    """

    def __init__(self, directory: str, buffers: Sequence[Buffer], threads: int) -> None:
        self._memory = [buffer.padded for buffer in buffers]
        self._fd = os.open(
            os.path.join(directory, "raw"), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
        )
        self._pool = ThreadPoolExecutor(threads)
        self._first = 0
        for _ in range(2):  # fresh blocks are slower
            self.write()

    def read(self) -> None:
        """Read every frame once."""
        for done in self._pool.map(self._read, range(len(self._memory))):
            assert done == len(self._memory[0])

    def write(self) -> None:
        """Write every frame once."""
        self._first = len(self._memory) - self._first
        for done in self._pool.map(self._write, range(len(self._memory))):
            assert done == len(self._memory[0])

    def close(self) -> None:
        """Close the file and end the threads."""
        self._pool.shutdown()
        os.close(self._fd)

    def _read(self, number: int) -> int:
        memory = self._memory[number]
        return os.preadv(self._fd, [memory], (self._first + number) * len(memory))

    def _write(self, number: int) -> int:
        memory = self._memory[number]
        return os.pwritev(self._fd, [memory], (self._first + number) * len(memory))


class TierFile:
    """The tier: one batch of frames through :class:`NvmeBackend`, its own threads and loop."""

    def __init__(self, directory: str, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._nbytes = buffers[0].nbytes
        self._runner = asyncio.Runner()
        self._workers = Workers()
        self.backend = NvmeBackend(
            Tier("nvme", max(1 << 30, 4 * len(buffers) * self._nbytes), path=directory)
        )
        self._runner.run(self._workers.start())
        self._runner.run(self.backend.open(self._workers))
        self._parts = [part(number, self._nbytes) for number in range(len(buffers))]
        self._generation = 0
        for _ in range(3):  # from now on extents are recycled
            self.write()

    def read(self) -> None:
        """Read every frame, in one batch."""
        requests = [
            ReadRequest(stored.part, self._generation, 0, self._nbytes) for stored in self._parts
        ]
        into = [buffer.memory for buffer in self._buffers]
        assert set(self._runner.run(self.backend.read(requests, into))) == {OK}

    def write(self) -> None:
        """Write a new generation of every frame, in one batch."""
        self._generation += 1
        items = [
            WriteItem(replace(stored, generation=self._generation), buffer)
            for stored, buffer in zip(self._parts, self._buffers, strict=True)
        ]
        assert set(self._runner.run(self.backend.write(items))) == {OK}

    def close(self) -> None:
        """Close the tier."""
        self._runner.run(self.backend.aclose())
        self._runner.run(self._workers.aclose())
        self._runner.close()


def rows(
    directory: str | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    batch: int = _BATCH,
) -> list[dict[str, Cell]]:
    """Measure; one row for each direction and frame size.

    Args:
        directory: Where to put the files; a temporary directory of its own inside is removed.
        sizes: Bytes of a frame.
        repeats: Interleaved pairs.
        batch: Bytes of a batch; ``batch // size`` frames, at least one.

    Returns:
        Rows with ``ratio_to_odirect`` (our speed / raw speed, pair by pair, median) and its
        quartiles. Without O_DIRECT here there are none: nothing could be compared.
    """
    made: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="tierkv-disk-") as place:
        if not direct_works(place):
            return []
        for nbytes in sizes:
            count = max(1, batch // nbytes)
            buffers = _memory(count, nbytes)  # the same: huge pages or not makes a difference
            raw = RawFile(place, buffers, DEPTH)
            tier = TierFile(os.path.join(place, str(nbytes)), buffers)
            try:
                made += [_row(op, nbytes, count, raw, tier, repeats) for op in ("read", "write")]
            finally:
                tier.close()
                raw.close()
    return made


def _row(
    op: str, nbytes: int, count: int, raw: RawFile, tier: TierFile, repeats: int
) -> dict[str, Cell]:
    ours, theirs = (tier.read, raw.read) if op == "read" else (tier.write, raw.write)
    before = tier.backend.stats().details
    seen = paired(theirs, ours, repeats)
    stats = tier.backend.stats()
    batches = stats.details["batches"] - before["batches"]
    per = {
        name: (stats.details[name] - before[name]) / batches
        for name in ("syscalls", "hops", "shards", "bounce_bytes")
    }
    return {
        "op": f"nvme {op}",
        "mib": nbytes // _MIB,
        "frames": count,
        "threads": DEPTH,
        "mode": stats.mode,
        "ratio_to_odirect": seen.ratio.median,
        "low": seen.ratio.low,
        "high": seen.ratio.high,
        "gb_s": count * nbytes / seen.b.median / 1e9,
        "raw_gb_s": count * nbytes / seen.a.median / 1e9,
        "cpu_ratio": seen.cpu_ratio.median,
        **{f"{name}_per_batch": value for name, value in per.items()},
        "buffered_bytes": stats.details["buffered_bytes"],
    }


ABOUT: Final = About(
    measures="GB/s of the batches of an nvme tier, reading and writing",
    against="threads that read and write one file with O_DIRECT, in turns",
    floors="none here (benchmarks.datapath has them); exit status 1 if O_DIRECT works and the tier "
    "did not use it",
    takes="less than a minute; less with --repeats 3",
    needs="1 GiB on the disk to measure; where O_DIRECT does not work there are no rows",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if O_DIRECT works here and the tier did not use it."""
    parser = arguments("disk", __doc__, ABOUT)
    parser.add_argument("--directory", help="on the disk to measure; default: the temporary one")
    parser.add_argument("--repeats", type=int, default=15, help="pairs per row")
    parser.add_argument("--batch", type=int, default=_BATCH, help="bytes of a batch")
    args = parser.parse_args(argv)
    found = rows(args.directory, repeats=args.repeats, batch=args.batch)
    emit("disk", found, args.json)
    return int(any(row["buffered_bytes"] for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
