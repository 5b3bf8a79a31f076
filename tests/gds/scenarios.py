"""What is tried in a process that has the driver's double and the real kvikio.

``python -m tests.gds.scenarios LOOP DIRECTORY`` runs them all on that event loop and prints a line
of JSON for each: its name, and how it failed or null. A process of its own, because the double
takes the place of the driver in it, and because some of what is tried here could take the process
down.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.gds import endings, engines
from tests.gds.rig import PAGE, opened
from tierkv.abc import OK, IoStatus, ReadRequest
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SIZES = (1, 511, 4095, 4096, 4097, 3 * 4096 + 1, (20 << 20) + 123)


async def f039_sizes(root: Path) -> None:
    parts = [part(i, size) for i, size in enumerate(SIZES)]
    async with opened(root) as bench:
        bench.arena = type(bench.arena)(64 << 20)
        hops = bench.workers.thread_hops
        assert await bench.put(*parts) == [OK] * len(parts)
        wrote = bench.workers.thread_hops - hops
        assert await bench.get(*parts) == [contents(p) for p in parts]
        read = bench.workers.thread_hops - hops - wrote
        assert (wrote, read) == (3, 1), "submit and publish, and one to let the files grow"
        assert await bench.read(*parts) == [contents(p) for p in parts], "the same frames"
        host = [part(100 + i, size) for i, size in enumerate(SIZES)]
        assert await bench.write(*host) == [OK] * len(host)
        assert await bench.get(*host) == [contents(p) for p in host]
        stats = bench.backend.stats()
        assert stats.disk_bytes == disk_usage(root / "kv")
        assert stats.details["direct_writes"] == len(parts)
        assert stats.details["direct_bytes"] == 3 * sum(SIZES)
        assert stats.details["buffered_bytes"] == 0


async def f039_offsets(root: Path) -> None:
    stored = part(0, 5 * PAGE + 17)
    whole = contents(stored)
    async with opened(root) as bench:
        await bench.put(part(7, 100), stored)
        for offset in (0, 1, 511, 4095, 4096, 4097, 3 * PAGE, stored.nbytes - 1, stored.nbytes):
            length = stored.nbytes - offset
            target = bench.memory(length)
            request = ReadRequest(stored.part, 1, offset, length)
            assert await bench.way.read_device([request], [target]) == [OK], offset
            assert target[:length].numpy().tobytes() == whole[offset:], offset
        for offset, length in ((0, 7 * PAGE), (-1, 5), (5 * PAGE, PAGE + 1)):
            request = ReadRequest(stored.part, 1, offset, length)
            (result,) = await bench.way.read_device([request], [bench.memory(8 * PAGE)])
            assert result.status is IoStatus.SHORT
        request = ReadRequest(stored.part, 1, 0, stored.nbytes)
        (result,) = await bench.way.read_device([request], [bench.memory(PAGE)])
        assert result.status is IoStatus.SHORT, "the tensor is too short"
        (result,) = await bench.way.write_device([(part(9, 5000), bench.memory(PAGE))])
        assert result.status is IoStatus.SHORT
        assert await bench.get(part(0, 10, 2), part(5, 10)) == [IoStatus.MISSING] * 2


async def padding_holds_nobodys_bytes(root: Path) -> None:
    stored = part(0, PAGE + 100)
    async with opened(root) as bench:
        await bench.put(stored)
        page = memoryview(bytearray(PAGE))
        await bench.backend.read([ReadRequest(stored.part, 1, PAGE, PAGE)], [page])
        assert bytes(page) == contents(stored)[PAGE:] + bytes(PAGE - 100)


async def f040_truncated_file(root: Path) -> None:
    """Kvikio raises at the end of a file after filling what was there; others do not suffer."""
    parts = [part(i, 3 * PAGE - 5) for i in range(4)]
    async with opened(root, segment="16MiB") as bench:
        await bench.put(*parts)
        (segment,) = (root / "kv").glob("segment-*")
        os.truncate(segment, 3 * 3 * PAGE + 2 * PAGE)
        seen = await bench.get(*parts)
        assert seen == [*map(contents, parts[:3]), IoStatus.SHORT]
        os.truncate(segment, 3 * 3 * PAGE - 3)  # only padding is missing now
        assert await bench.get(*parts[:3]) == [contents(p) for p in parts[:3]]
        os.truncate(segment, 3 * 3 * PAGE - 6)
        assert await bench.get(*parts[:3]) == [*map(contents, parts[:2]), IoStatus.SHORT]
        os.truncate(segment, 0)
        assert await bench.get(*parts) == [IoStatus.SHORT] * 4


async def f040_end_seen_by_the_library(root: Path) -> None:
    """The file is cut between our look at its size and the library's read."""
    stored = part(0, 8 * PAGE)
    async with opened(root) as bench:
        await bench.put(stored, part(1, 3 * PAGE))
        real, seen = os.fstat, []

        class Long:
            def __init__(self, fd: int) -> None:
                seen.append(fd)
                self.st_size = 1 << 40
                self.st_blocks = real(fd).st_blocks

        (segment,) = (root / "kv").glob("segment-*")
        os.truncate(segment, 4 * PAGE)
        os.fstat = Long  # type: ignore[assignment]
        try:
            assert await bench.get(stored) == [IoStatus.SHORT]
        finally:
            os.fstat = real
        assert seen


async def medium_errors_are_results(root: Path) -> None:
    parts = [part(i, 20_000) for i in range(3)]
    async with opened(root) as bench:
        await bench.put(parts[0])
        before = bench.backend.stats()
        files = bench.files
        file = next(iter(files._files.values()))

        class Broken:
            """Refuses the second piece; the future of the first one is real."""

            def __init__(self, words: str) -> None:
                self.words = words
                self.calls = 0

            def pwrite(self, *args: Any, **named: Any) -> Any:
                self.calls += 1
                if self.calls == 2:
                    raise RuntimeError(self.words)
                return file.pwrite(*args, **named)

            def close(self) -> None:
                """Not ours."""

        for words, status in (
            ("No space left on device", IoStatus.FULL),
            ("Input/output error", IoStatus.ERROR),
        ):
            files._files = dict.fromkeys(files._files, Broken(words))
            results = await bench.put(parts[1], parts[2])
            assert [r.status for r in results] == [IoStatus.OK, status], results
            await bench.backend.delete([(parts[1].part, 1)])
        files._files = dict.fromkeys(files._files, file)
        after = bench.backend.stats()
        assert (after.entries, after.live_bytes) == (before.entries, before.live_bytes)
        assert await bench.put(*parts[1:]) == [OK] * 2
        assert await bench.get(*parts) == [contents(p) for p in parts]


async def full_and_older(root: Path) -> None:
    big = part(0, 100_000, 2)
    async with opened(root, 256 << 10) as bench:
        assert await bench.put(big) == [OK]
        seen = [r.status for r in await bench.put(part(0, 5, 1), part(1, 120_000))]
        assert seen == [IoStatus.MISSING, IoStatus.FULL]
        assert await bench.get(big) == [contents(big)]
        assert await bench.put(part(0, 5, 3)) == [OK]
        assert await bench.put(part(1, 90_000)) == [OK], "the pages of the old one are free"


async def reopened(root: Path) -> None:
    parts = [part(i, size) for i, size in enumerate(SIZES[:-1])]
    async with opened(root) as bench:
        await bench.put(*parts)
        await bench.backend.flush()
    async with opened(root) as bench:
        assert {p.part for p in bench.found} == {p.part for p in parts}
        assert await bench.get(*parts) == [contents(p) for p in parts]


async def many_at_once(root: Path) -> None:
    """200 writes and as many reads in flight together; segments come and go meanwhile."""
    parts = [part(i, 1 + (i * 7919) % 70_000) for i in range(200)]
    async with opened(root, 16 << 20, segment="512KiB") as bench:
        jobs = [bench.workers.spawn(bench.put, p) for p in parts]
        assert [await job.wait() for job in jobs] == [[OK]] * 200
        reads = [bench.workers.spawn(bench.get, p) for p in parts]
        assert [await job.wait() for job in reads] == [[contents(p)] for p in parts]
        await bench.backend.delete([(p.part, 1) for p in parts[::2]])
        again = [part(i, 50_000, 2) for i in range(0, 200, 4)]
        assert await bench.put(*again) == [OK] * len(again)
        assert await bench.get(*again) == [contents(p) for p in again]
        assert bench.backend.stats().disk_bytes == disk_usage(root / "kv")


async def removed_segments_are_closed(root: Path) -> None:
    parts = [part(i, 200_000) for i in range(40)]
    async with opened(root, 12 << 20, segment="1MiB") as bench:
        await bench.put(*parts)
        kept = len(bench.files._files)
        assert kept > 4
    async with opened(root, 2 << 20) as bench:  # a smaller tier gives files back
        assert await bench.get(*parts) == [contents(p) for p in parts]
        await bench.backend.delete([(p.part, 1) for p in parts[3:]])
        left = bench.backend.stats().details["segments"]
        assert len(bench.files._files) <= left
        assert await bench.get(*parts[:3]) == [contents(p) for p in parts[:3]]
        gone = [link for link in _links() if "(deleted)" in link and "segment" in link]
        assert not gone, gone


def _links() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return links


SCENARIOS: list[Callable[[Path], Awaitable[None]]] = [
    f039_sizes,
    f039_offsets,
    padding_holds_nobodys_bytes,
    f040_truncated_file,
    f040_end_seen_by_the_library,
    medium_errors_are_results,
    full_and_older,
    reopened,
    many_at_once,
    removed_segments_are_closed,
    endings.cancelled_in_flight,
    endings.closed_in_flight,
    endings.closed_over_a_hanging_transfer,
    endings.wrong_tensors_are_refused,
    endings.f074_modes_are_told,
    engines.damaged_files_are_misses,
    engines.engine_promotes_into_the_device_directly,
    engines.engine_writes_device_frames_directly,
    endings.forked_children_are_refused,
]


_FACTORIES: dict[str, Callable[[], Any]] = {
    "asyncio": lambda: asyncio.new_event_loop,
    "uvloop": lambda: importlib.import_module("uvloop").new_event_loop,
}


def main() -> None:
    """Run every scenario in a directory of its own; report each."""
    torch.set_num_threads(1)
    loop, place, wanted = sys.argv[1], Path(sys.argv[2]), set(sys.argv[3:])
    for scenario in SCENARIOS:
        name = scenario.__name__
        if wanted and name not in wanted:
            continue
        error: str | None = None
        try:
            (place / name).mkdir()
            with asyncio.Runner(debug=loop == "asyncio", loop_factory=_FACTORIES[loop]()) as runner:
                runner.run(_bounded(scenario, place / name))
        except BaseException:  # noqa: BLE001 - reported, and the others are run
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


async def _bounded(scenario: Callable[[Path], Awaitable[None]], place: Path) -> None:
    async with asyncio.timeout(60):
        await scenario(place)


if __name__ == "__main__":
    main()
