"""One open root: moves frames between segment files and memory. Called in worker threads.

Order of things in a write: pages are taken, the data is written, the put record is journalled,
the frame becomes visible. So whatever is visible is complete.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.abc import OK, IoResult, IoStatus
from tierkv.errors import BackendError
from tierkv_backends.nvme import records
from tierkv_backends.nvme.catalog import Catalog, Draft
from tierkv_backends.nvme.journal import Journal
from tierkv_backends.nvme.root import Root
from tierkv_backends.nvme.segments import Segments
from tierkv_backends.nvme.space import Metadata, Space
from tierkv_backends.nvme.transfer import PAGE, Piece, Scratch, Transfer, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import ReadRequest, WriteItem
    from tierkv.blocks import PartId

__all__ = ["ReadPlan", "Settings", "Store"]

_RECORD: Final = 256  # a put record with a short tenant name, generously
_SCRATCH: Final = 8 << 20
_COUNTS: Final = (
    "batches",
    "bounce_bytes",
    "bytes_read",
    "bytes_written",
    "inline_reads",
    "reads",
    "syscalls",
    "writes",
)
_MISSING: Final = IoResult(IoStatus.MISSING)
_SHORT: Final = IoResult(IoStatus.SHORT)
_FULL: Final = IoResult(IoStatus.FULL)


class Settings(NamedTuple):
    """What a store needs to know.

    Attributes:
        tier: Name of the tier, for errors.
        path: Root directory.
        capacity: Bytes that everything under the root may take.
        segment_pages: Pages of a segment file of a new root.
        io: ``"auto"``, ``"direct"`` or ``"buffered"``.
        step: Allocation step of the journal in bytes.
    """

    tier: str
    path: str
    capacity: int
    segment_pages: int
    io: str
    step: int


class ReadPlan(NamedTuple):
    """A batch of reads, planned: results known so far, pieces to move, frames held meanwhile."""

    results: list[IoResult]
    pieces: list[Piece]
    pinned: list[bytes]
    nbytes: int


class Store:
    """Root, segments, space and catalog of one tier.

    Attributes:
        catalog: Index and journal.
        direct: Whether O_DIRECT is in use.
        refused: Whether O_DIRECT was wanted and the file system refused it.
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
            if self.refused and settings.io == "direct":
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
        self._root, self._segments, self._space = root, segments, space
        self._journal = journal
        self._files = len(segments)
        self._scratch = Scratch(_SCRATCH)
        self._flush_error: OSError | None = None
        self._nowait = hasattr(os, "RWF_NOWAIT")
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.counts["damaged_records"] = journal.damaged

    @property
    def disk_bytes(self) -> int:
        """Real bytes of everything under the root, as of the last change."""
        return self._space.data_disk + self._space.metadata.disk

    @property
    def segments(self) -> int:
        """Segment files."""
        return len(self._segments)

    # ------------------------------------------------------------------ reading

    def plan(self, requests: Sequence[ReadRequest], into: Sequence[memoryview]) -> ReadPlan:
        """Look everything up and hold the frames; quick, for the event loop.

        Every plan must end in :meth:`end_read`.
        """
        plan = ReadPlan([], [], [], sum(request.length for request in requests))
        for item, (request, target) in enumerate(zip(requests, into, strict=True)):
            record = self.catalog.pin(request.part, request.generation)
            if record is None:
                plan.results.append(_MISSING)
                continue
            plan.pinned.append(record)
            extents = records.extents_of(record)
            room = sum(extent.pages for extent in extents) * PAGE - request.offset
            inside = request.offset >= 0 and 0 <= request.length <= room
            if not inside or len(target) != request.length:
                plan.results.append(_SHORT)
                continue
            plan.results.append(OK)
            plan.pieces.extend(self._segments.pieces(item, extents, request.offset, target))
        return plan

    def read(self, plan: ReadPlan) -> None:
        """Move the pieces of a plan; failures go into its results. Blocks."""
        transfer = Transfer(writing=False, direct=self.direct, scratch=self._scratch)
        transfer.run(plan.pieces)
        for item, result in transfer.failed.items():
            plan.results[item] = result
        good = sum(result is OK for result in plan.results)
        moved = sum(len(p.memory) for p in plan.pieces if plan.results[p.item] is OK)
        self._count(transfer, reads=good, bytes_read=moved)

    def read_cached(self, plan: ReadPlan) -> bool:
        """Move the pieces of a plan if the page cache has them all; never waits for the disk.

        Only of use without O_DIRECT. False: nothing counts as read, use :meth:`read`.
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
        with self._lock:
            self.counts["batches"] += 1
            self.counts["inline_reads"] += len(plan.pinned)
            self.counts["reads"] += sum(result is OK for result in plan.results)
            self.counts["bytes_read"] += sum(len(piece.memory) for piece in plan.pieces)
            self.counts["syscalls"] += len(plan.pieces)
        return True

    def end_read(self, plan: ReadPlan) -> None:
        """Let the frames of a plan go."""
        for record in plan.pinned:
            self.catalog.unpin(record)

    # ------------------------------------------------------------------ writing

    def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Write a batch; see :meth:`tierkv.abc.Backend.write`. Blocks."""
        results: dict[int, IoResult] = {}
        drafts: list[Draft] = []
        transfer = Transfer(writing=True, direct=self.direct, scratch=self._scratch)
        try:
            self._allocate(items, drafts, results)
            transfer.run(
                [
                    piece
                    for draft in drafts
                    for piece in self._segments.pieces(
                        draft.item, draft.extents, 0, _padded(items[draft.item])
                    )
                ]
            )
        except BaseException:  # a buffer that is none any more, no memory: nothing was shown yet
            for draft in drafts:
                self._space.free(draft.extents)
            raise
        self._segments.written(extent for draft in drafts for extent in draft.extents)
        results.update(transfer.failed)
        written = []
        for draft in drafts:
            if draft.item in transfer.failed:
                self._space.free(draft.extents)
            else:
                written.append(draft)
        results.update(self.catalog.commit(written))
        self.catalog.checkpoint()
        self._notice_files()
        good = [draft.stored.nbytes for draft in drafts if results[draft.item] is OK]
        self._count(transfer, writes=len(good), bytes_written=sum(good))
        return [results[item] for item in range(len(items))]

    def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts, and shrink if the tier is over its capacity. Blocks."""
        self.catalog.delete(parts)
        self._space.trim()
        self.catalog.checkpoint()
        self._notice_files()

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
            self._segments.sync()
            self.catalog.sync()
        except OSError as error:
            self._flush_error = error
            raise
        self.catalog.refresh_disk()

    def close(self) -> None:
        """Close all files and give the root up."""
        self._journal.close()
        self._segments.close()
        self._root.close()

    def _allocate(
        self, items: Sequence[WriteItem], drafts: list[Draft], results: dict[int, IoResult]
    ) -> None:
        """Find room for each item: a draft, or a result that says why not."""
        pending = 0
        for item, (stored, buffer) in enumerate(items):
            if self.catalog.newer(stored):
                results[item] = _MISSING
                continue
            if buffer.nbytes < stored.nbytes:
                results[item] = _SHORT
                continue
            pending += _RECORD + len(stored.tenant)
            try:
                extents = self._space.allocate(max(1, -(-stored.nbytes // PAGE)), pending)
            except OSError as error:
                results[item] = failure(error)
                continue
            if extents is None:
                results[item] = _FULL
            else:
                drafts.append(Draft(item, stored, extents))

    def _notice_files(self) -> None:
        # the directory itself grows with its entries
        if len(self._segments) != self._files:
            self._files = len(self._segments)
            self.catalog.refresh_disk()

    def _count(self, transfer: Transfer, **figures: int) -> None:
        with self._lock:
            self.counts["batches"] += 1
            self.counts["bounce_bytes"] += transfer.bounced
            self.counts["syscalls"] += transfer.calls
            for name, value in figures.items():
                self.counts[name] += value


def _padded(item: WriteItem) -> memoryview:
    """Whole pages of a frame to write; the padding is zeroed, it may hold somebody's bytes."""
    nbytes = item.stored.nbytes
    memory = item.buffer.padded[: -(-nbytes // PAGE) * PAGE]
    if len(memory) > nbytes:
        memory[nbytes:] = bytes(len(memory) - nbytes)
    return memory
