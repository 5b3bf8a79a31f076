"""The restart: the same command in a new process, on the same directory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tierkv.blocking import CacheManager
from tierkv.errors import BackendError, ConfigError
from tierkv_adapters.hf.demo.scenario import ask_store, demo_tiers
from tierkv_adapters.hf.handle import attach

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Answer", "Request", "answer", "ask_new_process"]


@dataclass(frozen=True, slots=True)
class Request:
    """What the new process is asked.

    Attributes:
        prompt: Token ids of the whole prompt.
        new_tokens: Most tokens of the reply.
    """

    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What it replies; fields as in :class:`tierkv_adapters.chat.result.GenerateResult`."""

    output_ids: list[int]
    reused_tokens: int
    tier: str | None
    ttft_s: float


def ask_new_process(model_dir: Path, root: Path, request: Request) -> Answer:
    """Start ``tierkv demo`` again on the store under ``root`` and wait for its answer.

    Raises:
        BackendError: if the new process fails; its last words are in the message.
    """
    command = [sys.executable, "-m", "tierkv", "demo", "--model", str(model_dir)]
    command += ["--keep", str(root), "--answer"]
    done = subprocess.run(
        command, input=json.dumps(asdict(request)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise BackendError(
            "nvme", f"the restarted process ended with code {done.returncode}: {last[0]}"
        )
    return Answer(**json.loads(done.stdout))


def answer(model: Any, root: Path, text: str) -> Answer:
    """Answer one request from a store that another process has left; the new process's part.

    Args:
        model: The model.
        root: Directory of the store.
        text: JSON of a :class:`Request`.

    Raises:
        ConfigError: if ``text`` is none.
    """
    try:
        request = Request(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--answer reads a request as JSON from the standard input ({error}); it is meant for "
            "the demo itself"
        ) from error
    with CacheManager(tiers=demo_tiers(model, root)) as manager:
        manager.create_session("chat")
        handle = attach(model, manager)
        # a few tokens of warm-up, as the run before had
        handle.generate([1] * 8, session="chat", max_new_tokens=2, do_sample=False)
        result, _ = ask_store(
            handle,
            request.prompt,
            session="chat",
            append=False,
            max_new_tokens=request.new_tokens,
        )
    return Answer(result.output_ids, result.reused_tokens, result.tier, result.ttft_s)
