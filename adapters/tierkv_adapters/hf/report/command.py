"""The command line of the report.

What it needs beyond the core is imported when it runs, so that its help can be read without.
"""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tierkv import registry
from tierkv.errors import ConfigError
from tierkv.outputs import check_output, put
from tierkv_adapters.hf.models import DEMO_EXTRA
from tierkv_adapters.hf.report.choices import BLOCK, CHAINS, Wanted, listed
from tierkv_adapters.hf.report.picture import picture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv_adapters.hf.report.rows import Row

__all__ = ["codec_report"]

SCHEMA_VERSION: Final = 1
_DEMO: Final = "smollm2"
_DTYPES: Final = ("bfloat16", "float16", "float32")


def codec_report(
    model: Annotated[
        str, typer.Option(help="'demo', a model known by name, or a directory.")
    ] = "demo",
    text: Annotated[
        Path | None, typer.Option(help="Text file; default: Python's own help.")
    ] = None,
    chains: Annotated[
        str, typer.Option(help="Chains, separated by commas; by semicolons if rules have commas.")
    ] = ",".join(CHAINS),
    prefix: Annotated[int, typer.Option(min=BLOCK, help="Tokens that are stored.")] = 1024,
    scored: Annotated[int, typer.Option(min=2, help="Tokens read after them.")] = 512,
    kl_bound: Annotated[
        float, typer.Option(min=0, help="Most KL of the recommended chain.")
    ] = 1e-3,
    dtype: Annotated[str, typer.Option(help="Dtype of the KV: bfloat16, float16, float32.")] = (
        "bfloat16"
    ),
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Picture to write.")] = None,
    allocation: Annotated[
        bool, typer.Option("--allocate", help="Also look for a chain for each layer and tensor.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure codec chains on a model's own KV: size, speed, and what they do to its answers.

    Takes five minutes of processor time and more; fewer --chains or a smaller --prefix take less.
    Chains marked with a star were measured with the first block of the prefix kept exact. With
    --allocate, one more row gives each part of the model as few bits as the bound of the KL allows.
    """
    names = _chains(chains)
    if plot_file is not None:
        _check_plot(plot_file)
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is none of {', '.join(_DTYPES)}")
    run: Callable[..., tuple[list[Row], Row | None]] = registry.load(
        "tierkv_adapters.hf.report.running:run", what="tierkv codec-report", hint=DEMO_EXTRA
    )
    wanted = Wanted(_DEMO if model == "demo" else model, text, prefix, scored, dtype)
    rows, best = run(wanted, names, kl_bound, allocation=allocation)
    if as_json:
        print(json.dumps(_document(model, rows, best, kl_bound), indent=2))
    else:
        _show(Console(), model, rows, best, kl_bound)
    if plot_file is not None:
        put(plot_file, picture(rows, model, plot_file.suffix[1:].lower()))


def _chains(text: str) -> list[str]:
    names = listed(text)
    if not names:
        raise ConfigError("--chains names no chain, e.g. --chains raw,int8+zstd")
    words = text.split(",")
    if len(names) == 1 and any(":" not in word.partition("+")[0] for word in words[:-1]):
        raise ConfigError(
            f"--chains {text!r}: where a chain has rules (K:int8,V:int4), "
            "semicolons separate the chains"
        )
    return names


def _check_plot(path: Path) -> None:
    from tierkv.tuning.plotting import check_picture  # imported here: it brings all of the search

    check_output("--plot", path)
    check_picture(path)


def _document(model: str, rows: Sequence[Row], best: Row | None, bound: float) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "rows": [row._asdict() for row in rows],
        "kl_bound": bound,
        "recommended": None if best is None else best._asdict(),
    }


def _show(
    console: Console, model: str, rows: Sequence[Row], best: Row | None, bound: float
) -> None:
    table = Table(title=f"codec chains on {model}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("chain", no_wrap=True)
    for column in ("bits", "ratio", "enc", "dec", "KL", "top-1", "dNLL", "dlogit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        pace = [row.encode_GBps, row.decode_GBps]
        table.add_row(
            row.chain + (" *" if row.exact_first else ""),
            f"{row.bits_per_element:.2f}",
            f"{row.ratio:.2f}",
            *("" if value is None else f"{value:.2f}" for value in pace),
            f"{row.kl:.1e}",
            f"{row.top1:.3f}",
            f"{row.dnll:+.4f}",
            f"{row.max_dlogit:.2f}",
        )
    console.print(table)
    console.print("* first block exact. enc, dec: GB/s of raw bytes, one core.")
    console.print("KL of raw: what the dtype of the KV costs; lossless chains add nothing to it.")
    console.print("dNLL: change of the negative log-likelihood; dlogit: largest change of a logit.")
    if best is None:
        console.print(f"no chain stays within a KL of {bound:g}: store raw, or raise --kl-bound")
        return
    first = ", the first block kept exact" if best.exact_first else ""
    console.print(f"smallest within a KL of {bound:g}: {best.chain}{first}")
