"""A process that writes and deletes in a ``file`` root until it is killed, and says what it did.

``python -m tests.backends.file_writer DIRECTORY SEED``; lines on its standard output: ``open``,
``try N G`` (about to put generation G of part N, or to delete it), ``put N G``, ``gone N G``.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

from tests.backends.file_bench import File
from tierkv.abc import OK
from tierkv.testing.bench import part

__all__ = ["NUMBERS", "SIZE", "main"]

NUMBERS = 12
SIZE = 90_000


def _say(*words: object) -> None:
    print(*words, flush=True)


async def _write(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    generation = int(time.time() * 1e6)
    live: dict[int, int] = {}
    async with File().opened(root, 16 << 20) as bench:
        _say("open")
        while True:
            numbers = rng.sample(range(NUMBERS), 2)
            if rng.random() < 0.3:
                doomed = [(n, live.pop(n)) for n in numbers if n in live]
                for pair in doomed:
                    _say("try", *pair)
                await bench.backend.delete([(part(n, SIZE, g).part, g) for n, g in doomed])
                for pair in doomed:
                    _say("gone", *pair)
                continue
            generation += 1
            for number in numbers:
                _say("try", number, generation)
            results = await bench.write(*(part(n, SIZE, generation) for n in numbers))
            for number, result in zip(numbers, results, strict=True):
                if result == OK:
                    live[number] = generation
                    _say("put", number, generation)
            if rng.random() < 0.1:
                await bench.backend.flush()


def main() -> None:
    """Write until killed."""
    asyncio.run(_write(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
