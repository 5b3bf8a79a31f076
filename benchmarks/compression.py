"""What rules of compression bring and cost: blocks kept, memory lost, speed of conversions.

``python -m benchmarks.compression [--json]``. Blocks are counted in a full host tier beside raw
ones; conversions in place are timed in turns with the bare encoder, each on one thread.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Final

import tierkv
from benchmarks.report import About, arguments, emit
from benchmarks.running import OnLoop
from benchmarks.synthetic import synthetic
from tierkv.buffers import Arena
from tierkv.frame import decode_header
from tierkv.pipeline import Pipeline, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.report import Cell
    from tierkv.buffers import ArenaBuffer

TOKENS: Final = 64
LAYOUT: Final = tierkv.Layout.uniform(layers=4, heads=8, dim=128, dtype="bfloat16")  # 1 MiB
SPACE: Final = tierkv.Space(tierkv.Identity("benchmark", "1"), LAYOUT, block_tokens=TOKENS)
RULES: Final = ("int8", "planes", "rot4", "int8+zstd")
FLOORS: Final = {"int8": 1.85, "planes": 1.3}
ALLOCATABLE: Final = 0.95
AFTER_50: Final = 50
FRAMES: Final = {  # KiB of the frames of one block in several chains
    "raw, int8": (1028, 548),
    "raw, int8, planes": (1028, 548, 690, 700, 705, 712, 720, 733, 741),
    "two models": (1028, 548, 716, 300, 260, 140, 183),
}


class _Growing(OnLoop):
    """A host tier, and a conversation in it."""

    def __init__(self, rule: tierkv.CompressionPolicy | None, capacity: int, most: int) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = list(range((most + 1) * TOKENS))
        self.kv = synthetic(4, 8, len(self.ids), 128)
        self._rule = rule
        self._tier = tierkv.Tier("host", capacity, high=1.0, low=1.0)
        self._most = most

    async def _open(self) -> None:
        opened = tierkv.open(
            tiers=[self._tier],
            space=SPACE,
            compression=self._rule,
            metrics=False,
            clock=lambda: self.now,
        )
        self.engine = await self.stack.enter_async_context(opened)
        session = self.engine.session("a", fidelity="lossy")
        self.session = await self.stack.enter_async_context(session)

    async def grow(self) -> int:
        """Store one block a turn until the tier takes no more; how many it holds then."""
        view = tierkv.views.dense(self.kv)
        for blocks in range(1, self._most + 1):
            ids = self.ids[: blocks * TOKENS + AFTER_50 + 1]
            done = await self.session.store(ids, view, (blocks - 1) * TOKENS)
            await self.session.flush()
            if done.skipped:
                break
        return self.engine.core.decisions.entries(0)

    async def fill(self) -> None:
        """Begin anew, with raw blocks."""
        await self.engine.reset()
        await self.session.store(self.ids, tierkv.views.dense(self.kv))

    async def convert(self) -> None:
        """Let time pass, and wait until all of them are converted."""
        self.now += 2.0
        await self.engine.flush()


def kept(rule: tierkv.CompressionPolicy | None, capacity: int) -> int:
    """Blocks that a full host tier of so many bytes holds."""
    with _Growing(rule, capacity, 5 * (capacity >> 20)) as growing:
        blocks: int = growing.run(growing.grow())
        return blocks


def allocatable(mix: Sequence[int], operations: int) -> float:
    """Share of an arena that frames can take after mixed sizes came and went."""
    rng, arena = random.Random(1), Arena(4 << 30)
    held: list[ArenaBuffer] = []
    for _ in range(operations):
        if held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held))).release()
            continue
        nbytes = rng.choice(mix) << 10
        buffer = arena.allocate(nbytes)
        while buffer is None:
            held.pop(rng.randrange(len(held))).release()
            buffer = arena.allocate(nbytes)
        held.append(buffer)
    for size in sorted(mix, reverse=True):
        while (buffer := arena.allocate(size << 10)) is not None:
            held.append(buffer)
    return sum(buffer.nbytes for buffer in held) / arena.capacity


def conversion(chain: str, blocks: int, repeats: int) -> tuple[float, float]:
    """GB/s of raw bytes converted in place, and the speed over that of the bare encoder."""
    rule = tierkv.CompressionPolicy(chain, after=1.0)
    pipeline = Pipeline(SPACE, chain)
    out = memoryview(bytearray(pipeline.max_bytes(0)))
    with _Growing(rule, 1 << 30, blocks - 1) as growing:
        core = growing.engine.core
        memory = core.levels[0].memory
        assert memory is not None
        growing.run(growing.fill())
        frames = []
        for part, generation, _ in core.decisions.parts(0):
            borrowed = memory.borrow(part, generation)
            assert borrowed is not None
            frames.append(memoryview(bytearray(borrowed.memory)))

        def bare() -> None:
            for frame in frames:
                header = decode_header(frame)
                verify(header, frame)
                done = pipeline.transcode(header, frame, out)
                verify(decode_header(out[: done.nbytes]), out[: done.nbytes])

        seconds, ratios = [], []
        for _ in range(repeats + 1):
            growing.run(growing.fill())
            before = core.decisions.used(0)
            start = time.perf_counter()
            growing.run(growing.convert())
            middle = time.perf_counter()
            bare()
            seconds.append(middle - start)
            ratios.append((time.perf_counter() - middle) / (middle - start))
            assert core.decisions.used(0) < before
    raw = blocks * pipeline.raw_bytes(0)
    return raw / statistics.median(seconds[1:]) / 1e9, statistics.median(ratios[1:])


ABOUT: Final = About(
    measures="blocks that a full tier keeps under rules of compression, memory left allocatable "
    "after many puts and deletes, and GB/s of conversions in place",
    against="raw blocks in a tier of the same size; conversions: the bare encoder, one thread each",
    floors=f"blocks kept: {', '.join(f'{name} {floor}x' for name, floor in FLOORS.items())}; "
    f"allocatable: {ALLOCATABLE:.0%}; exit status 1 below",
    takes="half a minute of CPU; less with smaller --capacity and --operations",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a floor is missed."""
    parser = arguments("compression", __doc__, ABOUT)
    parser.add_argument("--capacity", type=int, default=24, help="MiB of the tier that is filled")
    parser.add_argument("--operations", type=int, default=100_000, help="puts and deletes")
    parser.add_argument("--blocks", type=int, default=48, help="blocks converted at once")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of conversions")
    args = parser.parse_args(argv)
    capacity = args.capacity << 20
    raw = kept(None, capacity)
    rows: list[dict[str, Cell]] = []

    def row(what: str, about: str, value: float, ratio: float | None, floor: float | None) -> None:
        figure = value if ratio is None else ratio
        fine = floor is None or figure >= floor
        told: dict[str, Cell] = {"what": what, "about": about, "value": value, "ratio": ratio}
        rows.append({**told, "floor": floor, "ok": fine})

    row("blocks kept", "raw", raw, 1.0, None)
    for chain in RULES:
        for steps in (0, AFTER_50):
            blocks = kept(tierkv.CompressionPolicy(chain, after_steps=steps), capacity)
            about = f"{chain}, at once" if not steps else f"{chain}, after {steps} steps"
            row("blocks kept", about, blocks, blocks / raw, FLOORS.get(chain))
    for name, mix in FRAMES.items():
        row("allocatable", name, allocatable(mix, args.operations), None, ALLOCATABLE)
    for chain in RULES:
        speed, ratio = conversion(chain, args.blocks, args.repeats)
        row("GB/s converted, over the bare encoder", chain, speed, ratio, None)
    emit("compression", rows, args.json)
    missed = [entry for entry in rows if not entry["ok"]]
    for entry in missed:
        print(f"{entry['what']}, {entry['about']}: below {entry['floor']}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
