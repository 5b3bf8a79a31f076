"""The acceptance lane: every measured promise, in full counts, against its bound.

Run ``python -m benchmarks.acceptance [name ...] [--json]``; ``--list`` names the checks. It takes
many minutes: run it for large changes and for releases. Exit status 1 if a bound is missed.
``TIERKV_SCALE`` scales the counts of repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import emit
from tierkv.testing.crash import CrashReport, run_crashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.report import Cell

_KILLS = 50
_STRESS = ("tests/engine", "tests/decisions", "tests/backends", "tests/identity")
Row = dict[str, "Cell"]


def _scale() -> float:
    return float(os.environ.get("TIERKV_SCALE", "1"))


def _row(check: str, what: str, value: float, bound: str, *, ok: bool) -> Row:
    return {"check": check, "what": what, "value": value, "bound": bound, "ok": ok}


def _json(*command: str) -> dict[str, Any]:
    """Output of a command that prints one JSON document; its exit status may tell a miss."""
    done = subprocess.run(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} and printed nothing")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def crash() -> Iterator[Row]:
    """SIGKILL a writer again and again; half of the kills also tear the journal."""
    kills = max(1, round(_KILLS * _scale()))
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


def stress() -> Iterator[Row]:
    """The stress tests, in full counts."""
    environment = {"TIERKV_SCALE": str(_scale()), **os.environ}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "stress", "--timeout=3600", *_STRESS]
    done = subprocess.run(command, stdout=sys.stderr, check=False, env=environment)
    yield _row("stress", "pytest -m stress", done.returncode, "0", ok=done.returncode == 0)


CHECKS: dict[str, Callable[[], Iterator[Row]]] = {
    check.__name__: check for check in (crash, overhead, sync, ttft, demo, stress)
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.acceptance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="checks to run; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="name the checks and stop")
    options = parser.parse_args(argv)
    if options.list:
        for name, check in CHECKS.items():
            print(f"{name:10} {check.__doc__}")
        return 0
    unknown = sorted(set(options.names) - set(CHECKS))
    if unknown:
        parser.error(f"unknown check {unknown[0]!r}; one of {', '.join(CHECKS)}")
    rows = [row for name in options.names or CHECKS for row in CHECKS[name]()]
    emit("acceptance", rows, options.json)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
