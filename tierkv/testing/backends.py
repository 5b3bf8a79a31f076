"""Conformance suites for backends.

A plug-in's test file subclasses the suite of its kind and says how to make the backend::

    class TestMine(DurableBackendTests):
        def make(self, root: Path, capacity: int) -> MyBackend:
            return MyBackend(tierkv.Tier("mine", capacity, path=str(root)))

pytest then runs every check (with anyio's plug-in). What the checks must catch is shown by
:mod:`tierkv.testing.backend_mutants`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierkv.abc import OK, IoStatus, MemoryBackend, ReadRequest, StoredPart
from tierkv.testing.bench import BackendBench, contents, name_part, part
from tierkv.testing.cancel import cancel_at_each_step

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import Backend

__all__ = ["BackendTests", "DurableBackendTests", "MemoryBackendTests"]

_PAGE = 4096
_SIZES = (1, 511, 4095, 4096, 4097, 3 * 4096 + 1, 100_000)


class _ByteTests(BackendBench):
    """Exactly the bytes that were put, or a miss."""

    async def test_round_trip(self, tmp_path: Path) -> None:
        """Frames of awkward sizes come back bit for bit, in one batch."""
        parts = [part(i, size) for i, size in enumerate(_SIZES)]
        async with self.opened(tmp_path) as bench:
            assert await bench.write(*parts) == [OK] * len(parts)
            assert await bench.read(*parts) == [contents(p) for p in parts]

    async def test_ranges(self, tmp_path: Path) -> None:
        """Any range of a frame can be read, into memory of any alignment; the rest is untouched."""
        stored = part(0, 20_000)
        whole = contents(stored)
        ranges = [
            (0, 1),
            (1, 1),
            (4095, 2),
            (4096, 4096),
            (5000, 9000),
            (8192, 11_808),
            (19_999, 1),
        ]
        async with self.opened(tmp_path) as bench:
            await bench.write(stored)
            for offset, length in ranges:
                target = bytearray(b"\xaa" * (length + 14))
                request = ReadRequest(stored.part, 1, offset, length)
                window = memoryview(target)[7 : 7 + length]
                assert await bench.backend.read([request], [window]) == [OK]
                assert bytes(window) == whole[offset : offset + length], (offset, length)
                assert target[:7] == target[-7:] == b"\xaa" * 7

    async def test_padding_is_readable(self, tmp_path: Path) -> None:
        """A read may reach to the end of the last page, and no further."""
        stored = part(0, 5000)
        async with self.opened(tmp_path) as bench:
            await bench.write(stored)
            page = memoryview(bytearray(2 * _PAGE + 1))
            good = ReadRequest(stored.part, 1, 0, 2 * _PAGE)
            assert await bench.backend.read([good], [page[: 2 * _PAGE]]) == [OK]
            assert bytes(page[:5000]) == contents(stored)
            beyond = ReadRequest(stored.part, 1, 0, 2 * _PAGE + 1)
            (result,) = await bench.backend.read([beyond], [page])
            assert result.status is IoStatus.SHORT

    async def test_missing_is_a_result(self, tmp_path: Path) -> None:
        """A part that was never there is MISSING; others of the batch are read."""
        here, never = part(0, 100), part(1, 100)
        async with self.opened(tmp_path) as bench:
            await bench.write(here)
            seen = await bench.read(never, here)
            assert seen == [IoStatus.MISSING, contents(here)]

    async def test_other_generation_is_missing(self, tmp_path: Path) -> None:
        """Reading another generation than the one that is there is MISSING, never other bytes."""
        stored = part(0, 100, generation=5)
        async with self.opened(tmp_path) as bench:
            await bench.write(stored)
            older, newer = replace(stored, generation=4), replace(stored, generation=6)
            assert await bench.read(older, newer) == [IoStatus.MISSING] * 2

    async def test_newer_generation_replaces(self, tmp_path: Path) -> None:
        """A newer generation takes the place of an older one, and only its room."""
        old, new = part(0, 9000, generation=1), part(0, 5000, generation=2)
        async with self.opened(tmp_path) as bench:
            await bench.write(old)
            assert await bench.write(new) == [OK]
            assert await bench.read(new, old) == [contents(new), IoStatus.MISSING]
            assert bench.backend.stats().live_bytes == bench.backend.charge(5000)

    async def test_older_generation_is_refused(self, tmp_path: Path) -> None:
        """A late write of an older generation is MISSING and changes nothing."""
        old, new = part(0, 100, generation=1), part(0, 100, generation=2)
        async with self.opened(tmp_path) as bench:
            await bench.write(new)
            (result,) = await bench.write(old)
            assert result.status is IoStatus.MISSING
            assert await bench.read(new) == [contents(new)]

    async def test_delete_spares_other_generations(self, tmp_path: Path) -> None:
        """A delete acts on the generation that it names, never on a newer one."""
        stored = part(0, 100, generation=2)
        async with self.opened(tmp_path) as bench:
            await bench.write(stored)
            await bench.backend.delete([(stored.part, 1)])
            assert await bench.read(stored) == [contents(stored)]
            await bench.backend.delete([(stored.part, 2)])
            assert await bench.read(stored) == [IoStatus.MISSING]

    async def test_delete_is_idempotent(self, tmp_path: Path) -> None:
        """Deleting what is not there (any more) is fine, and does not stop the batch."""
        first, second = part(0, 100), part(1, 100)
        async with self.opened(tmp_path) as bench:
            await bench.write(first, second)
            names = [(name_part(9), 1), (first.part, 1), (first.part, 1), (second.part, 1)]
            await bench.backend.delete(names)
            await bench.backend.delete(names)
            assert bench.backend.stats().entries == 0

    async def test_buffer_may_be_reused(self, tmp_path: Path) -> None:
        """After ``write`` the caller's memory is its own again: the store holds a copy."""
        stored = part(0, 50_000)
        async with self.opened(tmp_path) as bench:
            item = bench.item(stored)
            assert await bench.backend.write([item]) == [OK]
            item.buffer.memory[:] = bytes(stored.nbytes)
            assert await bench.read(stored) == [contents(stored)]

    async def test_bad_item_spares_the_batch(self, tmp_path: Path) -> None:
        """One item that cannot be stored or read leaves the others of its batch alone."""
        parts = [part(i, 5000) for i in range(3)]
        newer = replace(parts[1], generation=9)
        async with self.opened(tmp_path) as bench:
            await bench.write(newer)
            results = await bench.write(*parts)
            assert [r.status for r in results] == [IoStatus.OK, IoStatus.MISSING, IoStatus.OK]
            seen = await bench.read(*parts)
            assert seen == [contents(parts[0]), IoStatus.MISSING, contents(parts[2])]

    async def test_batches_in_flight_at_once(self, tmp_path: Path) -> None:
        """Several batches may be under way together."""
        async with self.opened(tmp_path) as bench:
            jobs = [
                bench.workers.spawn(bench.write, *(part(8 * i + j, 70_000) for j in range(4)))
                for i in range(4)
            ]
            for job in jobs:
                assert await job.wait() == [OK] * 4
            parts = [part(8 * i + j, 70_000) for i in range(4) for j in range(4)]
            readers = [bench.workers.spawn(bench.read, p) for p in parts]
            for stored, reader in zip(parts, readers, strict=True):
                assert await reader.wait() == [contents(stored)]

    async def test_cancelled_read_leaves_the_buffer_alone(self, tmp_path: Path) -> None:
        """When a cancelled read has ended, nobody writes into its buffer any more."""
        stored = part(0, 1_000_000)
        async with self.opened(tmp_path) as bench:
            await bench.write(stored)
            target = memoryview(bytearray(stored.nbytes))
            request = ReadRequest(stored.part, 1, 0, stored.nbytes)
            async for _ in cancel_at_each_step(lambda: bench.backend.read([request], [target])):
                after = bytes(target)
                await asyncio.sleep(0.05)
                untouched = bytes(target) == after  # a megabyte: pytest must not explain a diff
                assert untouched, "written after the call had ended"
                target[:] = bytes(stored.nbytes)


class _AccountTests(BackendBench):
    """Capacity, figures, life cycle."""

    async def test_full_is_a_result(self, tmp_path: Path) -> None:
        """Beyond the capacity frames are FULL: nothing raises, nothing stored is lost."""
        size = self.capacity // 8
        parts = [part(i, size) for i in range(16)]
        async with self.opened(tmp_path) as bench:
            results = [(await bench.write(p))[0].status for p in parts]
            assert set(results) == {IoStatus.OK, IoStatus.FULL}
            stats = bench.backend.stats()
            assert max(stats.live_bytes, stats.disk_bytes) <= self.capacity
            kept = [p for p, result in zip(parts, results, strict=True) if result is IoStatus.OK]
            assert await bench.read(*kept) == [contents(p) for p in kept]

    async def test_too_large_disturbs_nothing(self, tmp_path: Path) -> None:
        """A frame that can never fit is FULL, and the next one fits as before."""
        small, giant = part(0, 1000), part(1, 2 * self.capacity)
        async with self.opened(tmp_path) as bench:
            results = await bench.write(giant, small)
            assert [r.status for r in results] == [IoStatus.FULL, IoStatus.OK]
            assert await bench.read(small) == [contents(small)]

    async def test_space_comes_back(self, tmp_path: Path) -> None:
        """Deleted and replaced frames give their room back, however often."""
        size = self.capacity // 4
        async with self.opened(tmp_path) as bench:
            for generation in range(1, 13):
                stored = part(generation % 2, size, generation)
                assert await bench.write(stored) == [OK], f"round {generation}"
                await bench.backend.delete([(name_part((generation + 1) % 2), generation - 1)])
            assert await bench.read(stored) == [contents(stored)]

    async def test_stats_are_exact(self, tmp_path: Path) -> None:
        """``entries`` and ``live_bytes`` are the sums over what is there, at each step."""
        rng = np.random.default_rng(7)
        live: dict[int, StoredPart] = {}
        async with self.opened(tmp_path) as bench:
            for step in range(60):
                number = int(rng.integers(8))
                if number in live and rng.random() < 0.4:
                    gone = live.pop(number)
                    await bench.backend.delete([(gone.part, gone.generation)])
                else:
                    stored = part(number, int(rng.integers(1, 30_000)), step + 1)
                    assert await bench.write(stored) == [OK]
                    live[number] = stored
                stats = bench.backend.stats()
                assert stats.entries == len(live)
                assert stats.live_bytes == sum(map(bench.backend.charge, _sizes(live.values())))
                assert stats.capacity_bytes == self.capacity

    async def test_charge_covers_the_frame(self, tmp_path: Path) -> None:
        """``charge`` is at least the frame, grows with it, and wastes at most a page or 1/8."""
        async with self.opened(tmp_path) as bench:
            sizes = [*range(1, 70_000, 997), 1 << 20]
            charges = [bench.backend.charge(size) for size in sizes]
        assert charges == sorted(charges)
        for size, charge in zip(sizes, charges, strict=True):
            assert size <= charge <= max(-(-size // _PAGE) * _PAGE / 0.875, size + _PAGE)

    async def test_close_is_idempotent(self, tmp_path: Path) -> None:
        """``aclose`` may be called twice, or without ``open``."""
        async with self.opened(tmp_path) as bench:
            await bench.write(part(0, 100))
            await bench.backend.aclose()
            await bench.backend.aclose()
        await self.make(tmp_path / "other", self.capacity).aclose()


@pytest.mark.anyio
class BackendTests(_ByteTests, _AccountTests):
    """What every backend must do."""


@pytest.mark.anyio
class DurableBackendTests(BackendTests):
    """What a backend must do beside, if its parts survive the process."""

    async def test_reopen_finds_everything(self, tmp_path: Path) -> None:
        """What was flushed is found again, bit for bit and with all that is known about it."""
        parts = [
            part(0, 5000, 3, parent=None, tenant="", exact=False, expires=1234.5),
            part(1, 1, 4, tenant="grün", lossless=False),
            part(2, 100_000, 5),
        ]
        async with self.opened(tmp_path) as bench:
            assert bench.backend.durable
            assert not bench.found
            await bench.write(*parts)
            await bench.backend.flush()
            before = bench.backend.stats()
        async with self.opened(tmp_path) as bench:
            assert sorted(bench.found, key=lambda p: p.generation) == parts
            assert await bench.read(*parts) == [contents(p) for p in parts]
            assert bench.backend.stats().live_bytes == before.live_bytes

    async def test_reopen_forgets_deleted(self, tmp_path: Path) -> None:
        """Deleted parts and replaced generations do not come back."""
        gone, old, new = part(0, 100), part(1, 100, 1), part(1, 200, 2)
        async with self.opened(tmp_path) as bench:
            await bench.write(gone, old)
            await bench.write(new)
            await bench.backend.delete([(gone.part, 1)])
            await bench.backend.flush()
        async with self.opened(tmp_path) as bench:
            assert list(bench.found) == [new]

    async def test_reopen_knows_its_size(self, tmp_path: Path) -> None:
        """After a restart the bytes of earlier runs count from the first moment."""
        size = self.capacity // 8
        async with self.opened(tmp_path) as bench:
            stored = [p for p in map(part, range(16), [size] * 16) if await bench.write(p) == [OK]]
        async with self.opened(tmp_path) as bench:
            (result,) = await bench.write(part(99, size))
            assert result.status is IoStatus.FULL
            await bench.backend.delete([(p.part, p.generation) for p in stored[:2]])
            assert await bench.write(part(99, size)) == [OK]
            assert bench.backend.stats().disk_bytes <= self.capacity


@pytest.mark.anyio
class MemoryBackendTests(BackendTests):
    """What a backend must do beside, if the engine can address its bytes."""

    async def test_adopt_copies_nothing(self, tmp_path: Path) -> None:
        """A frame built in place is published where it is, and read where it is."""
        stored = part(0, 6000)
        async with self.opened(tmp_path) as bench:
            backend = _memory(bench.backend)
            buffer = backend.allocate(stored.nbytes)
            assert buffer is not None
            buffer.memory[:] = contents(stored)
            assert backend.borrow(stored.part, 1) is None, "visible before it was published"
            assert backend.adopt(stored, buffer)
            borrowed = backend.borrow(stored.part, 1)
            assert borrowed is not None
            assert _address(borrowed.memory) == _address(buffer.memory)
            assert bytes(borrowed.memory) == contents(stored)
            assert len(borrowed.padded) == 2 * _PAGE

    async def test_borrowed_memory_stays(self, tmp_path: Path) -> None:
        """Releasing what was borrowed frees nothing."""
        stored = part(0, 6000)
        async with self.opened(tmp_path) as bench:
            await bench.write(stored)
            for _ in range(2):
                borrowed = _memory(bench.backend).borrow(stored.part, 1)
                assert borrowed is not None
                borrowed.release()
            await bench.write(*(part(i, 6000) for i in range(1, 9)))
            assert await bench.read(stored) == [contents(stored)]

    async def test_refused_adoption_leaves_the_buffer(self, tmp_path: Path) -> None:
        """``adopt`` of an older generation is False, and the buffer is still the caller's."""
        new, old = part(0, 6000, 2), part(0, 6000, 1)
        async with self.opened(tmp_path) as bench:
            backend = _memory(bench.backend)
            await bench.write(new)
            buffer = backend.allocate(old.nbytes)
            assert buffer is not None
            assert not backend.adopt(old, buffer)
            buffer.memory[:] = bytes(old.nbytes)
            buffer.release()
            assert await bench.read(new) == [contents(new)]

    async def test_discard_is_a_delete(self, tmp_path: Path) -> None:
        """``discard`` forgets exactly one generation, at once."""
        stored = part(0, 6000, 2)
        async with self.opened(tmp_path) as bench:
            backend = _memory(bench.backend)
            await bench.write(stored)
            backend.discard(stored.part, 1)
            assert backend.borrow(stored.part, 2) is not None
            backend.discard(stored.part, 2)
            backend.discard(stored.part, 2)
            assert backend.borrow(stored.part, 2) is None
            assert backend.stats().live_bytes == 0

    async def test_all_of_the_capacity_is_usable(self, tmp_path: Path) -> None:
        """Frames of one size fill the capacity, as far as they divide it."""
        size = 24 * 1024
        async with self.opened(tmp_path) as bench:
            backend = _memory(bench.backend)
            count = self.capacity // backend.charge(size)
            buffers = [backend.allocate(size) for _ in range(count)]
            assert None not in buffers
            assert backend.allocate(size) is None


def _sizes(parts: Any) -> list[int]:
    return [stored.nbytes for stored in parts]


def _memory(backend: Backend) -> MemoryBackend:
    assert isinstance(backend, MemoryBackend)
    return backend


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
