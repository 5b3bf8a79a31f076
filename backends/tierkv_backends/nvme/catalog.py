"""The index of a root and the journal behind it: which frame lies where, before and after a crash.

Two locks, always taken in this order: ``_journal_lock``, held across the small metadata writes,
and ``space.lock``, which guards index and page sets and is never held across I/O.

Pages of a frame are given back only when its delete record (or the put record of its successor)
is in the journal and no read of it is under way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import OK, IoResult, IoStatus
from tierkv.errors import BackendError
from tierkv.extents import Extent
from tierkv_backends.nvme import records
from tierkv_backends.nvme.segments import number_of
from tierkv_backends.nvme.space import merge
from tierkv_backends.nvme.transfer import PAGE, list_at
from tierkv_backends.results import MISSING, failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv_backends.nvme.journal import Journal
    from tierkv_backends.nvme.segments import Segments
    from tierkv_backends.nvme.space import Space

__all__ = ["Catalog", "Draft"]

_log = logging.getLogger("tierkv.nvme")


class Draft(NamedTuple):
    """A frame whose data was written, but which nobody can see yet.

    Attributes:
        item: Its index in the batch.
        stored: What it is.
        extents: Where it lies.
    """

    item: int
    stored: StoredPart
    extents: list[Extent]


class Catalog:
    """Index of live frames, kept in step with the journal. Thread-safe.

    Args:
        root: Descriptor of the root directory.
        salt: Seed of the record checksums.
        journal: The journal, not loaded yet.
        space: Where pages come from and go back to.

    Attributes:
        live_bytes: Bytes of the extents of all live frames.
        checkpoints: Checkpoints written so far.
    """

    def __init__(self, root: int, salt: int, journal: Journal, space: Space) -> None:
        self.live_bytes = 0
        self.checkpoints = 0
        self._root = root
        self._salt = salt
        self._journal = journal
        self._space = space
        self._index: dict[PartId, bytes] = {}
        self._journal_lock = threading.Lock()
        self._disk_lock = threading.Lock()
        self._reading: dict[int, int] = {}  # first page of a frame -> reads under way
        self._dying: dict[int, list[Extent]] = {}  # frames to free after their last read
        self._owed: list[tuple[bytes, list[Extent]]] = []  # deletes that are not journalled yet
        self._checkpointing = False
        self._retry_at = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def journal_bytes(self) -> int:
        """Bytes of records in the current journal file."""
        return self._journal.used

    def parts(self) -> list[StoredPart]:
        """Every live part."""
        return [records.stored_of(record) for record in self._index.values()]

    # ------------------------------------------------------------------ recovery

    def recover(self, segments: Segments) -> None:
        """Load the journal and claim the pages of every sound record.

        A record is dropped if its lengths disagree, if it lies outside the segment files, or if a
        later record claims the same pages.

        Raises:
            OSError: if the files cannot be read or repaired.
        """
        index = self._journal.load()
        present = merge(segments.present(), ())
        sound = {part: record for part, record in index.items() if _sound(record, present)}
        used = _without_overlaps(sound)
        self._index = sound
        self._space.recover(used)
        lost = [record for part, record in index.items() if part not in sound]
        if lost:
            _log.warning("nvme: %d records of parts whose data is gone are dropped", len(lost))
            self._journal.append([self._delete_record(record) for record in lost])
        self.live_bytes = sum(extent.pages for extent in used) * PAGE
        self._space.metadata.live = sum(map(len, sound.values()))
        self.refresh_disk()
        self._space.trim()

    # ------------------------------------------------------------------ reading

    def pin(self, part: PartId, generation: int) -> bytes | None:
        """Return the record of a live frame and keep its pages until :meth:`unpin`, or None."""
        with self._space.lock:
            record = self._index.get(part)
            if record is None or records.generation_of(record) != generation:
                return None
            key = records.first_page_of(record)
            self._reading[key] = self._reading.get(key, 0) + 1
            return record

    def unpin(self, record: bytes) -> None:
        """End a read."""
        key = records.first_page_of(record)
        with self._space.lock:
            left = self._reading[key] - 1
            if left:
                self._reading[key] = left
                return
            del self._reading[key]
            dying = self._dying.pop(key, None)
        if dying is not None:
            self._space.free(dying)

    # ------------------------------------------------------------------ changing

    def newer(self, stored: StoredPart) -> bool:
        """Whether a newer generation of that part is live."""
        record = self._index.get(stored.part)
        return record is not None and records.generation_of(record) > stored.generation

    def commit(self, drafts: Sequence[Draft]) -> dict[int, IoResult]:
        """Journal and show frames whose data is written; return a result for each item. Blocks."""
        results: dict[int, IoResult] = {}
        with self._journal_lock:
            made: list[tuple[Draft, bytes]] = []
            for draft in drafts:
                if self.newer(draft.stored):
                    results[draft.item] = MISSING
                    continue
                number = self._journal.next_sequence()
                try:
                    record = records.encode_put(draft.stored, draft.extents, number, self._salt)
                except BackendError as error:
                    results[draft.item] = IoResult(IoStatus.ERROR, error)
                    continue
                made.append((draft, record))
            try:
                self._append([record for _, record in made])
            except OSError as error:
                results.update((draft.item, failure(error)) for draft, _ in made)
            else:
                for draft, record in made:
                    self._show(draft.stored.part, record)
                    results[draft.item] = OK
        for draft in drafts:
            if results[draft.item] is not OK:
                self._space.free(draft.extents)
        return results

    def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts of exactly these generations. Blocks; never raises for the medium.

        If the delete cannot be journalled now, its pages are not reused until it is.
        """
        with self._journal_lock:
            for part, generation in parts:
                with self._space.lock:
                    record = self._index.get(part)
                    if record is None or records.generation_of(record) != generation:
                        continue
                    del self._index[part]
                    self._count(record, -1)
                self._owed.append((self._delete_record(record), records.extents_of(record)))
            try:
                self._append(())
            except OSError:
                _log.exception("nvme: deletes cannot be journalled; their space is kept for now")

    def settle(self) -> None:
        """Journal the deletes that could not be journalled before.

        Raises:
            OSError: if they still cannot.
        """
        with self._journal_lock:
            self._append(())

    def sync(self) -> None:
        """Make every journalled record survive a crash of the machine.

        Raises:
            OSError: if the medium refuses.
        """
        with self._journal_lock:
            self._journal.sync()

    def checkpoint(self) -> None:
        """Write a checkpoint if the journal has grown as long as one. Blocks.

        Writers go on meanwhile in a new journal file. A failure is logged and tried again later:
        the old files then stay and are complete.
        """
        with self._journal_lock:
            due = max(self._space.metadata.step, self._space.metadata.live, self._retry_at)
            if self._checkpointing or self._journal.used < due:
                return
            self._checkpointing = True
        try:
            with self._journal_lock:
                self._journal.rotate()
                number = self._journal.number
                with self._space.lock:
                    live = list(self._index.values())
            self._journal.publish(live, number)
        except OSError as error:
            _log.error("nvme: no checkpoint could be written, the journal goes on: %s", error)
            self._retry_at = self._journal.used + self._space.metadata.step
        else:
            self._retry_at = 0
            self.checkpoints += 1
        finally:
            self._checkpointing = False
        with contextlib.suppress(OSError):  # it can be counted later; the frames are written
            self.refresh_disk()

    def refresh_disk(self) -> None:
        """Count the real bytes of everything under the root that is no segment."""
        with self._disk_lock:
            blocks = os.fstat(self._root).st_blocks
            for name in list_at(self._root):
                if number_of(name) is None:
                    with contextlib.suppress(FileNotFoundError):  # a checkpoint removes journals
                        info = os.stat(name, dir_fd=self._root, follow_symlinks=False)
                        blocks += info.st_blocks
            self._space.metadata.disk = blocks * 512

    # ------------------------------------------------------------------ inside

    def _append(self, batch: Sequence[bytes]) -> None:
        """Journal the owed deletes and ``batch``; then the pages of the deletes are free."""
        owed = self._owed
        if not owed and not batch:
            return
        size = self._journal.size
        self._journal.append([*(record for record, _ in owed), *batch])
        if self._journal.size != size:
            self.refresh_disk()
        self._owed = []
        for _, extents in owed:
            self._retire(extents)

    def _show(self, part: PartId, record: bytes) -> None:
        with self._space.lock:
            old = self._index.get(part)
            self._index[part] = record
            self._count(record, +1)
            if old is not None:
                self._count(old, -1)
        if old is not None:
            self._retire(records.extents_of(old))

    def _retire(self, extents: list[Extent]) -> None:
        with self._space.lock:
            if extents[0].start in self._reading:
                self._dying[extents[0].start] = extents
                return
        self._space.free(extents)

    def _count(self, record: bytes, sign: int) -> None:
        self.live_bytes += sign * _pages_of(record) * PAGE
        self._space.metadata.live += sign * len(record)

    def _delete_record(self, record: bytes) -> bytes:
        part, generation = records.part_of(record), records.generation_of(record)
        return records.encode_delete(part, generation, self._journal.next_sequence(), self._salt)


def _pages_of(record: bytes) -> int:
    return max(1, -(-records.nbytes_of(record) // PAGE))


def _sound(record: bytes, present: Sequence[Extent]) -> bool:
    """Whether a put record makes sense and lies inside the segment files."""
    extents = records.extents_of(record)
    if sum(extent.pages for extent in extents) != _pages_of(record):
        return False
    for start, pages in extents:
        at = bisect_right(present, (start, 2**63)) - 1
        if pages < 1 or at < 0 or start + pages > present[at].start + present[at].pages:
            return False
    return True


def _without_overlaps(index: dict[PartId, bytes]) -> list[Extent]:
    """Remove from ``index`` whatever a later record overlaps; return the pages used, sorted."""
    while True:
        claims = sorted(
            (extent.start, extent.pages, records.sequence_of(record), part)
            for part, record in index.items()
            for extent in records.extents_of(record)
        )
        losers: set[PartId] = set()
        end, holder_sequence, holder = -1, -1, None
        for start, pages, sequence, part in claims:
            if start < end and holder is not None:
                losers.add(part if sequence < holder_sequence else holder)
            if start + pages > end:
                end, holder_sequence, holder = start + pages, sequence, part
        if not losers:
            return [Extent(claim[0], claim[1]) for claim in claims]
        for part in losers:
            del index[part]
