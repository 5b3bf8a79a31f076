"""One open root: moves frames between segment files and memory. Called in worker threads."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.abc import OK, IoResult
from tierkv.errors import BackendError
from tierkv_backends.nvme import records
from tierkv_backends.nvme.catalog import Catalog
from tierkv_backends.nvme.journal import Journal
from tierkv_backends.nvme.root import Root
from tierkv_backends.nvme.segments import Segments
from tierkv_backends.nvme.space import Metadata, Space
from tierkv_backends.nvme.transfer import PAGE, Piece, Scratch, Transfer
from tierkv_backends.nvme.writing import Writer
from tierkv_backends.results import MISSING, SHORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import ReadRequest, WriteItem
    from tierkv.blocks import PartId
    from tierkv.extents import Extent
    from tierkv_backends.nvme.writing import WriteJob

__all__ = ["Held", "ReadPlan", "Settings", "Store"]

_SCRATCH: Final = 8 << 20
_COUNTS: Final = (
    "batches",
    "bounce_bytes",
    "bytes_read",
    "bytes_written",
    "direct_bytes",
    "direct_reads",
    "direct_writes",
    "inline_reads",
    "reads",
    "syscalls",
    "writes",
)


class Settings(NamedTuple):
    """What a store needs to know.

    Attributes:
        tier: Name of the tier, for errors.
        path: Root directory.
        capacity: Bytes that everything under the root may take.
        segment_pages: Pages of a segment file of a new root.
        io: ``"auto"``, ``"direct"``, ``"gds"`` (needs O_DIRECT, too) or ``"buffered"``.
        step: Allocation step of the journal in bytes.
    """

    tier: str
    path: str
    capacity: int
    segment_pages: int
    io: str
    step: int


class Held(NamedTuple):
    """A batch of reads, looked up.

    Attributes:
        results: Known so far, by item.
        found: Item, request and extents of what is there to read.
        pinned: Records of the frames held meanwhile.
    """

    results: list[IoResult]
    found: list[tuple[int, ReadRequest, list[Extent]]]
    pinned: list[bytes]


class ReadPlan(NamedTuple):
    """A batch of reads into host memory: what was looked up, pieces to move, bytes asked for."""

    held: Held
    pieces: list[Piece]
    nbytes: int

    @property
    def results(self) -> list[IoResult]:
        """Results, by item."""
        return self.held.results


class Store:
    """Root, segments, space and catalog of one tier.

    Attributes:
        catalog: Index and journal.
        direct: Whether O_DIRECT is in use.
        refused: Whether O_DIRECT was wanted and the file system refused it.
        segments: The segment files.
        writer: What makes frames visible.
        counts: Figures for ``stats()``.
    """

    def __init__(self, settings: Settings) -> None:
        """Take the root and recover its index. Blocks.

        Raises:
            BackendError: if the root cannot be used; nothing stays open then.
        """
        root = Root(settings.tier, settings.path, settings.segment_pages)
        segments: Segments | None = None
        try:
            self._lock = threading.Lock()
            self.direct = settings.io != "buffered" and root.supports_direct()
            self.refused = settings.io != "buffered" and not self.direct
            if self.refused and settings.io in ("direct", "gds"):
                raise BackendError(
                    settings.tier,
                    f"the file system of {settings.path!r} refuses O_DIRECT; set io = 'buffered'",
                )
            size = root.superblock.segment_pages
            segments = Segments(root.fd, size, direct=self.direct)
            pages = max(segments.end, -(-(settings.capacity // PAGE) // size) * size)
            space = Space(segments, settings.capacity, pages, Metadata(settings.step))
            journal = Journal(root.fd, root.superblock.salt, settings.step)
            self.catalog = Catalog(root.fd, root.superblock.salt, journal, space)
            try:
                self.catalog.recover(segments)
            except BaseException:
                journal.close()
                raise
        except BaseException as error:
            if segments is not None:
                segments.close()
            root.close()
            if isinstance(error, OSError):
                message = f"cannot open {settings.path!r}: {error}"
                raise BackendError(settings.tier, message) from error
            raise
        self._root, self._space, self._journal = root, space, journal
        self.segments = segments
        self.writer = Writer(self.catalog, space, segments)
        self._scratch = Scratch(_SCRATCH)
        self._flush_error: OSError | None = None
        self._nowait = hasattr(os, "RWF_NOWAIT")
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.counts["damaged_records"] = journal.damaged

    @property
    def directory(self) -> int:
        """Descriptor of the root directory."""
        return self._root.fd

    @property
    def disk_bytes(self) -> int:
        """Real bytes of everything under the root, as of the last change."""
        return self._space.data_disk + self._space.metadata.disk

    # ------------------------------------------------------------------ reading

    def hold(self, requests: Sequence[ReadRequest], sizes: Sequence[int]) -> Held:
        """Look everything up and hold the frames until :meth:`let_go`; quick, for the event loop.

        Args:
            requests: What to read.
            sizes: Bytes that there is room for, for each.
        """
        held = Held([], [], [])
        for item, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            record = self.catalog.pin(request.part, request.generation)
            if record is None:
                held.results.append(MISSING)
                continue
            held.pinned.append(record)
            extents = records.extents_of(record)
            room = sum(extent.pages for extent in extents) * PAGE - request.offset
            inside = request.offset >= 0 and 0 <= request.length <= min(room, size)
            held.results.append(OK if inside else SHORT)
            if inside:
                held.found.append((item, request, extents))
        return held

    def let_go(self, held: Held) -> None:
        """Let the frames of a read go."""
        for record in held.pinned:
            self.catalog.unpin(record)

    def plan(self, requests: Sequence[ReadRequest], into: Sequence[memoryview]) -> ReadPlan:
        """:meth:`hold`, and what to move where."""
        held = self.hold(requests, list(map(len, into)))
        plan = ReadPlan(held, [], sum(request.length for request in requests))
        for item, request, extents in held.found:
            target = into[item]
            if len(target) == request.length:
                plan.pieces.extend(self.segments.pieces(item, extents, request.offset, target))
            else:
                held.results[item] = SHORT
        return plan

    def read_shard(self, shard: tuple[ReadPlan, Sequence[Piece]]) -> None:
        """Move some pieces of a plan; failures go into its results. Blocks."""
        plan, pieces = shard
        transfer = Transfer(writing=False, direct=self.direct, scratch=self._scratch)
        transfer.run(pieces)
        for item, result in transfer.failed.items():
            plan.results[item] = result
        self._count(transfer)

    def read_cached(self, plan: ReadPlan) -> bool:
        """Move the pieces of a plan if the page cache has them all; never waits for the disk.

        Only without O_DIRECT: with it the kernel takes RWF_NOWAIT, but the call waits for the
        device all the same, 56-250 us for 4-256 KiB on a quick disk and without bound on a dying
        one, and that on the event loop. False: nothing counts as read, use :meth:`read_shard`.
        """
        if self.direct or not self._nowait:
            return False
        for _, fd, offset, memory in plan.pieces:
            try:
                if os.preadv(fd, [memory], offset, os.RWF_NOWAIT) != len(memory):
                    return False
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    self._nowait = False
                return False
        self.add(inline_reads=len(plan.held.pinned), syscalls=len(plan.pieces))
        return True

    def count_read(self, plan: ReadPlan) -> None:
        """Count a plan whose pieces have all been moved."""
        good = sum(result is OK for result in plan.results)
        moved = sum(len(p.memory) for p in plan.pieces if plan.results[p.item] is OK)
        self.add(batches=1, reads=good, bytes_read=moved)

    # ------------------------------------------------------------------ writing

    def write(self, items: Sequence[WriteItem], job: WriteJob) -> None:
        """Write a batch and show it; see :meth:`tierkv.abc.Backend.write`. Blocks."""
        self.begin(items, job, grow=True)
        self.write_shard((job, self.pieces(items, job)))

    def begin(self, items: Sequence[WriteItem], job: WriteJob, *, grow: bool) -> bool:
        """Take pages for a batch; see :meth:`Writer.begin`. Quick unless ``grow``."""
        return self.writer.begin(job, [(s, b.nbytes) for s, b in items], grow=grow)

    def pieces(self, items: Sequence[WriteItem], job: WriteJob) -> list[Piece]:
        """What to write where; see :meth:`Writer.pieces`. Quick."""
        return self.writer.pieces(job, items)

    def write_shard(self, shard: tuple[WriteJob, Sequence[Piece]]) -> None:
        """Move some pieces of a batch; whoever moves the last ones shows the frames. Blocks."""
        job, pieces = shard
        transfer = Transfer(writing=True, direct=self.direct, scratch=self._scratch)
        if not self.writer.moving(job):
            return
        try:
            transfer.run(pieces)
        except BaseException:  # no memory: nothing was shown yet
            self.writer.broke(job)
            raise
        self._count(transfer)
        if self.writer.moved(job, transfer.failed):
            self.show(job)

    def show(self, job: WriteJob) -> None:
        """Journal and show the frames of a batch whose data is written. Blocks."""
        self.writer.publish(job)
        good = self.writer.good(job)
        self.add(batches=1, writes=len(good), bytes_written=sum(good))

    def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts, and shrink if the tier is over its capacity. Blocks."""
        self.catalog.delete(parts)
        self._space.trim()
        self.catalog.checkpoint()
        self.writer.notice_files()

    def flush(self) -> None:
        """Make everything so far durable: data first, then the journal. Blocks.

        After a failure it is unknown what reached the medium, and asking again would not tell: the
        kernel reports an error once and forgets the pages. So the error stays.

        Raises:
            OSError: if the medium refuses now, or did so before.
        """
        if self._flush_error is not None:
            raise self._flush_error
        self.catalog.settle()
        try:
            self.segments.sync()
            self.catalog.sync()
        except OSError as error:
            self._flush_error = error
            raise
        self.catalog.refresh_disk()

    def close(self) -> None:
        """Close all files and give the root up."""
        self._journal.close()
        self.segments.close()
        self._root.close()

    def add(self, **figures: int) -> None:
        """Add to ``counts``. Thread-safe."""
        with self._lock:
            for name, value in figures.items():
                self.counts[name] += value

    def _count(self, transfer: Transfer) -> None:
        self.add(bounce_bytes=transfer.bounced, syscalls=transfer.calls)
