"""Backends that are wrong in one way each, and the check of the suite that must notice."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierkv.abc import OK, BackendStats, IoResult, IoStatus
from tierkv.testing.backend_references import DictBackend, SlabBackend
from tierkv.testing.backends import DurableBackendTests, MemoryBackendTests
from tierkv.testing.resident import ResidentBackendTests
from tierkv.testing.resident_mutants import RESIDENT_MUTANTS
from tierkv.testing.resident_references import ShelfBackend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv.abc import Buffer, ReadRequest, StoredPart, Threads, WriteItem
    from tierkv.blocks import PartId

__all__ = ["MUTANTS", "REFERENCES", "Mutant", "failing_checks"]

_PAGE = 4096
_Maker = type[DictBackend] | type[SlabBackend] | type[ShelfBackend]


class LosesTheTail(DictBackend):
    def keep(self, item: WriteItem) -> bytes:
        whole = super().keep(item)
        return whole[: len(whole) // 2].ljust(len(whole), b"\0")


class RoundsRangesDown(DictBackend):
    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        return super().read_one(request._replace(offset=request.offset // 512 * 512), target)


class ForbidsThePadding(DictBackend):
    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        entry = self.find(request.part, request.generation)
        if entry is not None and request.offset + request.length > entry[0].nbytes:
            return IoResult(IoStatus.SHORT)
        return super().read_one(request, target)


class RaisesOnAbsence(DictBackend):
    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        if request.part not in self.entries:
            raise KeyError(request.part)
        return super().read_one(request, target)


class ServesAnyGeneration(DictBackend):
    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        entry = self.entries.get(request.part)
        if entry is None or len(target) > len(entry[1]):
            return IoResult(IoStatus.MISSING)
        target[:] = entry[1][request.offset : request.offset + request.length]
        return OK


class KeepsTheFirst(DictBackend):
    def write_one(self, item: WriteItem) -> IoResult:
        return OK if item.stored.part in self.entries else super().write_one(item)


class LastWriterWins(DictBackend):
    def write_one(self, item: WriteItem) -> IoResult:
        self.entries.pop(item.stored.part, None)
        return super().write_one(item)


class DeletesByName(DictBackend):
    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        for part, _ in parts:
            self.entries.pop(part, None)


class RaisesOnSecondDelete(DictBackend):
    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        for part, generation in parts:
            if part not in self.entries:
                raise KeyError(part)
            await super().delete([(part, generation)])


class OverfillsALittle(DictBackend):
    def write_one(self, item: WriteItem) -> IoResult:
        self.capacity += self.capacity // 4
        try:
            return super().write_one(item)
        finally:
            self.capacity = self.capacity * 4 // 5


class RaisesOnGiants(DictBackend):
    def write_one(self, item: WriteItem) -> IoResult:
        if item.stored.nbytes > self.capacity:
            raise ValueError("too large")
        return super().write_one(item)


class NeverFreesRoom(DictBackend):
    dead = 0

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        before = self.live() + self.dead
        await super().delete(parts)
        self.dead = before - super().live()

    def write_one(self, item: WriteItem) -> IoResult:
        if self.dead + self.live() + self.charge(item.stored.nbytes) > self.capacity:
            return IoResult(IoStatus.FULL)
        return super().write_one(item)


class CountsReplacedTwice(DictBackend):
    replaced = 0

    def write_one(self, item: WriteItem) -> IoResult:
        self.replaced += item.stored.part in self.entries and len(self.entries) > 2
        return super().write_one(item)

    def stats(self) -> BackendStats:
        plain = super().stats()
        return replace(plain, entries=plain.entries + self.replaced)


class ChargesTooLittle(DictBackend):
    def charge(self, nbytes: int) -> int:
        return nbytes // _PAGE * _PAGE or _PAGE

    def keep(self, item: WriteItem) -> bytes:
        return bytes(item.buffer.memory).ljust(-(-item.stored.nbytes // _PAGE) * _PAGE, b"\0")


class KeepsTheCallersMemory(DictBackend):
    def __init__(self, root: Path, capacity: int) -> None:
        super().__init__(root, capacity)
        self.buffers: dict[tuple[PartId, int], memoryview] = {}

    def write_one(self, item: WriteItem) -> IoResult:
        self.buffers[item.stored.part, item.stored.generation] = item.buffer.padded
        return super().write_one(item)

    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        result = super().read_one(request, target)
        if result == OK:
            kept = self.buffers[request.part, request.generation]
            target[:] = kept[request.offset : request.offset + request.length]
        return result


class FailsWholeBatches(DictBackend):
    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        results = await super().write(items)
        wrong = next((r for r in results if r.status is IoStatus.MISSING), None)
        return results if wrong is None else [wrong] * len(results)


class OneBatchAtATime(DictBackend):
    busy = False

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        if self.busy:
            return [IoResult(IoStatus.ERROR)] * len(requests)
        self.busy = True
        try:
            return await super().read(requests, into)
        finally:
            self.busy = False


class AbandonsItsThread(DictBackend):
    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        with_delay = partial(self.slowly, requests, into)
        pool = ThreadPoolExecutor(1)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, with_delay)
        finally:
            pool.shutdown(wait=False)

    def slowly(self, requests: Sequence[ReadRequest], into: Sequence[memoryview]) -> list[IoResult]:
        time.sleep(0.02)
        return self.copy_out(requests, into)


class ClosesOnce(DictBackend):
    async def aclose(self) -> None:
        if self.threads is None:
            raise RuntimeError("closed already")
        await super().aclose()


class ForgetsTenants(DictBackend):
    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        return [replace(stored, tenant="") for stored in await super().open(threads)]


class Resurrects(DictBackend):
    async def flush(self) -> None:
        self.media[self.root] = self.media.get(self.root, {}) | self.entries

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        await self.flush()
        await super().delete(parts)


class CountsFromZero(DictBackend):
    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        found = await super().open(threads)
        self.capacity += self.live()
        return found


class AdoptsACopy(SlabBackend):
    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        copy = self.allocate(buffer.nbytes)
        if copy is None or not super().adopt(stored, copy):
            return False
        copy.memory[:] = buffer.memory
        return True


class LendsForGood(SlabBackend):
    def borrow(self, part: PartId, generation: int) -> Buffer | None:
        entry = self.entries.get(part)
        return entry[1] if entry is not None and entry[0].generation == generation else None


class ReleasesRefused(SlabBackend):
    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        good = super().adopt(stored, buffer)
        if not good:
            np.frombuffer(buffer.memory, np.uint8).fill(0)
            buffer.release()
        return good


class DiscardsByName(SlabBackend):
    def discard(self, part: PartId, generation: int) -> None:
        if part in self.entries:
            self.entries.pop(part)[1].release()


class WastesHalf(SlabBackend):
    def allocate(self, nbytes: int) -> Buffer | None:
        room = self.arena.capacity // 2 - self.arena.used
        return self.arena.allocate(nbytes) if self.arena.charge(nbytes) <= room else None


class Mutant(NamedTuple):
    """A defect and the check that must notice it."""

    make: _Maker
    suite: type[Any]
    check: str


REFERENCES: list[tuple[_Maker, type[Any]]] = [
    (DictBackend, DurableBackendTests),
    (SlabBackend, MemoryBackendTests),
    (ShelfBackend, ResidentBackendTests),
]
"""Sound backends and the suite that each must pass."""

_DURABLE: list[tuple[type[DictBackend], str]] = [
    (LosesTheTail, "test_round_trip"),
    (RoundsRangesDown, "test_ranges"),
    (ForbidsThePadding, "test_padding_is_readable"),
    (RaisesOnAbsence, "test_missing_is_a_result"),
    (ServesAnyGeneration, "test_other_generation_is_missing"),
    (KeepsTheFirst, "test_newer_generation_replaces"),
    (LastWriterWins, "test_older_generation_is_refused"),
    (DeletesByName, "test_delete_spares_other_generations"),
    (RaisesOnSecondDelete, "test_delete_is_idempotent"),
    (OverfillsALittle, "test_full_is_a_result"),
    (RaisesOnGiants, "test_too_large_disturbs_nothing"),
    (NeverFreesRoom, "test_space_comes_back"),
    (CountsReplacedTwice, "test_stats_are_exact"),
    (ChargesTooLittle, "test_charge_covers_the_frame"),
    (KeepsTheCallersMemory, "test_buffer_may_be_reused"),
    (FailsWholeBatches, "test_bad_item_spares_the_batch"),
    (OneBatchAtATime, "test_batches_in_flight_at_once"),
    (AbandonsItsThread, "test_cancelled_read_leaves_the_buffer_alone"),
    (ClosesOnce, "test_close_is_idempotent"),
    (ForgetsTenants, "test_reopen_finds_everything"),
    (Resurrects, "test_reopen_forgets_deleted"),
    (CountsFromZero, "test_reopen_knows_its_size"),
]
_MEMORY: list[tuple[type[SlabBackend], str]] = [
    (AdoptsACopy, "test_adopt_copies_nothing"),
    (LendsForGood, "test_borrowed_memory_stays"),
    (ReleasesRefused, "test_refused_adoption_leaves_the_buffer"),
    (DiscardsByName, "test_discard_is_a_delete"),
    (WastesHalf, "test_all_of_the_capacity_is_usable"),
]
MUTANTS: list[Mutant] = [
    *(Mutant(make, DurableBackendTests, check) for make, check in _DURABLE),
    *(Mutant(make, MemoryBackendTests, check) for make, check in _MEMORY),
    *(Mutant(make, ResidentBackendTests, check) for make, check in RESIDENT_MUTANTS),
]
"""Every mutant, each with a check of its own."""


async def failing_checks(
    suite: type[Any], make: _Maker, root: Path, only: str = "test_"
) -> dict[str, str]:
    """Run checks of a suite; return what went wrong, by check.

    Args:
        suite: The suite.
        make: The backend class.
        root: An empty directory.
        only: Start of the names of the checks to run; all by default.
    """
    checks = type("Checks", (suite,), {"make": lambda _, where, capacity: make(where, capacity)})()
    failed: dict[str, str] = {}
    for name in sorted(name for name in dir(suite) if name.startswith(only)):
        place = root / name
        place.mkdir()
        try:
            await getattr(checks, name)(place)
        except Exception as error:  # noqa: BLE001 - whatever it is, the check noticed
            failed[name] = f"{type(error).__name__}: {error}"
    return failed
