"""The command ``tierkv``.

Results go to stdout, logs to stderr. ``--json`` output carries a ``schema_version`` and stays
stable. Exit codes: 0 fine, 1 a finding or a failure, 2 the command cannot be run as it stands
(wrong usage or configuration, an extra or a download is missing), 130 Ctrl-C, 141 the reader of
the output has left.
Commands of later modules are rows of a table; their modules load when they run, so ``--help``
stays quick and needs no optional library.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO, get_args

import typer

import tierkv
from tierkv import config as configuration
from tierkv import jit, registry
from tierkv.cli.printing import print_json
from tierkv.errors import ConfigError, MissingDependencyError, TierKVError, TraceError
from tierkv.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["COMMANDS", "LazyCommand", "app", "main"]

_log: Final = logging.getLogger("tierkv.cli")
_SIGPIPE: Final = 141  # what a shell reports of a program that the signal has ended
_SECRET: Final = re.compile(r"pass(word|phrase)?|secret|token|credential|(^|_)key", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command whose module is imported when it runs.

    Attributes:
        name: Name on the command line.
        target: ``"module:attribute"`` of a ``typer.Typer`` or of a function that typer can wrap.
        help: One line for ``tierkv --help``.
        hint: What to do if the module cannot be imported.
    """

    name: str
    target: str
    help: str
    hint: str


COMMANDS: Final = (
    LazyCommand(
        "demo",
        "tierkv_adapters.hf.demo:demo",
        "Chat with a small real model, cold and returning.",
        "pip install -c constraints.txt -e '.[demo]'",
    ),
    LazyCommand(
        "codec-report",
        "tierkv_adapters.hf.report:codec_report",
        "Measure codec chains on a model's own KV.",
        "pip install -c constraints.txt -e '.[demo]'",
    ),
    LazyCommand(
        "replay",
        "tierkv.cli.replays:replay_command",
        "Run a workload trace through the decisions, offline.",
        "reinstall the package with its dependencies: pip install -e .",
    ),
    LazyCommand(
        "sweep",
        "tierkv.cli.tuning:sweep_command",
        "Replay a workload trace at many sizes; find the cheapest.",
        "reinstall the package with its dependencies: pip install -e .",
    ),
    LazyCommand(
        "tune",
        "tierkv.cli.tuning:tune_command",
        "Search for better settings on a workload trace.",
        "pip install -c constraints.txt -e '.[tune]'",
    ),
    LazyCommand(
        "trace",
        "tierkv.cli.traces:trace_app",
        "Look at, record and convert workload traces.",
        "reinstall the package with its dependencies: pip install -e .",
    ),
)

app = typer.Typer(
    name="tierkv",
    help="Keep the KV caches of language models in tiers: RAM, NVMe and further.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: quicker, and the same in a pipe
    pretty_exceptions_enable=False,
)
_config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
app.add_typer(_config_app, name="config")

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name; ``sys.argv`` by default.
    """
    code: int | str | None = 0
    stdout = sys.stdout
    try:
        try:
            app(args=list(sys.argv[1:] if argv is None else argv), prog_name="tierkv")
        except SystemExit as stop:
            code = stop.code
        if sys.stdout is not stdout:  # typer met the broken pipe first, and silenced it
            return _SIGPIPE
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
        return _SIGPIPE
    except KeyboardInterrupt:
        return 130
    except (ConfigError, MissingDependencyError) as error:
        print(f"tierkv: {error}", file=sys.stderr)
        return 2
    except TierKVError as error:
        print(f"tierkv: {error}", file=sys.stderr)
        # a trace that cannot even be opened says nothing about itself: the command is wrong
        unread = isinstance(error, TraceError) and isinstance(error.__cause__, OSError)
        return 2 if unread else 1
    except OSError as error:  # e.g. the disk that the output goes to is full
        _log.debug("the command ended with an error of the system", exc_info=True)
        print(f"tierkv: {error}", file=sys.stderr)
        _silence(sys.stdout)
        return 1
    return code if isinstance(code, int) else int(code is not None)


def _silence(stream: TextIO) -> None:
    # what could not be written is still buffered: the interpreter would complain when it flushes
    with contextlib.suppress(OSError, ValueError):  # a stream of a test may have no descriptor
        target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, stream.fileno())
        os.close(target)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(tierkv.__version__)
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    level = logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s"
    )


@app.command("version")
def _version(as_json: _Json = False) -> None:
    """Print versions and the plug-ins that are known here, without importing any.

    Told as well is which of them can do nothing, because what they are for is not installed.
    """
    facts: dict[str, Any] = {
        "tierkv": tierkv.__version__,
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "machine_code": jit.host() is not None,
        "plugins": (plugins := {kind: registry.names(kind) for kind in get_args(registry.Kind)}),
        "not_installed": _not_installed(plugins),
    }
    if as_json:
        print_json(facts)
        return
    for name in ("tierkv", "python", "torch"):
        print(f"{name:12} {facts[name] or 'not installed'}")
    print("machine code", "on" if facts["machine_code"] else "off (it comes with the extra 'fast')")
    for kind, names in plugins.items():
        lacking = facts["not_installed"].get(kind, {})
        told = [f"{n} ({lacking[n]} is not installed)" if n in lacking else n for n in names]
        print(f"{kind:12} {' '.join(told) or '-'}")


def _not_installed(plugins: Mapping[registry.Kind, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Per kind, each plug-in that cannot be used here, and the library that it is for."""
    pairs = [(k, n, registry.lacks(k, n)) for k, names in plugins.items() for n in names]
    found: dict[str, dict[str, str]] = {}
    for kind, name, library in pairs:
        if library is not None:
            found.setdefault(kind, {})[name] = library
    return found


@_config_app.command("show")
def _config_show(
    file: Annotated[Path | None, typer.Argument(help="TOML file; without it, the rest.")] = None,
    sources: Annotated[bool, typer.Option("--sources", help="Say where each came from.")] = False,
    as_json: _Json = False,
) -> None:
    """Print every setting as it resolves: defaults < FILE < environment TIERKV_*.

    What an engine could not be opened with is an error here too; nothing is opened.
    """
    config, origins = configuration.load_config(file)
    try:
        _check_as_open_does(config)
    except ConfigError as error:
        raise ConfigError(f"{file or 'configuration'}: {error}") from error
    plain = _masked(configuration.to_plain(config, unset=True))
    if as_json:
        print_json({"config": plain} | ({"sources": origins} if sources else {}))
        return
    for name, value in _rows(plain):
        origin = _origin(name, origins)
        shown = f"{name} is unset" if value is None else f"{name} = {json.dumps(value)}"
        print(shown + (f"  # {origin}" if sources else ""))
    total = format_bytes(sum(tier.capacity_bytes for tier in config.tiers))
    count = "1 tier" if len(config.tiers) == 1 else f"{len(config.tiers)} tiers"
    print(f"# {count}, {total} together, for each process", file=sys.stderr)


def _check_as_open_does(config: configuration.EngineConfig) -> None:
    # imported here: it loads torch, which no other command without a model needs
    from tierkv.engine.compose import make_decisions, make_levels
    from tierkv.engine.predicting import make_prefetching

    make_decisions(config, make_levels(config, None))
    make_prefetching(config)


def _rows(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _rows(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield from _rows(item, f"{path}[{index}]")
    else:
        yield path, value


def _origin(name: str, origins: dict[str, str]) -> str:
    # the longest known path that this one begins with: tiers[0].kind comes from where tiers does
    known = [key for key in origins if re.match(re.escape(key) + r"($|[.\[])", name)]
    return origins[max(known, key=len)] if known else "default"


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: "***" if _SECRET.search(name) and isinstance(item, str) else _masked(item)
            for name, item in value.items()
        }
    return [_masked(item) for item in value] if isinstance(value, list) else value


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _register(row: LazyCommand) -> None:
    @app.command(
        row.name,
        help=row.help,
        add_help_option=False,  # the real command has its own
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        found = registry.load(row.target, what=f"tierkv {row.name}", hint=row.hint)
        if not isinstance(found, typer.Typer):
            wrapped = typer.Typer(
                add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
            )
            wrapped.command(row.name)(found)
            found = wrapped
        try:
            found(args=list(context.args), prog_name=f"tierkv {row.name}")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


for _row in COMMANDS:
    _register(_row)
