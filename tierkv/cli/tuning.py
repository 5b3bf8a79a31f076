"""The commands ``tierkv sweep`` and ``tierkv tune``."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierkv.cli.options import (
    DEFAULT_BYTES,
    Bandwidth,
    BlockTokens,
    BytesPerToken,
    File,
    Format,
    Json,
    Prefill,
    cost_model,
    opened,
    policies_of,
)
from tierkv.cli.printing import print_json
from tierkv.config import Tier
from tierkv.errors import ConfigError
from tierkv.outputs import check_output, put
from tierkv.registry import names
from tierkv.replay import Setup
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
from tierkv.tuning.writing import FIRST_WORDS, ON_DISK
from tierkv.units import format_bytes, parse_bytes, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tierkv.traces import Trace

__all__ = ["sweep_command", "tune_command"]

_ENDLESS: Final = ("inf", "unlimited")

_Price = Annotated[
    list[str] | None,
    typer.Option(
        help="Cost of a GiB, e.g. host=4; in any unit. Default: "
        + ", ".join(f"{name}={price:g}" for name, price in PRICES.items())
    ),
]


def _prices(texts: list[str] | None, tiers: Collection[str]) -> dict[str, float]:
    prices = dict(PRICES)
    for text in texts or ():
        name, sign, value = text.partition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            sign = ""
        if not sign or not name or not 0 <= prices[name] < inf:
            raise ConfigError(f"--price {text!r}: want NAME=COST of a GiB, e.g. host=4")
        if name not in tiers and name not in PRICES:
            raise ConfigError(f"--price {text!r}: there is no such --tier ({', '.join(tiers)})")
    for name in tiers:
        if name not in prices:
            known = ", ".join(prices)
            raise ConfigError(f"--tier {name}: none of {known}; another needs --price {name}=COST")
    return prices


def _sizes(texts: list[str], what: str) -> dict[str, list[int | None]]:
    """``NAME=SIZE,SIZE,...`` of each tier; None for one that never fills up."""
    found: dict[str, list[int | None]] = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        if not name or not sizes or name in found:
            raise ConfigError(f"{what} {text!r}: want NAME=SIZE, each tier once, e.g. host=8GiB")
        parts = [part.strip() for part in sizes.split(",")]
        what_of = f"{what} {name}"
        each = [None if part in _ENDLESS else parse_bytes(part, of=what_of) for part in parts]
        found[name] = list(dict.fromkeys(each))
    return found


def _loaded(trace: Trace, sizes: Mapping[str, Sequence[int | None]]) -> Trace:
    """The trace in memory, once each tier is known to hold a block of it, or to be none at all."""
    block = trace.header.block_tokens * trace.header.bytes_per_token
    for name, values in sizes.items():
        for size in values:
            if size is not None and 0 < size < block:
                why = f"{format_bytes(size)} hold no block of this trace: one takes"
                raise ConfigError(f"--tier {name}: {why} {format_bytes(block)}")
    return trace.loaded()


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


def _check_targets(csv: Path | None, picture: Path | None) -> None:
    check_output("--csv", csv)
    check_output("--plot", picture)
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


# --------------------------------------------------------------------------- sweep


def sweep_command(
    file: File,
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
    bandwidth: Bandwidth = "5GB",
    prefill: Prefill = 40_000.0,
    form: Format = None,
    block_tokens: BlockTokens = None,
    bytes_per_token: BytesPerToken = DEFAULT_BYTES,
    as_json: Json = False,
) -> None:
    """Replay a trace at many sizes: miss-ratio curves, and the cheapest size that is enough.

    Exits with 1 if --reach-hit or --save-seconds is asked for and nothing reaches it. Ctrl-C ends
    it early: what was found is written, and the exit code is 130.
    """
    _check_targets(csv, picture)
    policies = policies_of(policy)
    tiers = _sizes(tier, "--tier")
    prices = _prices(price, tiers)
    grid = _grid(tiers)
    trace = _loaded(opened(file, form, block_tokens, bytes_per_token), tiers)
    with _progress("replaying", quiet=as_json) as told:
        found = sweep(
            trace,
            grid,
            policies=policies,
            base=Setup(capacity_blocks=1, model=cost_model(bandwidth, prefill)),
            sample=sample,
            prices=prices,
            progress=lambda done, total: told(done, total, ""),
        )
    if csv is not None:
        put(csv, found.csv().encode())
    wanted = reach_hit > 0 or save_seconds > 0
    best = found.cheapest(hit=reach_hit, saved_s=save_seconds) if wanted else None
    _print_sweep(found, None if best is None else str(best), wanted=wanted, as_json=as_json)
    if picture is not None:
        plot(found, picture, trace.header.origin)
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


def _print_sweep(found: Sweep, best: str | None, *, wanted: bool, as_json: bool) -> None:
    if as_json:
        print_json({"rows": found.to_plain()} | ({"cheapest": best} if wanted else {}))
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
    file: File,
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
    bandwidth: Bandwidth = "5GB",
    prefill: Prefill = 40_000.0,
    form: Format = None,
    block_tokens: BlockTokens = None,
    bytes_per_token: BytesPerToken = DEFAULT_BYTES,
    as_json: Json = False,
) -> None:
    """Search for better settings on the first half of a trace, and judge them on the second.

    Ctrl-C ends the search early: what was found is kept, and the exit code is 130.
    """
    sizes = _sizes(tier, "--tier")
    _check_tiers(sizes, path)
    prices = _prices(price, sizes)
    check_output("--out", out)
    _check_replaceable(out)
    check_output("--study", study)
    choices = Choices() if policy is None else Choices(policies=tuple(policies_of(policy)))
    seconds = parse_duration(budget, of="--budget")
    trace = _loaded(opened(file, form, block_tokens, bytes_per_token), sizes)
    given = shipped({name: each[0] for name, each in sizes.items()}, cost_model(bandwidth, prefill))
    with _progress("searching", quiet=as_json) as told:
        tuned = tune(
            trace,
            given,
            objective=objective,
            choices=choices,
            seconds=seconds,
            trials=trials,
            study=study,
            prices=prices,
            on_end=partial(print, "judging what was found ...", file=sys.stderr),
            on_trial=lambda done, best: told(done, trials, f", best {best:.5g}"),
        )
    origin = trace.header.origin
    put(out, settings_text(tuned, path=path, unlimited=_bytes_of(trace), origin=origin).encode())
    _print_tuned(tuned, out, as_json=as_json)
    if tuned.interrupted:
        raise typer.Exit(130)


def _check_tiers(sizes: Mapping[str, Sequence[int | None]], path: str) -> None:
    """Refuse tiers that no engine could open with the settings that come out."""
    known = names("backends")
    for name, values in sizes.items():
        if name not in known:
            raise ConfigError(f"--tier {name}: a tier is one of {', '.join(known)}")
        if len(values) != 1:
            raise ConfigError(f"--tier {name}: one size a tier; tierkv sweep compares sizes")
        if 0 in values:
            raise ConfigError(f"--tier {name}: a tier needs bytes; leave it out instead")
        if name in ON_DISK:
            Tier(name, "1GiB", path=path)  # refuses what is no path


def _bytes_of(trace: Trace) -> int:
    """Bytes of all its different blocks."""
    blocks = {key for request in trace for key in (*request.keys, *request.reply_keys)}
    return len(blocks) * trace.header.block_tokens * trace.header.bytes_per_token


def _print_tuned(tuned: Tuned, out: Path, *, as_json: bool) -> None:
    if as_json:
        pairs = {"train": tuned.train, "held_out": tuned.held_out}
        result = {
            "objective": tuned.objective,
            "trials": tuned.trials,
            "settings": asdict(tuned.setup),
            "gain": tuned.gain,
            "interrupted": tuned.interrupted,
            "file": str(out),
        } | {k: {"shipped": a.to_plain(), "tuned": b.to_plain()} for k, (a, b) in pairs.items()}
        print_json(result)
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
