"""The commands ``tierkv trace`` and ``tierkv replay``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.errors import ConfigError
from tierkv.replay import CostModel, Setup, belady, replay, replay_log
from tierkv.traces import BYTES_PER_TOKEN, FORMATS, Trace, open_trace, write_trace
from tierkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierkv.replay import Report

__all__ = ["replay_command", "trace_app"]

SCHEMA_VERSION: Final = 1
_TELL_EVERY: Final = 1000

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Form = Annotated[
    str | None, typer.Option("--format", help=f"Format ({', '.join(FORMATS)}) if not told by FILE.")
]
_Block = Annotated[
    int | None, typer.Option("--block-tokens", help="Tokens a block, for azure and weka traces.")
]
_PerToken = Annotated[
    str, typer.Option("--bytes-per-token", help="Bytes of KV a token, if FILE does not tell.")
]
_File = Annotated[Path, typer.Argument(help="Trace file of any known format.", show_default=False)]

trace_app = typer.Typer(
    help="Workload traces: who asked for which blocks, when.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _open(path: Path, form: str | None, block: int | None, per_token: str) -> Trace:
    return open_trace(path, form=form, block_tokens=block, bytes_per_token=parse_bytes(per_token))


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION} | result, indent=2))


# --------------------------------------------------------------------------- tierkv trace


@trace_app.command("info")
def _info(
    file: _File,
    form: _Form = None,
    block_tokens: _Block = None,
    bytes_per_token: _PerToken = str(BYTES_PER_TOKEN),
    as_json: _Json = False,
) -> None:
    """Tell what is in a trace: how much, of whom, how often again."""
    trace = _open(file, form, block_tokens, bytes_per_token)
    with _reading(file, quiet=as_json) as told:
        facts = _facts(trace, told)
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")


@contextmanager
def _reading(file: Path, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """How far it is, on stderr, for people at a terminal: a large trace takes minutes."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet)
    with console.status(f"reading {file.name}") as status:
        yield lambda done: status.update(f"reading {file.name}: {done:,} requests")


def _facts(trace: Trace, told: Callable[[int], None]) -> dict[str, Any]:
    blocks = tokens = outputs = requests = hits = again = 0
    first = last = 0.0
    seen: set[int] = set()
    sessions: set[tuple[str, str]] = set()
    reasons: dict[str, int] = {}
    for request in trace:
        first = request.time if not requests else first
        last = request.time
        requests += 1
        if requests % _TELL_EVERY == 0:
            told(requests)
        blocks += len(request.keys)
        tokens += request.tokens
        outputs += request.output_tokens
        found = next((i for i, k in enumerate(request.keys) if k not in seen), len(request.keys))
        hits += found
        again += min(found * request.block_tokens, request.tokens)
        seen.update(request.keys, request.reply_keys)
        sessions.add((request.tenant, request.session))
        if request.stop_reason is not None:
            reasons[request.stop_reason] = reasons.get(request.stop_reason, 0) + 1
    header = trace.header
    return {
        "origin": header.origin,
        "block_tokens": header.block_tokens,
        "bytes_per_token": header.bytes_per_token,
        "requests": requests,
        "lost_requests": trace.lost,
        "sessions": len(sessions),
        "seconds": round(last - first, 3),
        "blocks": blocks,
        "different_blocks": len(seen),
        "different_bytes": format_bytes(len(seen) * header.block_tokens * header.bytes_per_token),
        "prompt_tokens": tokens,
        "output_tokens": outputs,
        "block_hit_ratio_at_most": hits / max(blocks, 1),
        "token_hit_ratio_at_most": again / max(tokens, 1),
        "stop_reasons": reasons,
    }


@trace_app.command("convert")
def _convert(
    file: _File,
    target: Annotated[Path, typer.Argument(help="Where to; .zst compresses.")],
    form: _Form = None,
    block_tokens: _Block = None,
    bytes_per_token: _PerToken = str(BYTES_PER_TOKEN),
) -> None:
    """Write a trace of any known format in the project's own."""
    if target.exists() and target.samefile(file):
        raise ConfigError(f"{target} is the trace itself; write to another file")
    count = write_trace(str(target), _open(file, form, block_tokens, bytes_per_token))
    print(f"{count} requests, {format_bytes(target.stat().st_size)}: {target}")


@trace_app.command(
    "record",
    context_settings={  # what follows FILE is the command's own
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
)
def _record(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Where to; .jsonl.zst is best.")],
) -> None:
    """Run a command whose engine records, as in: tierkv trace record FILE -- python server.py.

    The engine takes the file from TIERKV_TRACE, unless its own settings name one; one engine at a
    time can write to a file. Exits with the command's own code.
    """
    command = context.args[1:] if context.args[:1] == ["--"] else context.args
    if not command:
        raise ConfigError("what is to be run? e.g. tierkv trace record FILE -- python server.py")
    environment = os.environ | {"TIERKV_TRACE": str(file.absolute())}
    try:
        code = _run(command, environment)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}") from error
    if not file.exists():
        print("no engine recorded: was one opened, with no trace of its own?", file=sys.stderr)
        raise typer.Exit(code or 1)
    print(f"recorded: {file} ({format_bytes(file.stat().st_size)})", file=sys.stderr)
    raise typer.Exit(code if code >= 0 else 128 - code)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Exit code of a command, once it has ended; Ctrl-C is its own affair, as it hears it too."""
    # it may have much to put away, the trace itself among it; exec gives it its own handler back
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------- tierkv replay


def replay_command(
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
    bandwidth: Annotated[str, typer.Option(help="Bytes a second out of slower tiers.")] = "5GB",
    prefill: Annotated[float, typer.Option(help="Tokens a second that are computed.")] = 40_000.0,
    overlap: Annotated[bool, typer.Option(help="Load while computing, layer by layer.")] = True,
    gap: Annotated[bool, typer.Option(help="Also LRU and Belady, for gap_closed.")] = True,
    form: _Form = None,
    block_tokens: _Block = None,
    bytes_per_token: _PerToken = str(BYTES_PER_TOKEN),
    decision_log: Annotated[
        Path | None, typer.Option(help="Check a decision log, byte for byte, instead.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration that wrote the log, if it does not tell.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Run a workload trace through the decisions of an engine, offline.

    One row for each policy. Capacities name one tier or several: --capacity-blocks 5859,inf
    """
    if decision_log is not None:
        _check_log(decision_log, config, as_json)
        return
    if file is None:
        raise ConfigError("name a trace file, or --decision-log FILE")
    _check_options(capacity_blocks, capacity, prefetch, prefetch_budget)
    setup = Setup(
        capacity_blocks=_blocks(capacity_blocks),
        capacity_bytes=_bytes(capacity),
        admission=admission,
        prefetch=prefetch,
        prefetch_budget=prefetch_budget,
        hints=hints,
        touch_order=touch_order,
        model=CostModel(float(parse_bytes(bandwidth)), prefill, overlap=overlap),
    )
    trace = _loaded(_open(file, form, block_tokens, bytes_per_token), setup)
    rows = _rows(trace, setup, [name.strip() for name in policy.split(",")], gap=gap)
    if as_json:
        _print_json({"trace": trace.header.origin, "rows": rows})
    else:
        _print_rows(rows)


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
    return trace.loaded()


def _blocks(text: str | None) -> list[int | None] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word == "inf" or word.isdecimal() for word in words):
        raise ConfigError(f"--capacity-blocks takes numbers or 'inf', not {text!r}")
    return [None if word == "inf" else int(word) for word in words]


def _bytes(text: str | None) -> list[str | None] | None:
    if text is None:
        return None
    return [None if word.strip() == "inf" else word for word in text.split(",")]


def _rows(
    trace: Trace, setup: Setup, policies: Sequence[str], *, gap: bool
) -> list[dict[str, Any]]:
    """One replay a policy; with the gap closed where one finite tier makes a bound."""
    blocks = _first_blocks(trace, setup)
    reports: dict[str, Report] = {
        name: replay(trace, replace(setup, policy=name)) for name in dict.fromkeys(policies)
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


def _check_log(path: Path, config: Path | None, as_json: bool) -> None:
    """Replay a decision log; exit with 1 where it does not come out as it is."""
    try:
        with path.open("rb") as lines:
            if config is None:
                report = replay_log(lines)
            else:
                report = replay_log(lines, lambda header: _configured(config))
    except OSError as error:
        raise ConfigError(f"--decision-log {path}: {error.strerror}") from error
    found = {
        "same": report.same,
        "runs": report.runs,
        "lines": report.lines,
        "line": report.line,
        "expected": report.expected.decode(errors="replace"),
        "got": report.got.decode(errors="replace"),
    }
    if as_json:
        _print_json(found)
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
