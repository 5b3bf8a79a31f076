"""The commands ``tierkv sweep`` and ``tierkv tune``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.errors import ConfigError
from tierkv.registry import factory, names
from tierkv.replay import CostModel, Setup
from tierkv.traces import BYTES_PER_TOKEN, FORMATS, open_trace
from tierkv.tuning import (
    OBJECTIVES,
    PRICES,
    Choices,
    Sweep,
    Tuned,
    settings_text,
    shipped,
    sweep,
    tune,
)
from tierkv.tuning.plotting import check_picture, plot
from tierkv.tuning.writing import FIRST_WORDS
from tierkv.units import format_bytes, parse_bytes, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tierkv.traces import Trace

__all__ = ["sweep_command", "tune_command"]

SCHEMA_VERSION: Final = 1
_ENDLESS: Final = ("inf", "unlimited")

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
_Price = Annotated[
    list[str] | None,
    typer.Option(
        help="Cost of a GiB, e.g. host=4; in any unit. Default: "
        + ", ".join(f"{name}={price:g}" for name, price in PRICES.items())
    ),
]
_Bandwidth = Annotated[str, typer.Option(help="Bytes a second out of slower tiers.")]
_Prefill = Annotated[float, typer.Option(help="Tokens a second that are computed.")]


def _prices(texts: list[str] | None, tiers: Collection[str]) -> dict[str, float]:
    prices = dict(PRICES)
    for text in texts or ():
        name, sign, value = text.partition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            sign = ""
        if not sign or not name or not prices[name] >= 0:
            raise ConfigError(f"--price {text!r}: want NAME=COST of a GiB, e.g. host=4")
        if name not in tiers and name not in PRICES:
            raise ConfigError(f"--price {text!r}: there is no such --tier ({', '.join(tiers)})")
    return prices


def _policies(text: str) -> list[str]:
    """Names of policies, each once; refused here, and not after the first of many replays."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in found:
        factory("policies", name)
    return found


def _sizes(texts: list[str], what: str) -> dict[str, list[int | None]]:
    """``NAME=SIZE,SIZE,...`` of each tier; None for one that never fills up."""
    found: dict[str, list[int | None]] = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        if not name or not sizes or name in found:
            raise ConfigError(f"{what} {text!r}: want NAME=SIZE, each tier once, e.g. host=8GiB")
        parts = [part.strip() for part in sizes.split(",")]
        each = [None if part in _ENDLESS else parse_bytes(part) for part in parts]
        found[name] = list(dict.fromkeys(each))
    return found


def _model(bandwidth: str, prefill: float) -> CostModel:
    return CostModel(bandwidth=float(parse_bytes(bandwidth)), prefill=prefill)


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar on stderr, for people at a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def told(done: int, total: int | None, text: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{what}{text}")

        yield told


def _check_target(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before anything is computed for it."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise ConfigError(f"{option}: {str(path)!r} is a directory; name a file")


def _check_targets(csv: Path | None, picture: Path | None) -> None:
    _check_target("--csv", csv)
    _check_target("--plot", picture)
    if picture is not None:
        check_picture(picture)


def _check_replaceable(out: Path) -> None:
    """Keep settings that somebody wrote: those of an earlier search may be replaced."""
    try:
        found = out.read_bytes()
    except OSError:
        return
    if found and not found.startswith(FIRST_WORDS.encode()):
        raise ConfigError(
            f"--out: {str(out)!r} is there and not from tierkv tune; name another file"
        )


def _write(path: Path, text: str) -> None:
    """Put a file in place as a whole, or leave what was there."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error


# --------------------------------------------------------------------------- sweep


def sweep_command(
    file: _File,
    tier: Annotated[
        list[str],
        typer.Option(help="Sizes of a tier, e.g. host=1GiB,4GiB,16GiB; fastest first; 0: none."),
    ],
    policy: Annotated[str, typer.Option(help="Eviction policies, with commas.")] = "lru,lrfu",
    sample: Annotated[float, typer.Option(help="Share of the blocks to look at.")] = 1.0,
    csv: Annotated[Path | None, typer.Option(help="Write the points as CSV.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw miss-ratio curves: .svg, .png or .pdf.")
    ] = None,
    reach_hit: Annotated[
        float, typer.Option(help="Find the cheapest that finds this share of tokens.", min=0, max=1)
    ] = 0.0,
    save_seconds: Annotated[
        float, typer.Option(help="Find the cheapest that saves so many seconds of prefill.", min=0)
    ] = 0.0,
    price: _Price = None,
    bandwidth: _Bandwidth = "5GB",
    prefill: _Prefill = 40_000.0,
    form: _Form = None,
    block_tokens: _Block = None,
    bytes_per_token: _PerToken = str(BYTES_PER_TOKEN),
    as_json: _Json = False,
) -> None:
    """Replay a trace at many sizes: miss-ratio curves, and the cheapest size that is enough.

    Exits with 1 if --reach-hit or --save-seconds is asked for and nothing reaches it. Ctrl-C ends
    it early: what was found is written, and the exit code is 130.
    """
    _check_targets(csv, picture)
    policies = _policies(policy)
    tiers = _sizes(tier, "--tier")
    prices = _prices(price, tiers)
    grid = _grid(tiers)
    trace = _opened(file, form, block_tokens, bytes_per_token)
    with _progress("replaying", quiet=as_json) as told:
        found = sweep(
            trace,
            grid,
            policies=policies,
            base=Setup(capacity_blocks=1, model=_model(bandwidth, prefill)),
            sample=sample,
            prices=prices,
            progress=lambda done, total: told(done, total, ""),
        )
    if csv is not None:
        _write(csv, found.csv())
    if picture is not None:
        plot(found, picture, trace.header.origin)
    wanted = reach_hit > 0 or save_seconds > 0
    best = found.cheapest(hit=reach_hit, saved_s=save_seconds) if wanted else None
    _print_sweep(found, None if best is None else str(best), wanted=wanted, as_json=as_json)
    if found.interrupted:
        raise typer.Exit(130)
    if wanted and best is None:
        raise typer.Exit(1)


def _grid(tiers: dict[str, list[int | None]]) -> list[dict[str, int]]:
    """Every combination of sizes."""
    grid: list[dict[str, int]] = [{}]
    for name, sizes in tiers.items():
        if None in sizes:
            raise ConfigError(f"--tier {name}: a sweep needs sizes; give the largest of interest")
        grid = [{**chosen, name: size or 0} for chosen in grid for size in sizes]
    return grid


def _opened(file: Path, form: str | None, block: int | None, per_token: str) -> Trace:
    size = parse_bytes(per_token)
    return open_trace(file, form=form, block_tokens=block, bytes_per_token=size).loaded()


def _print_sweep(found: Sweep, best: str | None, *, wanted: bool, as_json: bool) -> None:
    if as_json:
        result: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "rows": found.to_plain()}
        print(json.dumps(result | ({"cheapest": best} if wanted else {}), indent=2))
        return
    print(f"{'policy':12} {'tiers':36} {'token hits':>10} {'+-':>7} {'saved s':>10} {'cost':>10}")
    for point in found.points:
        sizes = " + ".join(f"{name} {format_bytes(n)}" for name, n in point.tiers.items())
        print(
            f"{point.policy:12} {sizes:36} {point.token_hit_ratio:10.4f} {point.error:7.4f} "
            f"{point.saved_s:10.1f} {point.cost:10.4g}"
        )
    if wanted:
        print(f"cheapest: {best or 'none of these reaches it'}")


# --------------------------------------------------------------------------- tune


def tune_command(
    file: _File,
    tier: Annotated[
        list[str],
        typer.Option(help="Size of a tier, e.g. host=8GiB; fastest first; inf: never full."),
    ],
    objective: Annotated[str, typer.Option(help=f"One of {', '.join(OBJECTIVES)}.")] = "ttft",
    budget: Annotated[str, typer.Option(help="Time to search, e.g. 5m.")] = "5m",
    trials: Annotated[int | None, typer.Option(help="Trials of this run, at most.", min=1)] = None,
    study: Annotated[
        Path | None, typer.Option(help="File that keeps the trials, to go on later.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Settings that were found.")] = Path("tierkv.toml"),
    path: Annotated[
        str, typer.Option(help="Directory of tiers on disk, in the settings.")
    ] = "/var/cache/tierkv/{worker}",
    policy: Annotated[
        str | None, typer.Option(help="Eviction policies to choose from, with commas.")
    ] = None,
    price: _Price = None,
    bandwidth: _Bandwidth = "5GB",
    prefill: _Prefill = 40_000.0,
    form: _Form = None,
    block_tokens: _Block = None,
    bytes_per_token: _PerToken = str(BYTES_PER_TOKEN),
    as_json: _Json = False,
) -> None:
    """Search for better settings on the first half of a trace, and judge them on the second.

    Ctrl-C ends the search early: what was found is kept, and the exit code is 130.
    """
    sizes = _sizes(tier, "--tier")
    if any(len(values) != 1 for values in sizes.values()):
        raise ConfigError("--tier: one size a tier; tierkv sweep compares sizes")
    _check_tiers(sizes)
    prices = _prices(price, sizes)
    _check_target("--out", out)
    _check_replaceable(out)
    _check_target("--study", study)
    choices = Choices() if policy is None else Choices(policies=tuple(_policies(policy)))
    trace = _opened(file, form, block_tokens, bytes_per_token)
    given = {name: values[0] for name, values in sizes.items()}
    with _progress("searching", quiet=as_json) as told:
        tuned = tune(
            trace,
            shipped(given, _model(bandwidth, prefill)),
            objective=objective,
            choices=choices,
            seconds=parse_duration(budget),
            trials=trials,
            study=study,
            prices=prices,
            on_end=partial(print, "judging what was found ...", file=sys.stderr),
            on_trial=lambda done, best: told(done, trials, f", best {best:.5g}"),
        )
    unlimited, origin = _bytes_of(trace), trace.header.origin
    _write(out, settings_text(tuned, path=path, unlimited=unlimited, origin=origin))
    _print_tuned(tuned, out, as_json=as_json)
    if tuned.interrupted:
        raise typer.Exit(130)


def _check_tiers(sizes: Mapping[str, Sequence[int | None]]) -> None:
    """Refuse tiers that no engine could open with the settings that come out."""
    known = names("backends")
    for name, values in sizes.items():
        if name not in known:
            raise ConfigError(f"--tier {name}: a tier is one of {', '.join(known)}")
        if 0 in values:
            raise ConfigError(f"--tier {name}: a tier needs bytes; leave it out instead")


def _bytes_of(trace: Trace) -> int:
    """Bytes of all its different blocks."""
    blocks = {key for request in trace for key in (*request.keys, *request.reply_keys)}
    return len(blocks) * trace.header.block_tokens * trace.header.bytes_per_token


def _print_tuned(tuned: Tuned, out: Path, *, as_json: bool) -> None:
    if as_json:
        pairs = {"train": tuned.train, "held_out": tuned.held_out}
        result = {
            "schema_version": SCHEMA_VERSION,
            "objective": tuned.objective,
            "trials": tuned.trials,
            "settings": asdict(tuned.setup),
            "gain": tuned.gain,
            "interrupted": tuned.interrupted,
            "file": str(out),
        } | {k: {"shipped": a.to_plain(), "tuned": b.to_plain()} for k, (a, b) in pairs.items()}
        print(json.dumps(result, indent=2))
        return
    print(f"{tuned.trials} trials, objective {tuned.objective}; settings: {out}")
    print(
        f"{'':14} {'TTFT mean s':>12} {'stall mean s':>13} {'token hits':>11} {'in 1st tier':>12}"
    )
    for half, pair in (("first half", tuned.train), ("second half", tuned.held_out)):
        for name, report in zip(("shipped", "tuned"), pair, strict=True):
            print(
                f"{half[:6]} {name:7} {report.ttft.mean:12.4f} {report.stall.mean:13.4f} "
                f"{report.token_hit_ratio:11.4f} {report.fast_token_hit_ratio:12.4f}"
            )
    change = f"{0 - tuned.gain:+.1%}"
    print(f"mean time to the first token on the second half: {change}")
