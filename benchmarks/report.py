"""How benchmarks measure and report: interleaved pairs, medians, quartiles, one JSON layout."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SCHEMA_VERSION", "Paired", "Spread", "emit", "paired", "spread"]

SCHEMA_VERSION = 1
Cell = str | int | float | bool | None


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
