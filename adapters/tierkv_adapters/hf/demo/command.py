"""The command line of the demo, and the order of events."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.blocking import CacheManager
from tierkv.errors import ConfigError
from tierkv_adapters.hf.demo.figures import Report, Restart, Turn
from tierkv_adapters.hf.demo.loading import find_model, load_model
from tierkv_adapters.hf.demo.restart import Request, answer, ask_new_process
from tierkv_adapters.hf.demo.scenario import Scenario, demo_tiers
from tierkv_adapters.hf.demo.script import CHAT_TOKENS, DOCUMENT_TOKENS, write_script
from tierkv_adapters.hf.handle import attach
from tierkv_adapters.hf.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv_adapters.hf.demo.script import Script

__all__ = ["demo"]

_ROOM = 400  # tokens of questions, templates and the like beside the texts


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
    log = Console(stderr=True)
    directory = _fetch(model, log)
    live, tokenizer = load_model(directory)
    with contextlib.ExitStack() as stack:
        if keep is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-demo-")))
        else:
            root = keep
        if answer_one:
            print(json.dumps(asdict(answer(live, root, sys.stdin.read()))))
            return
        report = _run(live, tokenizer, model, directory, root, max_new_tokens, seed, log)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        report.show(Console())
    if not report.identical:
        raise typer.Exit(1)


def _run(
    model: Any,
    tokenizer: Any,
    name: str,
    directory: Path,
    root: Path,
    new_tokens: int,
    seed: int,
    log: Console,
) -> Report:
    chat = getattr(tokenizer, "chat_template", None) is not None
    script = write_script(tokenizer, seed, plain=not chat)
    _check_context(model, script, new_tokens)
    tiers = demo_tiers(model, root)
    turns: list[Turn] = []
    with _progress(log) as bar:
        task = bar.add_task("warming up", total=len(script.asks) + 1)
        scenario = Scenario(model, tokenizer, chat=chat, new_tokens=new_tokens, say=log.print)
        scenario.warm_up()
        with CacheManager(tiers=tiers) as manager, attach(model, manager, tokenizer) as handle:
            for ask in script.asks:
                bar.update(task, description=f"{ask.label}: cold and returning")
                turns.append(scenario.ask(manager, handle, ask))
                bar.advance(task)
            held = manager.stats().used
        bar.update(task, description="restarting")
        ids = scenario.next_prompt(script.returning)
        back = ask_new_process(directory, root, Request(ids, new_tokens))
        expected = scenario.expected(script.returning, ids, back.reused_tokens)
        bar.advance(task)
    restart = Restart(
        prompt_tokens=len(ids),
        reused_tokens=back.reused_tokens,
        tier=back.tier,
        ttft_restored_s=back.ttft_s,
        identical=back.output_ids == expected,
    )
    capacity = {tier.name: tier.capacity_bytes for tier in tiers}
    return Report(name, turns, restart, held, capacity)


def _check_context(model: Any, script: Script, new_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    turns = sum(ask.conversation == "chat" for ask in script.asks) + 1
    needed = max(DOCUMENT_TOKENS, CHAT_TOKENS + turns * new_tokens) + _ROOM
    if limit is not None and limit < needed:
        raise ConfigError(
            f"the demo needs a context of {needed} tokens, this model has {limit}: choose another "
            "model, or a smaller --max-new-tokens"
        )


def _fetch(model: str, log: Console) -> Path:
    if model not in MODELS:
        return find_model(model)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), console=log, transient=True
    ) as bar:
        task = bar.add_task(f"model {model}", total=1.0)

        def show(stage: str, share: float) -> None:
            bar.update(task, description=f"model {model}: {stage}", completed=share)

        return find_model(model, show)


@contextlib.contextmanager
def _progress(log: Console) -> Iterator[Progress]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=log) as bar:
        yield bar
