"""The command ``tierkv replay``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.cli.options import (
    DEFAULT_BYTES,
    Bandwidth,
    BlockTokens,
    BytesPerToken,
    Format,
    Json,
    Prefill,
    cost_model,
    opened,
    policies_of,
)
from tierkv.cli.printing import print_json
from tierkv.errors import ConfigError
from tierkv.replay import Setup, belady, replay, replay_log
from tierkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.replay import Report
    from tierkv.traces import Trace

__all__ = ["replay_command"]


def replay_command(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="Trace file of any known format.", show_default=False)
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction policies, with commas.")] = "lrfu",
    capacity_blocks: Annotated[
        str | None, typer.Option(help="Blocks of each tier, fastest first; 'inf'; with commas.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Sizes instead, e.g. '8GiB' or '8GiB,inf'.")
    ] = None,
    admission: Annotated[str, typer.Option(help="What may enter a tier.")] = "all",
    prefetch: Annotated[str, typer.Option(help="Predictors, with commas.")] = "",
    prefetch_budget: Annotated[
        str | None, typer.Option(help="Bytes a second that they may move, e.g. '1GiB'.")
    ] = None,
    hints: Annotated[bool, typer.Option(help="Tell the trace's stop reasons.")] = True,
    touch_order: Annotated[str, typer.Option(help="leaf_first or root_first.")] = "leaf_first",
    bandwidth: Bandwidth = "5GB",
    prefill: Prefill = 40_000.0,
    overlap: Annotated[bool, typer.Option(help="Load while computing, layer by layer.")] = True,
    gap: Annotated[bool, typer.Option(help="Also LRU and Belady, for gap_closed.")] = True,
    form: Format = None,
    block_tokens: BlockTokens = None,
    bytes_per_token: BytesPerToken = DEFAULT_BYTES,
    decision_log: Annotated[
        Path | None, typer.Option(help="Check a decision log, byte for byte, instead.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration that wrote the log, if it does not tell.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a workload trace through the decisions of an engine, offline.

    One row for each policy. Capacities name one tier or several: --capacity-blocks 5859,inf
    """
    if decision_log is not None:
        _check_log(context, decision_log, config, as_json)
        return
    path = _trace_only(file, config)
    _check_options(capacity_blocks, capacity, prefetch, prefetch_budget)
    setup = Setup(
        capacity_blocks=_blocks(capacity_blocks),
        capacity_bytes=_bytes(capacity),
        admission=admission,
        prefetch=prefetch,
        prefetch_budget=prefetch_budget,
        hints=hints,
        touch_order=touch_order,
        model=cost_model(bandwidth, prefill, overlap=overlap),
    )
    policies = policies_of(policy)
    trace = _loaded(opened(path, form, block_tokens, bytes_per_token), setup)
    rows = _rows(trace, setup, policies, gap=gap)
    if as_json:
        print_json({"trace": trace.header.origin, "rows": rows})
    else:
        _print_rows(rows)


def _trace_only(file: Path | None, config: Path | None) -> Path:
    """The trace file; refuse what belongs to a decision log."""
    if file is None:
        raise ConfigError("name a trace file, or --decision-log FILE")
    if config is not None:
        raise ConfigError("--config says what wrote a decision log: give --decision-log, too")
    return file


def _check_alone(context: typer.Context) -> None:
    """Refuse what says how a trace is replayed, where a decision log tells all of it."""
    for name in context.params:
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in ("decision_log", "config", "as_json"):
            said = "FILE" if name == "file" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"--decision-log takes --config and --json only: drop {said}")


def _check_options(
    blocks: str | None, sizes: str | None, predictors: str, budget: str | None
) -> None:
    """Refuse what is too little, and what would do nothing."""
    if (blocks is None) == (sizes is None):
        raise ConfigError("say how large the tiers are: --capacity-blocks or --capacity, not both")
    if predictors and "," not in (blocks or sizes or ""):
        raise ConfigError("--prefetch needs a slower tier to fetch from, e.g. --capacity 8GiB,inf")
    if budget is not None and not predictors:
        raise ConfigError("--prefetch-budget does nothing without --prefetch")


def _loaded(trace: Trace, setup: Setup) -> Trace:
    """The trace in memory, once each tier is known to hold a block of it."""
    block = trace.header.block_tokens * trace.header.bytes_per_token
    if 0 in setup.blocks(block):
        raise ConfigError(f"a tier holds no block: one takes {format_bytes(block)}")
    loaded = trace.loaded()
    if next(iter(loaded), None) is None:
        raise ConfigError(f"there are no requests in the trace ({trace.header.origin})")
    return loaded


def _blocks(text: str | None) -> list[int | None] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word == "inf" or word.isdecimal() for word in words):
        raise ConfigError(f"--capacity-blocks takes numbers or 'inf', not {text!r}")
    return [None if word == "inf" else int(word) for word in words]


def _bytes(text: str | None) -> list[int | str | None] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return [None if word == "inf" else parse_bytes(word, of="--capacity") for word in words]


def _rows(
    trace: Trace, setup: Setup, policies: Sequence[str], *, gap: bool
) -> list[dict[str, Any]]:
    """One replay a policy; with the gap closed where one finite tier makes a bound."""
    blocks = _first_blocks(trace, setup)
    reports: dict[str, Report] = {
        name: replay(trace, replace(setup, policy=name)) for name in policies
    }
    if gap and blocks is not None:
        plain = replace(setup, policy="lru", admission="all", prefetch="", hints=False)
        hinted = setup.hints and any(r.stop_reason or r.next_in is not None for r in trace)
        blind = setup.admission == "all" and not hinted
        lru = reports["lru"] if blind and "lru" in reports else replay(trace, plain)
        bound = belady(trace, blocks)
        reports = {name: report.against(lru, bound) for name, report in reports.items()}
    return [
        {"policy": name, "capacity_blocks": blocks} | report.to_plain()
        for name, report in reports.items()
    ]


def _first_blocks(trace: Trace, setup: Setup) -> int | None:
    """Blocks of a single tier; None where there are several: no bound is known for them."""
    header = trace.header
    blocks = setup.blocks(header.block_tokens * header.bytes_per_token)
    return blocks[0] if len(blocks) == 1 else None


_COLUMNS: Final = (
    ("policy", "policy"),
    ("token hits", "token_hit_ratio"),
    ("block hits", "block_hit_ratio"),
    ("fast tier", "fast_token_hit_ratio"),
    ("gap closed", "gap_closed"),
    ("demand loads", "demand_loads"),
    ("SSD written", "ssd_writes"),
    ("evicted too soon", "evicted_before_reuse"),
)


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title, _ in _COLUMNS:
        table.add_column(title, justify="left" if title == "policy" else "right")
    for title in ("stall s", "TTFT s", "p50", "p99"):
        table.add_column(title, justify="right")
    for row in rows:
        cells = [_cell(key, row[key]) for _, key in _COLUMNS]
        ttft = row["ttft"]
        times = [row["stall"]["total"], ttft["mean"], ttft["p50"], ttft["p99"]]
        table.add_row(*cells, *(f"{value:.4g}" for value in times))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for row in rows:
        for name, counts in row["prefetch"].items():
            told = ", ".join(f"{key} {value}" for key, value in counts.items() if key != "broken")
            print(f"{row['policy']}, {name}: {told}")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "ssd_writes":
        return format_bytes(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _check_log(context: typer.Context, path: Path, config: Path | None, as_json: bool) -> None:
    """Replay a decision log; exit with 1 where it does not come out as it is."""
    _check_alone(context)
    if config is not None:
        _configured(config)  # what is wrong with it is not the log's fault
    try:
        with path.open("rb") as lines:
            if config is None:
                report = replay_log(lines)
            else:
                report = replay_log(lines, lambda header: _configured(config))
    except OSError as error:
        raise ConfigError(f"--decision-log {path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"--decision-log {path}: {error}") from error
    found = {
        "same": report.same,
        "runs": report.runs,
        "lines": report.lines,
        "line": report.line,
        "expected": report.expected.decode(errors="replace"),
        "got": report.got.decode(errors="replace"),
    }
    if as_json:
        print_json(found)
    elif report.same:
        runs = "1 run" if report.runs == 1 else f"{report.runs} runs"
        print(f"{report.lines} lines of {runs} came out byte for byte")
    else:
        print(f"line {report.line} differs\nlog: {found['expected']}here: {found['got']}", end="")
        if config is None:
            print("the log names policies, not their options: if there were any, pass --config")
    if not report.same:
        raise typer.Exit(1)


def _configured(path: Path) -> Any:
    from tierkv.config import load_config
    from tierkv.engine.compose import make_decisions, make_levels

    config = load_config(path).config
    return make_decisions(config, make_levels(config, None))
