"""The ``file`` tier with several processes on one root, some of which are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import pytest

from tests.backends.file_bench import File
from tests.backends.file_writer import SIZE
from tests.backends.one_loop import one_loop
from tests.backends.test_file_root import everything, frames
from tierkv.abc import OK, IoStatus
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.abc import StoredPart
    from tierkv.testing.bench import Bench

SCALE = float(os.environ.get("TIERKV_SCALE", "0.1"))
KILLS = max(3, round(60 * SCALE))
ROOT = Path(__file__).parent.parent.parent
CAPACITY = 16 << 20
anyio_backend = one_loop


@contextmanager
def writer(root: Path, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes into the root, killed at the end; :func:`said` is what it said."""
    command = [sys.executable, "-m", "tests.backends.file_writer", str(root), str(seed)]
    with (
        (root / f"said-{seed}").open("wb") as out,
        subprocess.Popen(command, stdout=out, cwd=ROOT) as child,
    ):
        try:
            deadline = time.monotonic() + 60
            while not said(root, seed):
                assert child.poll() is None, "the writer ended by itself"
                assert time.monotonic() < deadline, "the writer did not start"
                time.sleep(0.005)
            yield child
        finally:
            child.kill()


def said(root: Path, seed: int) -> list[str]:
    """Whole lines that a writer said."""
    text = (root / f"said-{seed}").read_text()
    return [line.strip() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kill_one(root: Path, seed: int, delay: float) -> set[tuple[int, int]]:
    """Kill a writer; what it had put and not begun to touch again (number, generation)."""
    with writer(root, seed) as child:
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
    put: dict[int, int] = {}
    touched: set[int] = set()
    for line in said(root, seed)[1:]:
        word, number, generation = line.split()
        if word == "try":
            touched.add(int(number))
        else:
            touched.discard(int(number))
            put[int(number)] = int(generation)
        if word == "gone":
            put.pop(int(number))
    return {(n, g) for n, g in put.items() if n not in touched}


async def inspect(root: Path, must: set[tuple[int, int]]) -> int:
    """Everything that is visible is right, everything acknowledged is there; parts visible."""
    async with File().opened(root, CAPACITY) as bench:
        assert await bench.read(*bench.found) == [contents(p) for p in bench.found]
        named = {part(n, SIZE).part: n for n in range(64)}
        found = {(named[p.part], p.generation) for p in bench.found}
        assert must <= found
        assert not [p for p in everything(root) if ".unfinished" in p.name], "left by the dead"
        stats = bench.backend.stats()
        assert stats.disk_bytes == disk_usage(root / "kv")
        assert stats.details["damaged"] == 0
        assert len(frames(root)) == len(found)
        return len(found)


def test_f033_sigkill_of_a_writer(tmp_path: Path) -> None:
    rng = random.Random(1)
    seen = 0
    for kill in range(KILLS):
        must = kill_one(tmp_path, kill, rng.uniform(0.02, 0.3))
        seen += asyncio.run(inspect(tmp_path, must))
    assert seen > KILLS


@pytest.mark.anyio
async def test_two_processes_on_one_root(tmp_path: Path) -> None:
    """One writes and deletes while the other reads and deletes: exact bytes, or a miss."""
    rng = random.Random(2)
    exact = missed = 0
    with writer(tmp_path, 7), writer(tmp_path, 8) as second:
        for _ in range(20):
            async with File().opened(tmp_path, CAPACITY) as bench:
                for _ in range(3):
                    hits, misses = await _look(bench, rng)
                    exact, missed = exact + hits, missed + misses
                mine = part(50 + rng.randrange(8), 30_000, int(time.time() * 1e6))
                assert await bench.write(mine) == [OK]
                assert await bench.read(mine) == [contents(mine)], "nobody else knows of it"
        second.send_signal(signal.SIGSTOP)  # a live writer, in the middle of something
        await anyio.to_thread.run_sync(time.sleep, 0.05)
        unfinished = _unfinished_of(tmp_path, second.pid)
        async with File().opened(tmp_path, CAPACITY):
            assert _unfinished_of(tmp_path, second.pid) >= unfinished, "its file was taken away"
        second.send_signal(signal.SIGCONT)
    assert exact > 20
    assert missed > 0, "the other process deleted nothing: the test shows nothing"
    await inspect(tmp_path, set())


async def _look(bench: Bench, rng: random.Random) -> tuple[int, int]:
    known: list[StoredPart] = list(bench.found)
    exact = missed = 0
    for stored, seen in zip(known, await bench.read(*known), strict=True):
        if seen is IoStatus.MISSING:
            missed += 1
        else:
            assert seen == contents(stored)
            exact += 1
    doomed = rng.sample(known, len(known) // 8)
    await bench.backend.delete([(p.part, p.generation) for p in doomed])
    return exact, missed


def _unfinished_of(root: Path, pid: int) -> set[str]:
    return {p.name for p in everything(root) if f"-{pid}-" in p.name}


_HANGS = """
import asyncio, sys, threading
from pathlib import Path
from tests.backends.file_bench import File
from tierkv.testing.bench import part
from tierkv_backends.file import backend
from tierkv_backends.file.files import Files

async def main():
    async with File().opened(Path(sys.argv[1])) as bench:
        Files.open_writer = lambda *_: threading.Event().wait()
        writing = bench.workers.spawn(bench.write, part(1, 5000))
        await asyncio.sleep(0.05)
        await bench.backend.aclose()
        print("closed", flush=True)

backend._CLOSE_S = 0.05
asyncio.run(main())
"""


def test_f055_a_thread_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout == "closed\n"
