"""What eviction policies cost, each alone in a plain cache: accesses a CPU second.

A stream of block names with the shape of chat (a few popular prompts, sessions that return, long
prompts that do not) goes through every policy in turns, so that a busy machine slows all alike.
``cost_of_lru`` is the CPU time against ``lru`` in the same turn (median).
"""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Final

from benchmarks.report import About, arguments, emit, spread
from tierkv import registry
from tierkv.testing.caching import ObjectCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.report import Cell

LIMIT: Final = 300_000.0  # accesses a CPU second, of the policies that keep one order by recency
LRU_CLASS: Final = ("fifo", "lru", "lfu")
CAPACITY: Final = 5_859


def chat(accesses: int, seed: int = 1) -> list[int]:
    """Names of blocks: every request is a chain; two of three continue a session, or repeat one."""
    rng = random.Random(seed)
    chains: list[list[int]] = []
    names: list[int] = []
    fresh = 1
    while len(names) < accesses:
        grown = rng.randrange(1, 30)
        old = chains[-1 - int(rng.expovariate(0.01)) % len(chains)] if chains else []
        chain = [*(old if rng.random() < 0.67 else []), *range(fresh, fresh + grown)]
        fresh += grown
        chains.append(chain)
        names += chain
    return names[:accesses]


def measure(names: Sequence[str], stream: Sequence[int], repeats: int) -> list[dict[str, Cell]]:
    """Time every policy ``repeats`` times, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    hits: dict[str, int] = {}
    for _ in range(repeats):
        for name in names:
            cache = ObjectCache(registry.resolve("policies", name)(), CAPACITY)
            start = time.process_time()
            hits[name] = sum(map(cache.access, stream))
            seconds[name].append(time.process_time() - start)
    rows: list[dict[str, Cell]] = []
    for name in names:
        rate = len(stream) / min(seconds[name])
        ratio = spread([s / base for s, base in zip(seconds[name], seconds["lru"], strict=True)])
        limit = LIMIT if name in LRU_CLASS else None
        rows.append(
            {
                "policy": name,
                "hit_ratio": hits[name] / len(stream),
                "accesses_per_cpu_s": rate,
                "cost_of_lru": ratio.median,
                "limit": limit,
                "ok": limit is None or rate >= limit,
            }
        )
    return rows


ABOUT: Final = About(
    measures="accesses a CPU second of each eviction policy, alone in a plain cache",
    against="lru on the same stream of accesses, in turns",
    floors=f"{LIMIT:,.0f} accesses a CPU second for {', '.join(LRU_CLASS)}; exit status 1 below",
    takes="some twenty seconds of CPU; less with --accesses 20000 or some --policies",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a limit is missed."""
    parser = arguments("policies", __doc__, ABOUT)
    parser.add_argument("--policies", default="", help="names, comma-separated; all if empty")
    parser.add_argument("--accesses", type=int, default=200_000, help="length of the stream")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the best counts")
    args = parser.parse_args(argv)
    wanted = args.policies.split(",") if args.policies else registry.names("policies")
    names = ["lru", *(name for name in wanted if name != "lru")]
    rows = measure(names, chat(args.accesses), args.repeats)
    emit("policies", rows, args.json)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
