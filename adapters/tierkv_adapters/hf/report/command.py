"""The command line of the report."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tierkv.chains import parse_chains
from tierkv.errors import ConfigError
from tierkv_adapters.hf.demo.loading import find_model, load_model
from tierkv_adapters.hf.probe import check_supported
from tierkv_adapters.hf.report.allocation import allocate
from tierkv_adapters.hf.report.coding import BLOCK
from tierkv_adapters.hf.report.fidelity import Subject, default_text
from tierkv_adapters.hf.report.rows import (
    CHAINS,
    Row,
    check_plot,
    listed,
    measure,
    plot,
    recommend,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.status import Status

__all__ = ["codec_report", "subject_of"]

SCHEMA_VERSION: Final = 1
_DEMO: Final = "smollm2"


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
        check_plot(plot_file)
    lossless = {name: parse_chains(name).lossless for name in names}  # wrong names fail at once
    kind = {"bfloat16", "float16", "float32"}
    if dtype not in kind:
        raise ConfigError(f"--dtype {dtype!r} is none of {', '.join(sorted(kind))}")
    log = Console(stderr=True)
    subject = subject_of(_DEMO if model == "demo" else model, text, prefix, scored)
    kv = [tuple(t.to(getattr(torch, dtype)) for t in pair) for pair in subject.kv]
    pairs = [(k, v) for k, v in kv]
    rows: list[Row] = []
    with log.status("measuring") as status:
        for number, name in enumerate(names, 1):
            _tell(log, status, f"{number} of {len(names)}: {name}")
            rows.append(measure(pairs, name, subject=subject))
            if not lossless[name]:
                rows.append(measure(pairs, name, subject=subject, exact_first=1, timed=False))
        if allocation:
            _tell(log, status, "looking for a chain for each layer and tensor")
            found = allocate(pairs, subject, kl_bound)
            rows += [] if found is None else [found]
    best = recommend(rows, kl_bound)
    if plot_file is not None:
        plot(rows, model, plot_file)
    if as_json:
        print(json.dumps(_document(model, rows, best, kl_bound), indent=2))
        return
    _show(Console(), model, rows, best, kl_bound)


def _tell(log: Console, status: Status, what: str) -> None:
    status.update(what)
    if not log.is_terminal:  # where no line can move, each step has one
        log.print(what)


def subject_of(model: str, text: Path | None, prefix: int, scored: int) -> Subject:
    """A model and a text to judge chains by.

    Raises:
        ConfigError: if the model cannot be loaded, or the text is too short.
    """
    live, tokenizer = load_model(find_model(model))
    check_supported(live)
    source = default_text() if text is None else _text(text)
    # four characters a token and more: no tokenizer has to read all of a long text
    ids = tokenizer(source[: 16 * (prefix + scored)])["input_ids"][: prefix + scored]
    if len(ids) < prefix + scored:
        raise ConfigError(
            f"the text has {len(ids)} tokens, {prefix + scored} are needed: give a longer --text, "
            "or smaller --prefix and --scored"
        )
    return Subject(live, ids, prefix)


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is no text in UTF-8") from error


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
