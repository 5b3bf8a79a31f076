"""What deciding costs: CPU per block without any payload, memory per part, pauses.

Run ``python -m benchmarks.overhead [--json] [--blocks 1000,100000,1000000]``. Rows are checks:
``value`` against ``limit``. Sizes are measured in turns, so that a busy machine slows all alike.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from typing import TYPE_CHECKING, Final

from benchmarks.report import About, arguments, emit, spread
from tierkv.blocks import BlockKey, part_id
from tierkv.decisions.core import Decisions
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.types import GroupRule, Query, StoreItem, TierLimits
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.report import Cell
    from tierkv.decisions.types import FoundPart

CHAIN: Final = 64
"""Blocks of one chain: 4,096 tokens."""
NBYTES: Final = 1 << 20
RULE: Final = (GroupRule(GroupKind.FULL),)
LEASED: Final = 7000
US_PER_BLOCK: Final = 10.0
RATIO: Final = 2.0
BYTES_PER_PART: Final = 300.0
GC_PAUSE_MS: Final = 20.0


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class World:
    """A store of ``blocks`` blocks, every one on disk, a quarter of them in RAM as well."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.chains = max(4, blocks // CHAIN)
        self.now = 0.0
        self.seed = 0
        self.turn = 0
        ram = max(2, self.chains // 4) * CHAIN * NBYTES
        disk = (self.chains + 1) * CHAIN * NBYTES
        tiers = [TierLimits("host", ram), TierLimits("nvme", disk, durable=True)]
        self.decisions = Decisions(tiers, policy=Lrfu)
        for _ in range(self.chains):
            self.store(self.items(self.fresh()))
            self.write_through()

    def keys(self, chain: int) -> list[BlockKey]:
        """Keys of a chain; made anew each time, so that the store alone keeps them."""
        stem = chain.to_bytes(8, "little")
        return [
            BlockKey(hashlib.sha256(stem + block.to_bytes(4, "little")).digest())
            for block in range(CHAIN)
        ]

    def fresh(self) -> list[BlockKey]:
        """Keys of the next new chain."""
        self.seed += 1
        return self.keys(self.seed)

    def some(self) -> list[BlockKey]:
        """Keys of a chain that is on disk, if no store pushed it out."""
        return self.keys(random.randint(max(1, self.seed - self.chains + 2), self.seed))

    def cold(self) -> list[BlockKey]:
        """Keys of a chain of the older half, in turns: on disk, but not in RAM any more."""
        self.turn = (self.turn + 1) % (self.chains // 2)
        return self.keys(self.seed - self.chains + 3 + self.turn)

    def items(self, keys: Sequence[BlockKey]) -> list[StoreItem]:
        """Items of a chain."""
        root = BlockKey(bytes(32))
        parts = [part_id(key, 0) for key in keys]
        return [
            StoreItem(part, parts[i - 1] if i else None, root, NBYTES)
            for i, part in enumerate(parts)
        ]

    def query(self, keys: Sequence[BlockKey], *, probe: bool = False) -> Query:
        """A lookup of a chain."""
        return Query(tuple(keys), RULE, 64, 64 * len(keys), touch=not probe, lease=not probe)

    # ------------------------------------------------------------------ what is measured

    def match(self, query: Query) -> tuple[FoundPart, ...]:
        """Match and let go."""
        self.now += 1e-3
        look = self.decisions.begin_lookup(query, self.now)
        while not self.decisions.advance(look, self.now):
            pass
        found = self.decisions.finish(look, self.now)
        self.decisions.release(found.lease, self.now)
        return found.parts

    def contains(self, query: Query) -> int:
        """Probe: no lease, no use counted."""
        self.now += 1e-3
        return self.decisions.lookup(query, self.now).blocks

    def load(self, query: Query) -> dict[int, list[FoundPart]]:
        """Plan a load: match, one batch a tier, let go."""
        self.now += 1e-3
        found = self.decisions.lookup(query, self.now)
        batches: dict[int, list[FoundPart]] = {}
        for part in found.parts:
            batches.setdefault(part.tier, []).append(part)
        self.decisions.release(found.lease, self.now)
        return batches

    def promote(self, items: Sequence[StoreItem]) -> None:
        """Copy a chain from disk to RAM, evicting what was used less recently."""
        self.now += 1e-3
        self._copy(items, 1, 0, demand=False)

    def store(self, items: Sequence[StoreItem]) -> None:
        """Put a new chain into RAM, evicting the coldest."""
        self.now += 1e-3
        taken = self.decisions.reserve(0, items, tenant="t", now=self.now)
        done = [i for i, outcome in enumerate(taken.outcomes) if outcome.generation]
        if len(done) != len(items):
            raise RuntimeError(f"only {len(done)} of {len(items)} blocks were reserved")
        self.decisions.commit(taken.id, done, self.now)
        self.last = items

    def write_through(self) -> None:
        """Copy the chain stored last to disk."""
        self._copy(self.last, 0, 1, demand=True)

    def _copy(self, items: Sequence[StoreItem], source: int, target: int, *, demand: bool) -> None:
        taken = self.decisions.reserve(
            target, items, tenant="t", now=self.now, demand=demand, source=source
        )
        done = [i for i, outcome in enumerate(taken.outcomes) if outcome.generation]
        if taken.id:
            self.decisions.commit(taken.id, done, self.now)


def _us(fn: Callable[[], object]) -> float:
    start = time.process_time()
    fn()
    return (time.process_time() - start) * 1e6 / CHAIN


def _measure(world: World) -> dict[str, float]:
    """CPU microseconds a block of each operation, once."""
    some, cold, new = world.some(), world.cold(), world.items(world.fresh())
    query, probe = world.query(some), world.query(world.some(), probe=True)
    below, loaded = world.items(cold), world.query(cold)
    return {
        "match": _us(lambda: world.match(query)),
        "contains": _us(lambda: world.contains(probe)),
        "load": _us(lambda: world.load(loaded)),
        "promote": _us(lambda: world.promote(below)),
        "store": _us(lambda: world.store(new)),
        "write_through": _us(world.write_through),
    }


def _row(check: str, blocks: int, value: float, unit: str, limit: float | None) -> dict[str, Cell]:
    return {
        "check": check,
        "blocks": blocks,
        "value": round(value, 3),
        "unit": unit,
        "limit": limit,
        "ok": limit is None or value <= limit,
    }


def _build(blocks: int, rows: list[dict[str, Cell]], *, last: bool) -> World:
    gc.collect()
    before = _rss()
    world = World(blocks)
    gc.collect()
    tracked = world.decisions.entries(1)
    if last:
        grown = (_rss() - before) / tracked
        rows.append(_row("memory per part", blocks, grown, "bytes", BYTES_PER_PART))
        pauses = []
        for _ in range(5):
            start = time.perf_counter()
            gc.collect()
            pauses.append((time.perf_counter() - start) * 1e3)
        rows.append(
            _row("full garbage collection", blocks, spread(pauses).median, "ms", GC_PAUSE_MS)
        )
    return world


def _costs(worlds: dict[int, World], repeats: int) -> list[dict[str, Cell]]:
    samples: dict[tuple[int, str], list[float]] = {}
    for number in range(repeats + 1):
        for blocks, world in worlds.items():
            for name, us in _measure(world).items():
                if number:  # the first round warms up
                    samples.setdefault((blocks, name), []).append(us)
    rows = []
    smallest, largest = min(worlds), max(worlds)
    for (blocks, name), values in samples.items():
        rows.append(_row(name, blocks, spread(values).median, "us/block", US_PER_BLOCK))
    for name in dict.fromkeys(name for _, name in samples):
        pairs = zip(samples[largest, name], samples[smallest, name], strict=True)
        ratio = spread([big / max(small, 1e-3) for big, small in pairs]).median
        rows.append(_row(f"{name}: largest / smallest", largest, ratio, "ratio", RATIO))
    return rows


def _leased(blocks: int, repeats: int) -> dict[str, Cell]:
    """Stores beside thousands of leased blocks at the cold end, against stores without."""
    free, busy = World(blocks), World(blocks)
    leased = min(LEASED, blocks // 8)
    for chain in range(2, 2 + -(-leased // CHAIN)):
        query = busy.query(busy.keys(chain))
        quiet = Query(query.keys, query.groups, query.block_tokens, query.tokens, touch=False)
        busy.decisions.lookup(quiet, busy.now)
    ratios = []
    for number in range(repeats + 1):
        with_, without = busy.items(busy.fresh()), free.items(free.fresh())
        a = _us(lambda w=with_: busy.store(w)) + _us(busy.write_through)  # type: ignore[misc]
        b = _us(lambda w=without: free.store(w)) + _us(free.write_through)  # type: ignore[misc]
        if number:
            ratios.append(a / max(b, 1e-3))
    return _row(f"store beside {leased} leased blocks", blocks, spread(ratios).median, "ratio", 1.2)


ABOUT: Final = About(
    measures="CPU of each kind of decision, per block and without payload; memory per tracked "
    "part; pauses of the garbage collector",
    against="the same decisions among fewer blocks, in turns: costs must not grow with the number",
    floors=f"{US_PER_BLOCK:g} us a block, {RATIO:g} times the cost at the smallest size, "
    f"{BYTES_PER_PART:g} bytes a part, pauses of {GC_PAUSE_MS:g} ms; exit status 1 above",
    takes="some minutes of CPU, most of it for the million; less with --blocks 1000,100000",
    needs="1 GiB of RAM",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a limit is missed."""
    parser = arguments("overhead", __doc__, ABOUT)
    parser.add_argument("--blocks", default="1000,100000,1000000", help="sizes, ascending")
    parser.add_argument("--repeats", type=int, default=60, help="rounds; default: 60")
    args = parser.parse_args(argv)
    random.seed(1)
    sizes = sorted(int(size) for size in args.blocks.split(","))
    rows: list[dict[str, Cell]] = []
    # the largest first: its memory is measured in a fresh process
    worlds = {size: _build(size, rows, last=size == sizes[-1]) for size in reversed(sizes)}
    gc.disable()  # pauses have a row of their own
    rows += _costs(worlds, args.repeats)
    rows.append(_leased(min(100_000, sizes[-1]), args.repeats))
    gc.enable()
    emit("overhead", rows, args.json)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
