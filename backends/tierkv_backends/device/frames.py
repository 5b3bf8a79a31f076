"""The published frames of a device tier, and the work that still touches each one's memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tierkv.frame import PAGE
from tierkv_backends.device.pool import PoolBuffer, is_done, pages_of

if TYPE_CHECKING:
    import torch

    from tierkv.abc import Event, StoredPart
    from tierkv.blocks import PartId
    from tierkv.frame import Header

__all__ = ["Borrowed", "Entry", "Frames"]


class Entry:
    """One published frame; its memory outlives the copies out of it and the work that reads it.

    Attributes:
        stored: What it is.
        header: Its header; None if its bytes have none.
        buffer: Where it is.
    """

    __slots__ = ("_dead", "_events", "_readers", "buffer", "header", "stored")

    def __init__(self, stored: StoredPart, header: Header | None, buffer: PoolBuffer) -> None:
        self.stored = stored
        self.header = header
        self.buffer = buffer
        self._events: list[Event] = []
        self._readers = 0
        self._dead = False

    def touch(self, event: Event) -> None:
        """Keep the memory until ``event`` is done."""
        self._events = [e for e in self._events if e is not event and not is_done(e)]
        self._events.append(event)

    def begin_read(self) -> None:
        """Keep the memory until :meth:`end_read`."""
        self._readers += 1

    def end_read(self) -> None:
        """Undo :meth:`begin_read`."""
        self._readers -= 1
        self._release()

    def retire(self) -> None:
        """Give the memory back as soon as nothing touches it."""
        self._dead = True
        self._release()

    def _release(self) -> None:
        if self._dead and self._readers == 0:
            self.buffer.release_after(self._events)


class Borrowed:
    """A frame in place: the backend goes on owning the memory."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: PoolBuffer) -> None:
        self._buffer = buffer

    @property
    def nbytes(self) -> int:
        """Length of the frame in bytes."""
        return self._buffer.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory."""
        return self._buffer.tensor

    def release(self, after: Event | None = None) -> None:
        """Do nothing: the frame stays where it is."""


class Frames:
    """Published frames by part.

    Attributes:
        live_bytes: Bytes of the pages that they take.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self._entries: dict[PartId, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, part: PartId, generation: int) -> Entry | None:
        """The frame of exactly this generation."""
        entry = self._entries.get(part)
        return entry if entry is not None and entry.stored.generation == generation else None

    def newer(self, stored: StoredPart) -> bool:
        """Whether a newer generation of the part is there."""
        entry = self._entries.get(stored.part)
        return entry is not None and entry.stored.generation > stored.generation

    def publish(self, stored: StoredPart, header: Header | None, buffer: PoolBuffer) -> bool:
        """Take a frame in, in place of an older one; False if a newer one is there."""
        if self.newer(stored):
            return False
        self._drop(stored.part)
        self._entries[stored.part] = Entry(stored, header, buffer)
        self.live_bytes += pages_of(stored.nbytes) * PAGE
        return True

    def discard(self, part: PartId, generation: int) -> None:
        """Forget one frame; an absent or newer one is left alone."""
        if self.find(part, generation) is not None:
            self._drop(part)

    def clear(self, most: int) -> bool:
        """Forget up to ``most`` frames; whether there are any left."""
        for part in list(itertools.islice(self._entries, most)):
            self._drop(part)
        return bool(self._entries)

    def _drop(self, part: PartId) -> None:
        entry = self._entries.pop(part, None)
        if entry is not None:
            self.live_bytes -= pages_of(entry.stored.nbytes) * PAGE
            entry.retire()
