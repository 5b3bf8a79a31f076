"""Tiers in device memory that are wrong in one way each, and the check that must notice it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.abc import Resident
from tierkv.frame import PAGE
from tierkv.testing.resident_references import Shelf, ShelfBackend, move

if TYPE_CHECKING:
    from tierkv.abc import Event, StoredPart
    from tierkv.blocks import PartId
    from tierkv.frame import Header

__all__ = ["RESIDENT_MUTANTS"]


class PublishesACopy(ShelfBackend):
    def publish(self, stored: StoredPart, header: Header | None, buffer: Shelf) -> bool:
        other = self.allocate(buffer.nbytes)
        if other is None:
            return False
        move(self.device, other.memory, buffer.memory)
        return super().publish(stored, header, other)


class GivesAway(ShelfBackend):
    def borrow(self, part: PartId, generation: int) -> Resident | None:
        entry = self.find(part, generation)
        return None if entry is None or entry[1] is None else Resident(entry[1], entry[2])


class KeepsRefused(ShelfBackend):
    def publish(self, stored: StoredPart, header: Header | None, buffer: Shelf) -> bool:
        good = super().publish(stored, header, buffer)
        if not good:
            buffer.release()
        return good


class ForgetsByName(ShelfBackend):
    def discard(self, part: PartId, generation: int) -> None:
        entry = self.entries.get(part)
        if entry is not None:
            super().discard(part, entry[0].generation)


class ReadsNoHeaders(ShelfBackend):
    def publish(self, stored: StoredPart, header: Header | None, buffer: Shelf) -> bool:
        return super().publish(stored, None, buffer)


class ForgetsTouches(ShelfBackend):
    def touched(self, part: PartId, generation: int, event: Event) -> None:
        """Free the memory as soon as the frame is forgotten."""


class _Hasty(Shelf):
    def release(self, after: Event | None = None) -> None:
        super().release()


class ReusesAtOnce(ShelfBackend):
    def allocate(self, nbytes: int) -> Shelf | None:
        good = super().allocate(nbytes)
        if good is None or good.extent is None:
            return None
        return _Hasty(self, nbytes, good.extent)


class _Eager(Shelf):
    def release(self, after: Event | None = None) -> None:
        extent = self.extent
        super().release(after)
        self.extent = extent


class ReleasesTwice(ShelfBackend):
    def allocate(self, nbytes: int) -> Shelf | None:
        good = super().allocate(nbytes)
        if good is None or good.extent is None:
            return None
        return _Eager(self, nbytes, good.extent)


class CutsToSize(ShelfBackend):
    def allocate(self, nbytes: int) -> Shelf | None:
        good = super().allocate(nbytes)
        if good is not None:
            good.memory = good.memory[:nbytes]
        return good


class RaisesOutOfMemory(ShelfBackend):
    def allocate(self, nbytes: int) -> Shelf | None:
        good = super().allocate(nbytes)
        if good is None:
            raise MemoryError(f"{nbytes} bytes")
        return good


class HoldsOn(ShelfBackend):
    def shrink(self, capacity: int) -> int:
        self.limit = capacity
        return 0 if self.memory is None else len(self.memory)


class LeavesHalf(ShelfBackend):
    def allocate(self, nbytes: int) -> Shelf | None:
        good = super().allocate(nbytes)
        if good is not None and 2 * self.runs.free * PAGE < self.limit:
            good.release()
            return None
        return good


RESIDENT_MUTANTS: list[tuple[type[ShelfBackend], str]] = [
    (PublishesACopy, "test_built_frame_is_read_in_place"),
    (GivesAway, "test_lent_device_memory_stays"),
    (KeepsRefused, "test_refused_frame_is_still_the_callers"),
    (ForgetsByName, "test_discard_on_the_device_is_a_delete"),
    (ReadsNoHeaders, "test_written_frame_can_be_borrowed"),
    (ForgetsTouches, "test_touched_memory_outlives_its_frame"),
    (ReusesAtOnce, "test_release_waits_for_its_event"),
    (ReleasesTwice, "test_second_release_does_nothing"),
    (CutsToSize, "test_buffers_are_whole_pages"),
    (RaisesOutOfMemory, "test_device_without_room_is_no_error"),
    (HoldsOn, "test_shrink_gives_memory_back"),
    (LeavesHalf, "test_all_of_the_device_memory_is_usable"),
]
"""Every mutant, each with a check of its own."""
