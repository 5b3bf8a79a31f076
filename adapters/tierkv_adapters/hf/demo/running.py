"""The order of events of the demo."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

__all__ = ["reply", "run"]

_ROOM = 400  # tokens of questions, templates and the like beside the texts


def run(name: str, keep: Path | None, new_tokens: int, seed: int) -> Report:
    """Chat with a model, cold and returning, then from a new process.

    Args:
        name: A name of :data:`tierkv_adapters.hf.models.MODELS`, or a directory.
        keep: Directory for the store; None: a temporary one.
        new_tokens: Most tokens of a reply.
        seed: Facts of the texts are drawn from it.

    Raises:
        ConfigError: if the model cannot be loaded or its context is too short, or the store cannot
            be kept there.
        MissingDependencyError: if a library or the weights are missing.
        IntegrityError: if the weights that were fetched are not the pinned release.
        BackendError: if the new process fails.
    """
    taken = [] if keep is None else [p for p in (keep, *keep.parents) if p.exists()][:1]
    if taken and not taken[0].is_dir():  # told before a model is fetched and loaded for it
        raise ConfigError(f"--keep {keep}: {str(taken[0])!r} is no directory; name another one")
    log = Console(stderr=True)
    directory = _fetch(name, log)
    model, tokenizer = load_model(directory)
    with contextlib.ExitStack() as stack:
        root = keep
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-demo-")))
        return _run(model, tokenizer, name, directory, root, new_tokens, seed, log)


def reply(name: str, root: Path | None) -> str:
    """The new process's part: answer the request on the standard input.

    Raises:
        ConfigError: if there is no such request, or no store.
    """
    if root is None:
        raise ConfigError("--answer needs --keep DIR; it is meant for the demo itself")
    model, _ = load_model(find_model(name))
    return json.dumps(asdict(answer(model, root, sys.stdin.read())))


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
