"""Device memory that the engine owns: chunks asked for when they are needed, carved into pages.

The memory belongs to a model first: a pool takes it chunk by chunk, may be refused at each one, and
gives empty ones back (all but one, so that a frame that comes and goes costs no allocation). A
buffer is a run of whole 4 KiB pages of one chunk, found by best fit (as in
:class:`tierkv.buffers.Arena`) in the first chunk that has one: later chunks empty first. A chunk is
cut to a multiple of the frame that asked for it, so that frames of one size fill it to the last
page. Memory that device work may still touch is reused only once that work is done.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from tierkv.errors import ClosedError
from tierkv.extents import Extent, PageRuns
from tierkv.frame import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import Device, Event

__all__ = ["DevicePool", "PoolBuffer", "is_done", "keep_for_ever", "pages_of"]

_kept: list[object] = []


def keep_for_ever(memory: object) -> None:
    """Never free this: a device that hangs may read or write it at any time."""
    _kept.append(memory)


def pages_of(nbytes: int) -> int:
    """Pages of 4 KiB that ``nbytes`` take, at least one."""
    return max(1, -(-nbytes // PAGE))


def is_done(event: Event) -> bool:
    """Whether everything before the event is done; False for ever on a device that broke.

    Memory behind work of unknown outcome is then never used again, which is the safe side.
    """
    try:
        return event.query()
    except Exception:  # noqa: BLE001 - a broken device may raise anything
        return False


class _Chunk:
    """One allocation of the device."""

    __slots__ = ("memory", "pages", "runs")

    def __init__(self, memory: torch.Tensor, pages: int) -> None:
        self.memory = memory
        self.pages = pages
        self.runs = PageRuns()
        self.runs.give(Extent(0, pages))

    @property
    def empty(self) -> bool:
        return self.runs.free == self.pages


class _Place(NamedTuple):
    """Pages of a chunk."""

    chunk: _Chunk
    extent: Extent

    @property
    def tensor(self) -> torch.Tensor:
        start, pages = self.extent
        return self.chunk.memory[start * PAGE : (start + pages) * PAGE]


class PoolBuffer:
    """A :class:`tierkv.abc.DeviceBuffer` inside a :class:`DevicePool`."""

    __slots__ = ("_place", "_pool", "nbytes")

    def __init__(self, pool: DevicePool, place: _Place, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pool = pool
        # gone once it is released: who keeps the buffer must not keep the chunk
        self._place: _Place | None = place

    def __repr__(self) -> str:
        state = "released" if self._place is None else f"{self._place.extent.pages} pages"
        return f"<PoolBuffer {self.nbytes} bytes, {state}>"

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory: uint8, whole pages.

        Raises:
            ClosedError: if it was released: the memory may be somebody else's by now.
        """
        if self._place is None:
            raise ClosedError("this buffer was released; allocate a new one")
        return self._place.tensor

    def release(self, after: Event | None = None) -> None:
        """Give the memory back once ``after`` is done; see :class:`tierkv.abc.DeviceBuffer`."""
        self.release_after(() if after is None else (after,))

    def release_after(self, events: Sequence[Event]) -> None:
        """Give the memory back once all ``events`` are done. Idempotent, never blocks."""
        self._pool._release(self, [event for event in events if not is_done(event)])


class DevicePool:
    """Buffers in chunks of one device's memory. Thread-safe.

    Args:
        device: Whose memory.
        capacity: Most bytes to hold; rounded down to whole pages.
        chunk: Most bytes to ask for at once, unless one buffer takes more.

    Attributes:
        failures: Chunks that the device refused.
        given_up: Whether the device hangs and nobody waits for it any more.
    """

    def __init__(self, device: Device, capacity: int, chunk: int) -> None:
        self.failures = 0
        self.given_up = False
        self._device = device
        self._limit = capacity // PAGE
        self._chunk_pages = min(pages_of(chunk), self._limit)
        self._chunks: list[_Chunk] = []
        self._held = 0
        self._free = 0
        # released buffers by the events that they wait for; those of one batch wait for the same
        self._waiting: list[tuple[list[Event], list[_Place]]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<DevicePool {self.used} of {self.held} bytes on {self._device.name}>"

    @property
    def chunks(self) -> int:
        """Allocations that it holds."""
        return len(self._chunks)

    @property
    def held(self) -> int:
        """Bytes that it holds of the device's memory."""
        return self._held * PAGE

    @property
    def used(self) -> int:
        """Bytes of pages that are out or that device work may still touch."""
        return (self._held - self._free) * PAGE

    @property
    def waiting(self) -> int:
        """Bytes that were released and that device work may still touch."""
        with self._lock:
            return PAGE * sum(place.extent.pages for _, group in self._waiting for place in group)

    def allocate(self, nbytes: int) -> PoolBuffer | None:
        """Return a buffer, or None if there is no room or the device has no memory left.

        The contents are undefined.
        """
        pages = pages_of(nbytes)
        with self._lock:
            self._reap()
            if self._held - self._free + pages > self._limit:
                return None
            chunks = self._chunks
            if self._held > self._limit:  # fill up full ones, so that the others drain
                chunks = sorted(chunks, key=lambda chunk: chunk.runs.free)
            for chunk in chunks:
                extent = chunk.runs.take(pages)
                if extent is not None:
                    break
            else:
                grown = self._grow(pages)
                extent = None if grown is None else grown.runs.take(pages)
                if grown is None or extent is None:
                    return None
                chunk = grown
            self._free -= pages
        return PoolBuffer(self, _Place(chunk, extent), nbytes)

    def resize(self, capacity: int) -> int:
        """Hold at most ``capacity`` bytes from here on; chunks above go back as they empty.

        Returns:
            Bytes that are held now.
        """
        with self._lock:
            self._limit = capacity // PAGE
            self._reap()
            self._give_back(self._limit)
            return self._held * PAGE

    def pending(self) -> list[Event]:
        """What released memory waits for."""
        with self._lock:
            self._reap()
            return [event for events, _ in self._waiting for event in events]

    def give_up(self) -> None:
        """Wait for the device no more; its memory is then kept for ever."""
        self.given_up = True
        keep_for_ever(self._chunks)

    def _grow(self, pages: int) -> _Chunk | None:
        """Ask the device for a chunk in which ``pages`` fit."""
        self._give_back(self._limit - pages)
        room = self._limit - self._held
        if room < pages:
            return None  # what is free lies in pieces between frames
        size = pages * max(1, min(self._chunk_pages, room) // pages)
        memory = self._device.allocate(size * PAGE)
        if memory is None:
            self.failures += 1
            return None
        chunk = _Chunk(memory, size)
        self._chunks.append(chunk)
        self._held += size
        self._free += size
        return chunk

    def _give_back(self, target: int) -> None:
        """Let empty chunks go, smallest first, until at most ``target`` pages are held."""
        empty = sorted((c for c in self._chunks if c.empty), key=lambda chunk: chunk.pages)
        for chunk in empty:
            if self._held <= target:
                break
            self._chunks.remove(chunk)
            self._held -= chunk.pages
            self._free -= chunk.pages

    def _release(self, buffer: PoolBuffer, events: list[Event]) -> None:
        with self._lock:
            place, buffer._place = buffer._place, None
            if place is None:
                return
            if not events:
                self._take_in(place)
            elif self._waiting and self._waiting[-1][0] == events:
                self._waiting[-1][1].append(place)
            else:
                self._waiting.append((events, [place]))

    def _reap(self) -> None:
        still = []
        for events, group in self._waiting:
            left = [event for event in events if not is_done(event)]
            if left:
                still.append((left, group))
                continue
            for place in group:
                self._take_in(place)
        self._waiting = still

    def _take_in(self, place: _Place) -> None:
        self._device.freed(place.tensor)
        place.chunk.runs.give(place.extent)
        self._free += place.extent.pages
        if place.chunk.empty:
            others = any(c.empty for c in self._chunks if c is not place.chunk)
            self._give_back(min(self._limit, self._held - 1) if others else self._limit)
