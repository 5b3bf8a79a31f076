"""What this process knows to be in the directory, and the bytes it takes. No I/O in here."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from tierkv.blocks import PartId

__all__ = ["PAGE", "Catalog", "Entry", "charge", "pages", "usable_bytes"]

PAGE: Final = 4096
_LARGE: Final = 7 * PAGE  # from here on whole pages are no more than an eighth above a frame
_ENTRY: Final = struct.Struct("<QQQQ6s")


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def charge(nbytes: int, record: int) -> int:
    """Bytes of capacity that a frame takes: itself and a page, or whole pages with its record.

    The page is the rest of the frame's last one, or what the record needs beyond it; of a few
    small frames that are just too long for that the record is not counted here. The real bytes
    are checked as well before anything is written.
    """
    return max(nbytes + PAGE, pages(nbytes + record) if nbytes >= _LARGE else 0)


def usable_bytes(capacity: int, bits: int) -> int:
    """Part of a capacity that frames can count on: the rest is directories and quarantine."""
    per_level = 1 << bits
    others = per_level + per_level * per_level + 3  # the root, its description, the quarantine
    return max(0, capacity - others * PAGE - 2 * (capacity // 64))


class Entry(NamedTuple):
    """A publication.

    Attributes:
        generation: Its generation.
        nbytes: Length of the frame.
        size: Length of its file.
        disk: Real bytes of its file.
        nonce: What makes its name its own.
    """

    generation: int
    nbytes: int
    size: int
    disk: int
    nonce: bytes


class Catalog:
    """Index and account of one tier; used on the event loop only, its figures anywhere.

    An entry is kept as one bytes object, invisible to the garbage collector.

    Args:
        capacity: Limit for the charges and for the real bytes.
        record: Length of a record that :func:`charge` reckons with.

    Attributes:
        live_bytes: Charges of what is in the index.
        disk_bytes: Real bytes of every file and directory known here.
    """

    def __init__(self, capacity: int, record: int) -> None:
        self._capacity = capacity
        self._record = record
        self._index: dict[PartId, bytes] = {}
        self._directories: dict[str, int] = {}
        self._reserved_charge = self._reserved_disk = 0
        self.live_bytes = self.disk_bytes = 0

    def __len__(self) -> int:
        return len(self._index)

    def get(self, part: PartId) -> Entry | None:
        """The publication that is there."""
        entry = self._index.get(part)
        return None if entry is None else Entry(*_ENTRY.unpack(entry))

    def find(self, part: PartId, generation: int) -> Entry | None:
        """That publication, if it is there."""
        entry = self.get(part)
        return entry if entry is not None and entry.generation == generation else None

    def newer(self, part: PartId, generation: int) -> bool:
        """Whether a newer generation is there."""
        entry = self.get(part)
        return entry is not None and entry.generation > generation

    def reserve(self, charged: int, disk: int) -> bool:
        """Set bytes aside for a write; False, and nothing changed, if there is no room.

        Pair with :meth:`release`.
        """
        charged += self._reserved_charge
        disk += self._reserved_disk
        if self.live_bytes + charged > self._capacity or self.disk_bytes + disk > self._capacity:
            return False
        self._reserved_charge, self._reserved_disk = charged, disk
        return True

    def release(self, charged: int, disk: int) -> None:
        """Give back what :meth:`reserve` set aside."""
        self._reserved_charge -= charged
        self._reserved_disk -= disk

    def put(self, part: PartId, entry: Entry) -> Entry | None:
        """Show a publication whose file is in place.

        Returns:
            The one that loses: the older one, or ``entry`` itself if a newer one is there. Its
            file counts until it is :meth:`erased`.
        """
        self.disk_bytes += entry.disk
        old = self.get(part)
        if old is not None and old.generation > entry.generation:
            return entry
        if old is not None:
            self.live_bytes -= charge(old.nbytes, self._record)
        self._index[part] = _ENTRY.pack(*entry)
        self.live_bytes += charge(entry.nbytes, self._record)
        return old

    def restore(self, part: PartId, entry: Entry) -> None:
        """Take back :meth:`remove`: the file could not be erased."""
        if part not in self._index:
            self._index[part] = _ENTRY.pack(*entry)
            self.live_bytes += charge(entry.nbytes, self._record)

    def remove(self, part: PartId, entry: Entry) -> bool:
        """Stop showing exactly this publication; its file counts until it is :meth:`erased`."""
        if self._index.get(part) != _ENTRY.pack(*entry):
            return False
        del self._index[part]
        self.live_bytes -= charge(entry.nbytes, self._record)
        return True

    def erased(self, entry: Entry) -> None:
        """Its file is gone."""
        self.disk_bytes -= entry.disk

    def missing_directories(self, directory: str, made: set[str]) -> int:
        """How many directories a first file in ``directory`` would need.

        Args:
            directory: Relative to the root.
            made: Those that the same batch will have made before; they are added.
        """
        upper = directory.split("/")[0]
        missing = {directory, upper} - self._directories.keys() - made
        made |= missing
        return len(missing)

    def measured(self, sizes: dict[str, int]) -> None:
        """Learn the real bytes of directories, and of anything else by a name of its own."""
        for name, nbytes in sizes.items():
            self.disk_bytes += nbytes - self._directories.get(name, 0)
            self._directories[name] = nbytes
