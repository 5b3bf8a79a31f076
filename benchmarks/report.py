"""How benchmarks measure and report: interleaved pairs, medians, quartiles, one JSON layout.

And what they say of themselves: ``--help`` of all of them has the same five lines.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SCHEMA_VERSION", "About", "Paired", "Spread", "arguments", "emit", "paired", "spread"]

SCHEMA_VERSION = 1
_WIDTH: Final = 96
_INDENT: Final = 10
Cell = str | int | float | bool | None


class About(NamedTuple):
    """What somebody wants to know of a benchmark before running it.

    Attributes:
        measures: What is measured.
        against: Beside what, in the same run.
        floors: Which promises are checked, and what a missed one does to the exit status.
        takes: How long it takes on two cores, and what makes that less.
        needs: What has to be there beyond the package and its core dependencies.
    """

    measures: str
    against: str
    floors: str
    takes: str
    needs: str = "nothing else"


def arguments(name: str, doc: str | None, about: About) -> argparse.ArgumentParser:
    """The command line of a benchmark, with ``--json``; ``--help`` tells what it is about.

    Args:
        name: Name of the module in ``benchmarks``.
        doc: Its docstring: the first line heads the help, the rest explains columns at its end.
        about: The lines between.
    """
    title, _, details = _plain(doc or "").strip().partition("\n")
    told = [
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=f"{what:{_INDENT}}",
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
        )
        for what, text in about._asdict().items()
    ]
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description="\n".join([title, "", *told]),
        epilog=details.strip() or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _plain(doc: str) -> str:
    """A docstring without its markup."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"\1", doc).replace("``", "")


class Spread(NamedTuple):
    """Median and quartiles of one quantity."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of measured values."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


class Paired(NamedTuple):
    """Two things measured in turns, in seconds; ``ratio`` is a / b, pair by pair.

    Attributes:
        a: Wall time of the first.
        b: Wall time of the second.
        ratio: Wall time ratio.
        cpu_a: CPU time of the first, all threads.
        cpu_b: CPU time of the second.
        cpu_ratio: CPU time ratio.
    """

    a: Spread
    b: Spread
    ratio: Spread
    cpu_a: Spread
    cpu_b: Spread
    cpu_ratio: Spread


def _timed(fn: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    fn()
    return time.perf_counter() - wall, time.process_time() - cpu


def paired(fa: Callable[[], object], fb: Callable[[], object], repeats: int) -> Paired:
    """Time ``fa`` and ``fb`` in turns, so that a busy machine slows both alike.

    Args:
        fa: First thing to run.
        fb: Second thing to run.
        repeats: Pairs; the order inside a pair alternates. One more pair warms up.
    """
    fa()
    fb()
    rows: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number in range(repeats):
        if number % 2:
            second = _timed(fb)
            first = _timed(fa)
        else:
            first = _timed(fa)
            second = _timed(fb)
        rows.append((first, second))
    tiny = 1e-9  # a clock may not see a very short run
    return Paired(
        spread([a[0] for a, _ in rows]),
        spread([b[0] for _, b in rows]),
        spread([a[0] / max(b[0], tiny) for a, b in rows]),
        spread([a[1] for a, _ in rows]),
        spread([b[1] for _, b in rows]),
        spread([a[1] / max(b[1], tiny) for a, b in rows]),
    )


def emit(name: str, rows: Sequence[Mapping[str, Cell]], json_flag: bool) -> None:
    """Print the result of a benchmark: one JSON document, or a table for people.

    Args:
        name: Name of the benchmark.
        rows: One mapping a line; all have the same keys.
        json_flag: Whether to print JSON.
    """
    if json_flag:
        document = {"schema_version": SCHEMA_VERSION, "benchmark": name, "rows": list(rows)}
        json.dump(document, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    # without a terminal rich assumes 80 columns, and crops
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
