"""The ``file`` tier against a dictionary: any sequence of calls, restarts and losses."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.backends.file_bench import File
from tests.backends.test_file_root import frames
from tierkv.abc import OK, IoStatus
from tierkv.testing.bench import contents, name_part, part
from tierkv.testing.crash import disk_usage

if TYPE_CHECKING:
    import random

    from tierkv.abc import StoredPart
    from tierkv.testing.bench import Bench

CAPACITY = 1 << 20
NUMBERS = st.integers(0, 7)
SIZES = st.sampled_from([1, 3900, 4096, 4097, 28_672, 60_000, 200_000])


class FileMachine(RuleBasedStateMachine):
    """Model: number -> what a read must give; None where the file was taken away behind its back.

    ``unsure`` holds parts whose file vanished and that were not read since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.live: dict[int, StoredPart] = {}
        self.lost: set[int] = set()
        self.generation = 0
        self.bench = self.runner.run(self._open())

    async def _open(self) -> Bench:
        return await self.stack.enter_async_context(File(threads=2).opened(self.root, CAPACITY))

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.root)

    @rule(
        writes=st.lists(st.tuples(NUMBERS, SIZES), min_size=1, max_size=4, unique_by=lambda w: w[0])
    )
    def write(self, writes: list[tuple[int, int]]) -> None:
        self.generation += 1
        parts = [(n, part(n, size, self.generation, tenant="t" * n)) for n, size in writes]
        results = self.runner.run(self.bench.write(*(stored for _, stored in parts)))
        room = self.bench.backend.stats().details["usable_bytes"]
        for (number, stored), result in zip(parts, results, strict=True):
            if result == OK:
                self.live[number] = stored
                self.lost.discard(number)
            else:
                assert result.status is IoStatus.FULL
                assert self._charged() + 800_000 > room, "refused although there is room"

    @rule(number=NUMBERS)
    def write_older(self, number: int) -> None:
        if number in self.live and self.live[number].generation > 1:
            stored = part(number, 100, self.live[number].generation - 1)
            (result,) = self.runner.run(self.bench.write(stored))
            assert result.status is IoStatus.MISSING

    @rule(numbers=st.lists(NUMBERS, max_size=4), older=st.booleans())
    def delete(self, numbers: list[int], older: bool) -> None:
        there = [(n, self.live[n].generation - older) for n in numbers if n in self.live]
        self.runner.run(self.bench.backend.delete([(name_part(n), g) for n, g in there]))
        if not older:
            for number, _ in there:
                self.live.pop(number, None)
                self.lost.discard(number)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def read(self, numbers: list[int]) -> None:
        wanted = [self.live.get(n) or part(n, 5000, 10_000) for n in numbers]
        seen = self.runner.run(self.bench.read(*wanted))
        for number, stored, result in zip(numbers, wanted, seen, strict=True):
            if number in self.live and number not in self.lost:
                assert result == contents(stored)
            else:
                assert result is IoStatus.MISSING
        for number in numbers:
            if number in self.lost:
                self.lost.discard(number)
                del self.live[number]

    @precondition(lambda self: set(self.live) - self.lost)
    @rule(choice=st.randoms(use_true_random=False))
    def lose_a_file(self, choice: random.Random) -> None:
        number = choice.choice(sorted(set(self.live) - self.lost))
        stored = self.live[number]
        backend = self.bench.backend
        store = backend._store  # type: ignore[attr-defined]
        entry = store.catalog.find(stored.part, stored.generation)
        (self.root / "kv" / store.path(stored.part, entry)).unlink()
        self.lost.add(number)

    @rule()
    def flush(self) -> None:
        self.runner.run(self.bench.backend.flush())

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.stack.aclose())
        self.stack = AsyncExitStack()
        self.bench = self.runner.run(self._open())
        for number in self.lost:
            del self.live[number]
        self.lost.clear()
        found = sorted(self.bench.found, key=lambda p: p.part)
        assert found == sorted(self.live.values(), key=lambda p: p.part)

    @invariant()
    def books(self) -> None:
        stats = self.bench.backend.stats()
        assert stats.entries == len(self.live)
        assert stats.live_bytes == self._charged() <= CAPACITY
        gone = stats.disk_bytes - disk_usage(self.root / "kv")
        assert stats.disk_bytes <= CAPACITY
        assert gone >= 0
        assert gone == 0 or self.lost
        assert len(frames(self.root)) == len(self.live) - len(self.lost)

    def _charged(self) -> int:
        return sum(self.bench.backend.charge(p.nbytes) for p in self.live.values())


TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = hypothesis.settings(max_examples=25, stateful_step_count=30)
