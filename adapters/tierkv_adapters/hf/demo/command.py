"""The command line of the demo.

What it needs beyond the core is imported when it runs, so that its help can be read without.
"""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tierkv import registry
from tierkv_adapters.hf.models import DEMO_EXTRA, MODELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv_adapters.hf.demo.figures import Report

__all__ = ["demo"]


def demo(
    model: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(sorted(MODELS))}, or a directory of a Transformers model."
        ),
    ] = "smollm2",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Directory for the store, kept and used again.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 8,
    seed: Annotated[int, typer.Option(help="Facts of the texts are drawn from it.")] = 0,
    answer_one: Annotated[bool, typer.Option("--answer", hidden=True)] = False,
) -> None:
    """Chat with a small real model, cold and returning, and compare.

    A chat of several turns and a long document that two readers ask about, with a RAM tier too
    small for both: blocks go to disk and come back. Then the process starts anew and goes on.
    """
    running = "tierkv_adapters.hf.demo.running"
    if answer_one:
        reply: Callable[..., str]
        reply = registry.load(f"{running}:reply", what="tierkv demo", hint=DEMO_EXTRA)
        print(reply(model, keep))
        return
    run: Callable[..., Report]
    run = registry.load(f"{running}:run", what="tierkv demo", hint=DEMO_EXTRA)
    report = run(model, keep, max_new_tokens, seed)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        report.show(Console())
    if not report.identical:
        raise typer.Exit(1)
