"""What the decisions find on public traces, against published and computed figures.

Run ``python -m benchmarks.replay [--json] [--traces DIR] [CHECK ...]`` with the checks hits, hints,
figure, prefetch, live and speed (all by default). Rows are checks: ``value`` against ``limit`` (at
least it, or for ``max`` at most). The traces are described in :mod:`tierkv.traces`; a check whose
trace is not there is left out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.replay_live import TRACE, run_live
from benchmarks.report import About, arguments, emit
from tierkv.replay import CostModel, Setup, belady, replay
from tierkv.traces import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.report import Cell
    from tierkv.replay import Report
    from tierkv.traces import Trace

FILES: Final = {
    "conversation": ("mooncake_fast25_conversation.jsonl.zst", None),
    "synthetic": ("mooncake_fast25_synthetic.jsonl.zst", None),
    "agentic": ("agentic_weka_710.delta.jsonl.zst", 2048),
    "magagent": ("agentic_lmcache_magagent.blocks64.jsonl.zst", None),
}
AT: Final = 5859
"""Blocks of 512 tokens: three million tokens."""

AGENTIC: Final = (537, 1074, 2149)
"""Blocks of 2,048 tokens: 0.5, 1 and 2 % of all of them."""

CAPACITIES: Final = (10_000, 100_000, *(n * 1_000_000 for n in (1, 2, 4, 5, 8, 10, 50)))
"""Tokens."""

FIGURE_9: Final = {
    "synthetic": (0.03, 1.17, 14.61, 23.45, 38.05, 43.52, 54.47, 58.86, 65.82),
    "conversation": (4.49, 7.31, 8.66, 12.02, 21.49, 24.71, 29.97, 32.63, 39.83),
}
"""Mooncake (FAST'25), figure 9: hit rate of LRU in %, at those capacities."""

POINTS: Final = {"synthetic": 1.3, "conversation": 4.0}
"""Distance allowed, in points: the release of ``conversation`` keeps whole blocks only, of which
its common system prompt fills none (2.7 to 3.7 points)."""

PER_CPU_S: Final = 100_000.0
EVENTS: Final = 1_000_000
MOST_CPU_S: Final = 60.0
STALL: Final = 0.70
LIVE_REQUESTS: Final = 400
LIVE_BLOCKS: Final = 1000


class Check(NamedTuple):
    """One figure against its bound."""

    check: str
    trace: str
    value: float
    limit: float | None = None
    at_most: bool = False

    def row(self) -> dict[str, Cell]:
        """The check as a row."""
        ok = True
        if self.limit is not None:
            ok = self.value <= self.limit if self.at_most else self.value >= self.limit
        word = "max" if self.at_most else "min"
        limit = None if self.limit is None else round(self.limit, 4)
        return {
            "check": self.check,
            "trace": self.trace,
            "value": round(self.value, 4),
            "bound": word if self.limit is not None else "",
            "limit": limit,
            "ok": ok,
        }


class Bench:
    """The traces of a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.trace: Callable[[str], Trace] = cache(self._trace)

    def has(self, name: str) -> bool:
        """Whether the trace is there."""
        return (self._folder / FILES[name][0]).exists()

    def _trace(self, name: str) -> Trace:
        file, size = FILES[name]
        return open_trace(self._folder / file, block_tokens=size).loaded()

    # ------------------------------------------------------------------ what is checked

    def hits(self) -> Iterator[Check]:
        """Hit ratios of the policies, and the bound."""
        # the figures of LRU and of the bound are those of an independent simulator
        yield from self._hits("conversation", AT, {"lru": 0.1385, "lrfu": 0.152}, 0.360)
        yield from self._hits("synthetic", AT, {"lru": 0.315, "lrfu": 0.328}, 0.559)
        yield from self._hits("agentic", AGENTIC[1], {"lru": 0.825, "lrfu": 0.822}, 0.901)
        yield from self._hits("magagent", 200, {"lru": 0.740, "lrfu": 0.740}, 0.796)

    def _hits(
        self, name: str, blocks: int, policies: dict[str, float], most: float
    ) -> Iterator[Check]:
        if not self.has(name):
            return
        trace = self.trace(name)
        bound = belady(trace, blocks)
        yield Check(f"Belady at {blocks}", name, bound.token_hit_ratio, most)
        reports = {
            p: replay(trace, Setup(capacity_blocks=blocks, policy=p, hints=False)) for p in policies
        }
        for policy, least in policies.items():
            report = reports[policy].against(reports["lru"], bound)
            yield Check(f"{policy} at {blocks}", name, report.token_hit_ratio, least)
            if policy != "lru":
                yield Check(f"{policy} at {blocks}: gap closed", name, report.gap_closed or 0.0)

    def hints(self) -> Iterator[Check]:
        """What stop reasons are worth to eviction, by themselves.

        A demand load is a block that is asked for again after it left, as a slower tier that
        keeps everything would have to bring it.
        """
        if not self.has("agentic"):
            return
        trace = self.trace("agentic")
        for policy, blocks in (*(("lru", blocks) for blocks in AGENTIC), ("lrfu", AGENTIC[1])):
            mute, told = (
                replay(trace, Setup(capacity_blocks=blocks, policy=policy, hints=flag))
                for flag in (False, True)
            )
            what, goal = f"{policy} at {blocks}", blocks == AGENTIC[1]
            yield Check(f"{what}, no hints", "agentic", mute.token_hit_ratio)
            least = 0.84 if goal else None
            yield Check(f"{what}, hints", "agentic", told.token_hit_ratio, least)
            loads = told.evicted_before_reuse / mute.evicted_before_reuse
            most = 0.9 if goal and policy == "lru" else None
            yield Check(f"{what}, demand loads", "agentic", loads, most, at_most=True)

    def figure(self) -> Iterator[Check]:
        """LRU as in figure 9 of the Mooncake paper, which touches the root first."""
        for name, points in FIGURE_9.items():
            rows = zip(CAPACITIES, points, strict=True)
            for tokens, published in rows if self.has(name) else ():
                setup = Setup(capacity_blocks=tokens // 512, policy="lru", touch_order="root_first")
                ours = 100 * replay(self.trace(name), setup).token_hit_ratio
                what = f"figure 9, {tokens / 1e6:g} M: {ours:.2f}, not {published}"
                yield Check(what, name, abs(ours - published), POINTS[name], at_most=True)

    def prefetch(self) -> Iterator[Check]:
        """Loading at arrival against loading when the server takes the request."""
        name = "conversation"
        if not self.has(name):
            return
        model = CostModel(bandwidth=5e9, prefill=40_000.0, layers=32)
        for policy in ("lru", "lrfu"):
            setup = Setup(capacity_blocks=(AT, None), policy=policy, model=model)
            plain = Setup(
                capacity_blocks=(AT, None),
                policy=policy,
                model=CostModel(bandwidth=5e9, prefill=40_000.0, layers=32, overlap=False),
            )
            early = Setup(
                capacity_blocks=(AT, None), policy=policy, model=model, prefetch="arrival"
            )
            base, overlap, arrival = (self._timed(s) for s in (plain, setup, early))
            yield Check(f"{policy}: stall, load at dequeue, s", name, base.stall.total)
            yield Check(f"{policy}: ... less with overlap", name, _less(overlap, base))
            yield Check(f"{policy}: ... less at arrival", name, _less(arrival, base), STALL)
            yield Check(f"{policy}: TTFT at dequeue, mean s", name, base.ttft.mean)
            yield Check(f"{policy}: TTFT at arrival, mean s", name, arrival.ttft.mean)
            counts = arrival.prefetch["arrival"]
            yield Check(f"{policy}: precision of arrival", name, counts["precision"], 0.9)

    def _timed(self, setup: Setup) -> Report:
        return replay(self.trace("conversation"), setup)

    def live(self) -> Iterator[Check]:
        """A live engine and the replay of what it recorded: how far the two are apart."""
        name = "conversation"
        if not self.has(name):
            return
        with tempfile.TemporaryDirectory() as folder:
            requests = list(islice(self.trace(name), LIVE_REQUESTS))
            live = asyncio.run(run_live(requests, LIVE_BLOCKS, Path(folder)))
            recorded = open_trace(Path(folder) / TRACE)
            blocks = (LIVE_BLOCKS, None)
            report = replay(recorded, Setup(capacity_blocks=blocks, high=live.high, low=live.low))
        error = report.token_hit_ratio - live.tokens / report.tokens
        near = report.fast_token_hit_ratio - live.near / report.tokens
        yield Check("live: token hit ratio", name, live.tokens / report.tokens)
        yield Check("live: error of the replay", name, abs(error), 0.001, at_most=True)
        yield Check("live: in the first tier", name, live.near / report.tokens)
        yield Check("live: error of the replay there", name, abs(near), 0.05, at_most=True)

    def speed(self) -> Iterator[Check]:
        """Accesses per CPU second through the whole decision object."""
        for name, blocks in (("agentic", AGENTIC[1]), ("conversation", AT), ("synthetic", AT)):
            if not self.has(name):
                continue
            trace = self.trace(name)
            for policy in ("lru", "lrfu"):
                best = max(self._rate(trace, policy, blocks) for _ in range(3))
                yield Check(f"{policy}: accesses per CPU second", name, best, PER_CPU_S)
        if self.has("agentic"):
            trace = self.trace("agentic")
            begin = time.process_time()
            report = replay(trace, Setup(capacity_blocks=AGENTIC[1]))
            seconds = (time.process_time() - begin) * EVENTS / report.blocks
            yield Check("CPU s of a million accesses", "agentic", seconds, MOST_CPU_S, at_most=True)

    @staticmethod
    def _rate(trace: Trace, policy: str, blocks: int) -> float:
        report = replay(trace, Setup(capacity_blocks=blocks, policy=policy))
        return report.blocks / report.cpu_s


def _less(report: Report, base: Report) -> float:
    return 1 - report.stall.total / base.stall.total


ABOUT: Final = About(
    measures="token hits of the policies, what hints and prefetch save, and replayed accesses a "
    "CPU second",
    against="published figures of the same traces, Belady's bound, and a live engine (live)",
    floors=f"{PER_CPU_S:,.0f} accesses a CPU second, {STALL:.0%} less stall with prefetch, and the "
    "rest in column limit; exit status 1 if one is missed",
    takes="a quarter of an hour for all checks; seconds to minutes for one of them",
    needs="public traces in --traces or TIERKV_TRACES; a check whose trace is missing is left out",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("replay", __doc__, ABOUT)
    parser.add_argument("checks", nargs="*", help="hits, hints, figure, ...; all by default")
    default = os.environ.get("TIERKV_TRACES", str(Path(__file__).parents[2] / "shared/traces"))
    parser.add_argument("--traces", default=default, help="folder with the traces")
    given = parser.parse_args(argv)
    bench = Bench(Path(given.traces))
    known = {
        "hits": bench.hits,
        "hints": bench.hints,
        "figure": bench.figure,
        "prefetch": bench.prefetch,
        "live": bench.live,
        "speed": bench.speed,
    }
    unknown = set(given.checks) - set(known)
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    rows = [check.row() for name in given.checks or known for check in known[name]()]
    if not rows:
        parser.error(f"no trace in {given.traces} (set TIERKV_TRACES)")
    emit("replay", rows, given.json)
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
