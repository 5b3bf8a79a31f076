"""Kill a writer again and again, reopen its tier, count what is left.

A child process writes, replaces, deletes and flushes parts of a durable tier at random and says
on its standard output what it is about to do and what was acknowledged. The parent kills it
(SIGKILL) at a random moment, optionally damages the journal behind its flushed end, reopens the
tier and compares. The contents of a part follow from its name and generation, so that every byte
can be checked.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from tierkv.abc import OK, ReadRequest, StoredPart, WriteItem
from tierkv.buffers import Arena
from tierkv.config import Tier
from tierkv.registry import resolve
from tierkv.testing.bench import contents, name_part, part
from tierkv.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Backend
    from tierkv.blocks import PartId

__all__ = ["CrashReport", "disk_usage", "main", "run_crashes"]

_NUMBERS: Final = 48
_MAX_BYTES: Final = 60_000
_START_S: Final = 30.0


@dataclass(slots=True)
class CrashReport:
    """What a series of kills came to.

    Attributes:
        kills: Processes killed.
        flushed: Parts that had to be there, over all kills.
        hits: Those of them that were, bit for bit.
        visible: Parts that were there at all.
        verified: Those of them that were right, bit for bit.
        stale: Visible parts that were wrong where the journal had been damaged on purpose; the
            engine's checksums turn them into misses.
        torn: Journals damaged.
        problems: What went wrong, in words; empty if all is well.
    """

    kills: int = 0
    flushed: int = 0
    hits: int = 0
    visible: int = 0
    verified: int = 0
    stale: int = 0
    torn: int = 0
    problems: list[str] = field(default_factory=list)


def run_crashes(
    root: Path, kills: int, *, seed: int = 0, capacity: int = 4 << 20, tear: bool = False
) -> CrashReport:
    """Kill ``kills`` writers on one root, one after the other. Blocks (about 0.5 s a kill).

    Args:
        root: Directory of the tier.
        kills: How many.
        seed: Of moments and operations.
        capacity: Of the tier, in bytes.
        tear: Damage the journal behind its flushed end after each kill.

    Raises:
        RuntimeError: if a child ends by itself or loads torch.
    """
    rng = random.Random(seed)
    report = CrashReport()
    for number in range(kills):
        said = _kill_one(root, capacity, rng.randrange(2**31), rng.uniform(0.02, 0.3))
        report.kills += 1
        must, touched, journal = _understand(said)
        if tear and journal is not None:
            report.torn += _tear(root, journal, rng)
        asyncio.run(_inspect(root, capacity, must, touched, tear, report))
        if report.problems:
            report.problems.append(f"(at kill {number + 1}, seed {seed})")
            break
    return report


def _kill_one(root: Path, capacity: int, seed: int, delay: float) -> list[list[str]]:
    command = [sys.executable, "-m", "tierkv.testing.crash", str(root), str(capacity), str(seed)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        first = child.stdout.readline()
        if first != "open\n":
            child.kill()
            raise RuntimeError(f"the writer did not start: {first!r}")
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
    if child.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the writer ended by itself with status {child.returncode}")
    # the last line may have been cut by the kill; what it announced had not begun
    return [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]


def _understand(
    said: Sequence[Sequence[str]],
) -> tuple[dict[int, int], set[int], tuple[str, int] | None]:
    """Parts (number -> generation) that must be there, those that may have changed, the journal."""
    live: dict[int, int] = {}
    must: dict[int, int] = {}
    touched: set[int] = set()
    journal: tuple[str, int] | None = None
    for word, *rest in said:
        if word == "have":  # found at open, and flushed
            live[int(rest[0])] = int(rest[1])
        elif word == "try":
            touched.add(int(rest[0]))
        elif word == "put":
            live[int(rest[0])] = int(rest[1])
        elif word == "gone":
            live.pop(int(rest[0]), None)
        elif word == "flushed":
            must, touched = dict(live), set()
            journal = (rest[0], int(rest[1]))
    return {n: g for n, g in must.items() if n not in touched}, touched, journal


def _tear(root: Path, flushed: tuple[str, int], rng: random.Random) -> int:
    """Damage the journal behind what was flushed: cut it, or write garbage over it."""
    name, end = flushed
    path = root / name
    newest = max(root.glob("journal-*"), default=path)
    if newest != path:  # a checkpoint came in between: all of the new journal is unflushed
        path, end = newest, 0
    if not path.exists():
        return 0
    size = path.stat().st_size
    at = min(size, end + rng.randrange(400))
    with path.open("r+b") as file:
        if rng.random() < 0.5:
            file.truncate(at)
        else:
            file.seek(at)
            file.write(rng.randbytes(min(100, size - at)))
    return 1


async def _inspect(
    root: Path,
    capacity: int,
    must: dict[int, int],
    touched: set[int],
    tear: bool,
    report: CrashReport,
) -> None:
    workers = Workers(threads=2)
    await workers.start()
    backend = _backend(root, capacity)
    try:
        found = await backend.open(workers)
        problems = report.problems
        by_name = {stored.part: stored for stored in found}
        good = await _verified(backend, found)
        report.visible += len(found)
        report.verified += len(good)
        for number, generation in must.items():
            report.flushed += 1
            stored = by_name.get(name_part(number))
            if stored is None or stored.generation != generation:
                problems.append(f"flushed part {number}, generation {generation}: {stored}")
            elif stored.part not in good:
                problems.append(f"flushed part {number} has other bytes")
            else:
                report.hits += 1
        wrong = len(found) - len(good)
        report.stale += wrong
        if wrong and not tear:
            problems.append(f"{wrong} visible parts have other bytes")
        await backend.flush()
        disk, real = backend.stats().disk_bytes, disk_usage(root)
        if disk != real or real > capacity:
            problems.append(f"disk_bytes {disk}, du {real}, capacity {capacity}")
        left = [name for name in os.listdir(root) if name.endswith(".tmp")]
        if left:
            problems.append(f"temporary files left: {left}")
        stale = [(p.part, p.generation) for p in found if p.part not in good]
        await backend.delete(stale)
    finally:
        await backend.aclose()
        await workers.aclose()


async def _verified(backend: Backend, parts: Sequence[StoredPart]) -> set[PartId]:
    arena = Arena(1 << 20)
    good = set()
    for stored in parts:
        buffer = arena.allocate(stored.nbytes)
        assert buffer is not None
        request = ReadRequest(stored.part, stored.generation, 0, stored.nbytes)
        results = await backend.read([request], [buffer.memory])
        if results == [OK] and bytes(buffer.memory) == contents(stored):
            good.add(stored.part)
        buffer.release()
    return good


def disk_usage(root: Path) -> int:
    """Bytes of everything under ``root``, itself included, as ``du`` counts them."""
    paths = [root, *root.rglob("*")]
    return sum(path.lstat().st_blocks for path in paths) * 512


def _backend(root: Path, capacity: int) -> Backend:
    make = resolve("backends", "nvme")
    backend: Backend = make(Tier("nvme", capacity, path=str(root)))
    return backend


def _say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def _write_for_ever(root: Path, capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    workers = Workers(threads=2)
    await workers.start()
    backend = _backend(root, capacity)
    found = await backend.open(workers)
    await backend.flush()
    numbers = {name_part(number): number for number in range(_NUMBERS)}
    live = {numbers[stored.part]: stored for stored in found}
    generation = max((stored.generation for stored in found), default=0)
    _say("open")
    for number, stored in live.items():
        _say("have", number, stored.generation)
    _announce_flush(root, backend)
    arena = Arena(8 << 20)
    while True:
        choice = rng.random()
        if choice < 0.15:
            await backend.flush()
            _announce_flush(root, backend)
        elif choice < 0.35 and live:
            number = rng.choice(sorted(live))
            _say("try", number)
            stored = live.pop(number)
            await backend.delete([(stored.part, stored.generation)])
            _say("gone", number)
        else:
            items = []
            for number in rng.sample(range(_NUMBERS), rng.randint(1, 6)):
                generation += 1
                size = rng.randint(1, _MAX_BYTES)
                items.append((number, part(number, size, generation)))
                _say("try", number)
            await _write(backend, arena, items, live)


async def _write(
    backend: Backend,
    arena: Arena,
    items: Sequence[tuple[int, StoredPart]],
    live: dict[int, StoredPart],
) -> None:
    batch = []
    for _, stored in items:
        buffer = arena.allocate(stored.nbytes)
        assert buffer is not None
        np.copyto(np.frombuffer(buffer.memory, np.uint8), np.frombuffer(contents(stored), np.uint8))
        batch.append(WriteItem(stored, buffer))
    results = await backend.write(batch)
    for (number, stored), result, item in zip(items, results, batch, strict=True):
        item.buffer.release()
        if result == OK:
            live[number] = stored
            _say("put", number, stored.generation)


def _announce_flush(root: Path, backend: Backend) -> None:
    newest = max(path.name for path in root.glob("journal-*"))
    _say("flushed", newest, int(backend.stats().details["journal_bytes"]))


def main() -> None:
    """Write until killed: ``python -m tierkv.testing.crash ROOT CAPACITY SEED``.

    Raises:
        RuntimeError: if torch was loaded: a writer must start fast and hold little memory.
    """
    root, capacity, seed = sys.argv[1:]
    if "torch" in sys.modules:
        raise RuntimeError("the storage path loads torch")
    asyncio.run(_write_for_ever(Path(root), int(capacity), int(seed)))


if __name__ == "__main__":
    main()
