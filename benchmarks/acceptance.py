"""The acceptance lane: every measured promise, in full counts, against its bound.

Run ``python -m benchmarks.acceptance [name ...] [--json]``; ``--list`` names the checks. It takes
many minutes: run it for large changes and for releases. Exit status 1 if a bound is missed.
``TIERKV_SCALE`` scales the counts of repetitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import About, arguments, emit
from tierkv.testing.crash import CrashReport, run_crashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.report import Cell

_KILLS = 100  # twice: with intact and with torn journals
_CANCELS = 10_000
_STORM_S = 60.0
_REOPENED = 100_000
_REOPEN_CPU_S = 2.0
_VLLM_ROUNDS = 3
_VLLM_TESTS = ("tests/vllm", "tests/acceptance/test_vllm_scripts.py")
_STRESS = ("tests/engine", "tests/decisions", "tests/backends", "tests/identity")
Row = dict[str, "Cell"]


def _scale() -> float:
    return float(os.environ.get("TIERKV_SCALE", "1"))


def _count(full: int) -> int:
    return max(1, round(full * _scale()))


def _row(check: str, what: str, value: float, bound: str, *, ok: bool) -> Row:
    return {"check": check, "what": what, "value": value, "bound": bound, "ok": ok}


def _json(*command: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Output of a command that prints one JSON document; its exit status may tell a miss."""
    whole = [sys.executable, "-m", *command]
    done = subprocess.run(whole, stdout=subprocess.PIPE, text=True, check=False, env=env)
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} and printed nothing")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def crash() -> Iterator[Row]:
    """SIGKILL a writer again and again; half of the kills also tear the journal."""
    kills = _count(_KILLS)
    for tear in (False, True):
        with tempfile.TemporaryDirectory(prefix="tierkv-crash-") as folder:
            report: CrashReport = run_crashes(Path(folder), kills, seed=1, tear=tear)
        name = f"{kills} kills, {'torn journals' if tear else 'intact journals'}"
        ok = report.flushed > 0 and report.hits == report.flushed
        share = report.hits / max(report.flushed, 1)
        yield _row("crash", f"{name}: flushed parts that hit", share, "1", ok=ok)
        yield _row(
            "crash",
            f"{name}: problems (wrong bytes, du)",
            len(report.problems),
            "0",
            ok=not report.problems,
        )


def overhead() -> Iterator[Row]:
    """CPU and memory of decisions without payload, up to a million blocks."""
    for row in _json("benchmarks.overhead", "--json")["rows"]:
        what = f"{row['check']} at {row['blocks']}"
        yield _row("overhead", what, row["value"], f"<= {row['limit']}", ok=row["ok"])


def sync() -> Iterator[Row]:
    """CacheManager with 32 threads against the async engine with 32 tasks."""
    for row in _json("benchmarks.sync", "--json")["rows"]:
        yield _row("sync", str(row["turn"]), row["ratio"], ">= 0.8", ok=row["ratio"] >= 0.8)


def ttft() -> Iterator[Row]:
    """Restored first token against the model handed its own in-memory cache."""
    for row in _json("benchmarks.ttft", "--json")["rows"]:
        long = row["prompt_tokens"] >= 1024
        ratio = row["ratio_to_in_memory"]
        bound = "<= 1.5" if long else "-"
        yield _row(
            "ttft", f"{row['prompt_tokens']} tokens", ratio, bound, ok=not long or ratio <= 1.5
        )


def demo() -> Iterator[Row]:
    """The README's command: identical replies, and how much sooner they begin."""
    document = _json("tierkv", "demo", "--json")
    totals, again = document["totals"], document["restart"]
    same = totals["identical"] and all(turn["identical"] for turn in document["turns"])
    yield _row("demo", "identical", float(same), "1", ok=bool(same))
    median = totals["ttft_ratio_median"]
    yield _row("demo", "ttft_ratio_median", median, "<= 0.25", ok=median <= 0.25)
    share = again["reused_tokens"] / again["prompt_tokens"]
    yield _row("demo", "reused after the restart", share, ">= 0.9", ok=share >= 0.9)
    yield _row(
        "demo", "identical after the restart", float(again["identical"]), "1", ok=again["identical"]
    )


def faults() -> Iterator[Row]:
    """Cancelled calls, a failing backend, SIGKILLs, and opening 100,000 blocks again."""
    from benchmarks.faults import KINDS, cancels

    # the full count on each backend
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="tierkv-faults-") as folder:
            found = cancels(kind, Path(folder), _count(_CANCELS), seed=1)
        calls = sum(found.calls.values())
        what = f"{kind}: {found.cancels} cancels in {calls} calls, {found.hung} hung: problems"
        _tell(found.problems)
        yield _row("faults", what, len(found.problems), "0", ok=not found.problems)
        yield _row(
            "faults",
            f"{kind}: wrong or late bytes",
            found.wrong + found.late,
            "0",
            ok=not found.wrong + found.late,
        )
    yield from _storms()
    yield from crash()
    yield from _reopen(_count(_REOPENED))


def _tell(problems: Sequence[str]) -> None:
    for problem in problems:
        print(problem, file=sys.stderr)


def _storms() -> Iterator[Row]:
    import asyncio

    from tierkv.testing.storm import storm

    for kind in ("nvme", "file"):
        with tempfile.TemporaryDirectory(prefix="tierkv-storm-") as folder:
            seconds = max(1.0, _STORM_S * _scale())
            found = asyncio.run(storm(Path(folder), seconds=seconds, share=0.1, seed=1, kind=kind))
        _tell(found.problems)
        failed = sum(found.injected.values())
        what = f"{kind}: {seconds:g} s, {failed} batches of a tenth went wrong, {found.loads} loads"
        yield _row("faults", f"{what}: problems", len(found.problems), "0", ok=not found.problems)
        yield _row("faults", f"{kind}: wrong bytes", found.wrong, "0", ok=not found.wrong)
        ok = failed > 0 and sum(found.counted.values()) > 0
        yield _row("faults", f"{kind}: counted", sum(found.counted.values()), "> 0", ok=ok)


def _reopen(blocks: int) -> Iterator[Row]:
    """Fill a tier with small blocks, close it, measure opening it again."""
    import asyncio
    import time

    import torch

    import tierkv

    size = 4
    layout = tierkv.Layout.uniform(1, 1, 8, "float16")
    space = tierkv.Space(tierkv.Identity("reopen", "1"), layout, block_tokens=size)
    ids = [n % 50_000 for n in range(blocks * size)]
    kv = [(torch.zeros(1, len(ids), 8, dtype=torch.float16),) * 2]

    async def run(folder: str) -> tuple[int, float, float]:
        tiers = [tierkv.Tier("nvme", blocks * 12 * 1024 + (64 << 20), path=folder)]
        async with (
            tierkv.open(tiers=tiers, space=space, close_timeout=120) as engine,
            engine.session("fill") as session,
        ):
            stored = await session.store(ids, tierkv.views.dense(kv))
            assert stored.stored == blocks, stored.skipped
            await session.flush()
        wall, cpu = time.perf_counter(), time.process_time()
        engine = tierkv.open(tiers=tiers, space=space, close_timeout=120)
        await engine.start()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        try:
            async with engine.session("look") as session, session.match(ids) as match:
                return match.tokens // size, wall, cpu
        finally:
            await engine.aclose()

    with tempfile.TemporaryDirectory(prefix="tierkv-reopen-") as folder:
        found, wall, cpu = asyncio.run(run(folder))
    what = f"reopen of {blocks} blocks"
    yield _row("faults", f"{what}: share that hits", found / blocks, "1", ok=found == blocks)
    bound = _REOPEN_CPU_S
    yield _row("faults", f"{what}: CPU s", cpu, f"<= {bound}", ok=cpu <= bound)
    yield _row("faults", f"{what}: wall s", wall, "-", ok=True)


def nvme() -> Iterator[Row]:
    """The nvme tier against raw O_DIRECT; nothing may be buffered where a raw probe works."""
    from benchmarks import disk

    with tempfile.TemporaryDirectory(prefix="tierkv-direct-") as folder:
        works = disk.direct_works(folder)
    yield _row("nvme", "O_DIRECT works in the temporary directory", float(works), "-", ok=True)
    for row in disk.rows():
        what, ratio = f"{row['op']}, {row['mib']} MiB", float(row["ratio_to_odirect"] or 0)
        yield _row("nvme", f"{what}: of raw O_DIRECT", ratio, ">= 0.85", ok=ratio >= 0.85)
        buffered = float(row["buffered_bytes"] or 0)
        yield _row("nvme", f"{what}: bytes buffered", buffered, "0", ok=not buffered)


def device() -> Iterator[Row]:
    """Every device path: on the GPU if there is one, and on the stand-in."""
    for name in ("cuda", "cpu"):
        for row in _json("benchmarks.gpu_check", "--json", "--device", name)["rows"]:
            value = row["value"] if isinstance(row["value"], float | int) else float(row["ok"])
            yield _row("device", f"{name}: {row['what']}", value, str(row["bound"]), ok=row["ok"])


def datapath() -> Iterator[Row]:
    """Bytes through the engine against memcpy and raw O_DIRECT."""
    for row in _json("benchmarks.datapath", "--json")["rows"]:
        ratio = row.get("ratio_to_memcpy") or row.get("ratio_to_odirect")
        what = f"{row['op']}, {row['mib']:g} MiB x {row['frames']}"
        bound = "-" if row["bound"] is None else f">= {row['bound']}"
        yield _row("datapath", what, ratio, bound, ok=row["ok"])


def peers() -> Iterator[Row]:
    """The same work on LMCache: ratios (above 1: we are ahead), and fault probes."""
    for row in _json("benchmarks.peers", "--json")["rows"]:
        if "probe" in row:
            what = f"probe {row['probe']}: {row['tierkv']}, lmcache {row['lmcache']}"
            yield _row("peers", what, float(row["ok"]), "1", ok=row["ok"])
            continue
        bound = "-" if row["bound"] is None else f">= {row['bound']}"
        ratio = row["tierkv"] if row["ratio"] is None else row["ratio"]
        yield _row("peers", row["op"], ratio, bound, ok=row["ok"])


def pipeline() -> Iterator[Row]:
    """Overlap of stages in virtual time, and time to first token layer by layer."""
    for row in _json("benchmarks.pipeline", "--json")["rows"]:
        virtual = "ratio_to_ideal" in row
        ratio = row["ratio_to_ideal"] if virtual else row["ratio"]
        bound = "<= 1.10" if virtual else "<= 0.75"
        yield _row("pipeline", f"{row['what']}, {row['tokens']} tokens", ratio, bound, ok=row["ok"])


def replay() -> Iterator[Row]:
    """Hits, prefetch and speed of the decisions on public traces, against their bounds."""
    for row in _json("benchmarks.replay", "--json")["rows"]:
        sign = "<=" if row["bound"] == "max" else ">="
        bound = "-" if row["limit"] is None else f"{sign} {row['limit']}"
        yield _row("replay", f"{row['trace']}: {row['check']}", row["value"], bound, ok=row["ok"])


def policies() -> Iterator[Row]:
    """Accesses a second of each eviction policy in a plain cache."""
    for row in _json("benchmarks.policies", "--json")["rows"]:
        bound = "-" if row["limit"] is None else f">= {row['limit']:.0f}"
        yield _row("policies", row["policy"], row["accesses_per_cpu_s"], bound, ok=row["ok"])


def prefetch() -> Iterator[Row]:
    """What each predictor saves on the workload that it is for, and where it turns itself off."""
    for row in _json("benchmarks.prefetch", "--json")["rows"]:
        what = f"{row['workload']}: {row['predictor']}, stall against none"
        yield _row("prefetch", what, row["stall_ratio"], "-", ok=row["ok"])


def compression() -> Iterator[Row]:
    """Blocks that a full tier keeps under rules of compression, and memory left allocatable."""
    for row in _json("benchmarks.compression", "--json")["rows"]:
        bound = "-" if row["floor"] is None else f">= {row['floor']}"
        value = row["value"] if row["ratio"] is None else row["ratio"]
        yield _row("compression", f"{row['what']}, {row['about']}", value, bound, ok=row["ok"])


def vllm() -> Iterator[Row]:
    """Real vLLM on this CPU: the tests with it, and our connector beside its own."""
    from benchmarks.vllm.install import ensure_python
    from benchmarks.vllm.processes import environment

    try:
        python = str(ensure_python())
    except RuntimeError as error:
        raise SystemExit(f"vllm: {error}") from error
    named = environment({"TIERKV_VLLM_PYTHON": python, "TIERKV_SCALE": str(_scale())})
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=3600", *_VLLM_TESTS]
    done = subprocess.run(tests, stdout=sys.stderr, check=False, env=named)
    yield _row(
        "vllm", f"pytest {' '.join(_VLLM_TESTS)}", done.returncode, "0", ok=done.returncode == 0
    )
    rounds = str(_count(_VLLM_ROUNDS))
    env = os.environ | {"TIERKV_VLLM_PYTHON": python}
    for row in _json("benchmarks.vllm", "--json", "--rounds", rounds, env=env)["rows"]:
        what = f"{row['connector']}, {row['prompt_tokens']} tokens"
        yield _row("vllm", f"{what}: CPU of plain", row["cpu_ratio"], "-", ok=row["ok"])
        yield _row("vllm", f"{what}: hit after restart", row["restart_hit"], "-", ok=row["ok"])


def stress() -> Iterator[Row]:
    """The stress tests, in full counts."""
    environment = {"TIERKV_SCALE": str(_scale()), **os.environ}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "stress", "--timeout=3600", *_STRESS]
    done = subprocess.run(command, stdout=sys.stderr, check=False, env=environment)
    yield _row("stress", "pytest -m stress", done.returncode, "0", ok=done.returncode == 0)


CHECKS: dict[str, Callable[[], Iterator[Row]]] = {
    check.__name__: check
    for check in (
        *(crash, overhead, sync, ttft, demo),
        *(faults, nvme, device, datapath, peers, pipeline),
        *(replay, policies, prefetch, compression, vllm, stress),
    )
}


ABOUT: Final = About(
    measures="every promise of the project that can be measured, in full counts",
    against="the bound of each, which stands in its row; most checks are the other benchmarks here",
    floors="all of them; exit status 1 if one is missed",
    takes="hours in all: crash, faults, stress, vllm and peers most of it; name the checks that "
    "you want (--list), or set TIERKV_SCALE=0.05",
    needs="the extras demo and test; vLLM, LMCache and traces each for one check",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("acceptance", __doc__, ABOUT)
    parser.add_argument("names", nargs="*", metavar="name", help="checks to run; default: all")
    parser.add_argument("--list", action="store_true", help="name the checks and stop")
    options = parser.parse_args(argv)
    if options.list:
        for name, check in CHECKS.items():
            print(f"{name:12} {check.__doc__}")
        return 0
    unknown = sorted(set(options.names) - set(CHECKS))
    if unknown:
        parser.error(f"unknown check {unknown[0]!r}; one of {', '.join(CHECKS)}")
    rows = [row for name in options.names or CHECKS for row in CHECKS[name]()]
    emit("acceptance", rows, options.json)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
