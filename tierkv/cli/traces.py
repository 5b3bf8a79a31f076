"""The command ``tierkv trace``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.cli.options import (
    DEFAULT_BYTES,
    BlockTokens,
    BytesPerToken,
    File,
    Format,
    Json,
    opened,
)
from tierkv.cli.printing import print_json
from tierkv.errors import ConfigError
from tierkv.outputs import check_output
from tierkv.traces import Trace, write_trace
from tierkv.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["trace_app"]

_TELL_EVERY: Final = 1000

trace_app = typer.Typer(
    help="Workload traces: who asked for which blocks, when.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@trace_app.command("info")
def _info(
    file: File,
    form: Format = None,
    block_tokens: BlockTokens = None,
    bytes_per_token: BytesPerToken = DEFAULT_BYTES,
    as_json: Json = False,
) -> None:
    """Tell what is in a trace: how much, of whom, how often again."""
    trace = opened(file, form, block_tokens, bytes_per_token)
    with _reading(file, quiet=as_json) as told:
        facts = _facts(trace, told)
    if as_json:
        print_json(facts)
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
    file: File,
    target: Annotated[Path, typer.Argument(help="Where to; .zst compresses.")],
    form: Format = None,
    block_tokens: BlockTokens = None,
    bytes_per_token: BytesPerToken = DEFAULT_BYTES,
) -> None:
    """Write a trace of any known format in the project's own."""
    if target.exists() and target.samefile(file):
        raise ConfigError(f"{target} is the trace itself; write to another file")
    count = write_trace(str(target), opened(file, form, block_tokens, bytes_per_token))
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
    check_output("FILE", file)
    environment = os.environ | {"TIERKV_TRACE": str(file.absolute())}
    before = _state(file)
    try:
        code = _run(command, environment)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}") from error
    if _state(file) in (None, before):
        print("no engine recorded: was one opened, with no trace of its own?", file=sys.stderr)
        raise typer.Exit(code or 1)
    print(f"recorded: {file} ({format_bytes(file.stat().st_size)})", file=sys.stderr)
    raise typer.Exit(code if code >= 0 else 128 - code)


def _state(file: Path) -> tuple[int, ...] | None:
    """What is different once somebody wrote to the file; None: it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Exit code of a command, once it has ended; Ctrl-C is its own affair, as it hears it too."""
    # it may have much to put away, the trace itself among it; exec gives it its own handler back
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
