"""Runs the script: each request through the store, from nothing, and from the in-memory cache."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.config import Tier
from tierkv_adapters.chat.prompts import encode_prompt
from tierkv_adapters.hf.compare import compare_tokens
from tierkv_adapters.hf.demo.figures import Turn
from tierkv_adapters.hf.demo.reference import Memory, Recorder, common_prefix, plain_run
from tierkv_adapters.hf.probe import layout_of, probe_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.blocking import CacheManager
    from tierkv_adapters.chat.result import GenerateResult
    from tierkv_adapters.hf.demo.reference import Run
    from tierkv_adapters.hf.demo.script import Ask
    from tierkv_adapters.hf.handle import SyncHandle

__all__ = ["HOST_TOKENS", "Scenario", "ask_store", "demo_tiers"]

HOST_TOKENS = 1856
"""Tokens whose KV fits the RAM tier: the document, or the chat, but never both."""
_NVME_BYTES = 2 << 30
_SLAB = 2 << 20
_BLOCK_TOKENS = 64


def demo_tiers(model: Any, root: Path) -> list[Tier]:
    """RAM for about :data:`HOST_TOKENS` tokens of this model, and a directory on disk."""
    layout = layout_of(probe_layers(model))
    block = layout.raw_bytes(_BLOCK_TOKENS) + _BLOCK_TOKENS * 1024  # frames have headers
    wanted = HOST_TOKENS // _BLOCK_TOKENS * block
    return [
        Tier("host", max(4 * _SLAB, -(-wanted // _SLAB) * _SLAB)),
        Tier("nvme", _NVME_BYTES, path=str(root)),
    ]


def ask_store(
    handle: SyncHandle, prompt: str | Sequence[int], **arguments: Any
) -> tuple[GenerateResult, float]:
    """Ask through the store; return the reply and processor seconds to its first token."""
    start = time.process_time()
    used: float | None = None
    with handle.stream(prompt, do_sample=False, **arguments) as tokens:
        for _ in tokens:
            if used is None:
                used = time.process_time() - start
    assert tokens.result is not None
    return tokens.result, used or 0.0


@dataclass(slots=True)
class _Conversation:
    """What is known of one conversation: every request so far, and the in-memory KV."""

    memory: Memory
    asked: list[list[int]] = field(default_factory=list)

    def new_tokens(self, ids: Sequence[int]) -> int:
        """Tokens of a prompt that are not the beginning of an earlier request and its reply."""
        return len(ids) - max((common_prefix(ids, other) for other in self.asked), default=0)


class Scenario:
    """One run of the demo with one model.

    Args:
        model: A Transformers model that :func:`tierkv_adapters.hf.attach` takes.
        tokenizer: Its tokenizer.
        chat: Whether to use the tokenizer's chat template.
        new_tokens: Most tokens of a reply.
        say: Receives remarks, one line each.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        chat: bool,
        new_tokens: int,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat
        self._new_tokens = new_tokens
        self._say = say
        self._conversations: dict[str, _Conversation] = {}

    def warm_up(self) -> None:
        """Run the model once, so that the first request does not pay for its first steps."""
        ids = self._tokenizer("A few words to begin with. " * 8)["input_ids"]
        plain_run(self._model, ids, 2)

    def ask(self, manager: CacheManager, handle: SyncHandle, ask: Ask) -> Turn:
        """Ask one request in all three ways and compare."""
        if ask.session not in {info.id for info in manager.sessions()}:
            manager.create_session(ask.session)
        result, cpu = ask_store(
            handle,
            ask.text,
            session=ask.session,
            chat=self._chat,
            max_new_tokens=self._new_tokens,
        )
        manager.flush()  # what is still being written must not slow the runs to compare with
        ids, reused = result.input_ids, result.reused_tokens
        known = self._conversations.setdefault(ask.conversation, _Conversation(Memory(self._model)))
        new_tokens = known.new_tokens(ids)
        cold = self._cold(known.memory, ids, reused)
        warm = self._resumed(known.memory, ids, reused) if reused else cold
        known.asked.append(result.output_ids)
        judged = compare_tokens(self._model, cold.output, result.output_ids, self._say)
        return Turn(
            label=ask.label,
            new_tokens=new_tokens,
            prompt_tokens=result.prompt_tokens,
            reused_tokens=reused,
            tier=result.tier,
            ttft_cold_s=cold.ttft_s,
            ttft_restored_s=result.ttft_s,
            cpu_cold_s=cold.cpu_s,
            cpu_restored_s=cpu,
            identical=warm.output == result.output_ids,
            identical_to_cold=judged.ok,
        )

    def next_prompt(self, ask: Ask) -> list[int]:
        """Ids of a further request in a conversation, as its session would build them."""
        history = self._conversations[ask.conversation].asked[-1]
        return encode_prompt(ask.text, history, self._tokenizer, chat=self._chat, append=True)

    def expected(self, ask: Ask, ids: Sequence[int], reused: int) -> list[int]:
        """Prompt and reply of the in-memory cache, resumed after ``reused`` tokens."""
        memory = self._conversations[ask.conversation].memory
        return self._resumed(memory, ids, reused).output

    def _cold(self, memory: Memory, ids: Sequence[int], reused: int) -> Run:
        if reused and memory.tokens:
            return plain_run(self._model, ids, self._new_tokens)
        return self._extend(memory, ids, 0)  # this pass is what the memory then holds

    def _resumed(self, memory: Memory, ids: Sequence[int], reused: int) -> Run:
        if reused > (held := memory.shared(ids)):
            # a run before this one left more than this one has computed: do as that one did
            self._extend(memory, ids, held // _BLOCK_TOKENS * _BLOCK_TOKENS)
        return self._extend(memory, ids, reused)

    def _extend(self, memory: Memory, ids: Sequence[int], start: int) -> Run:
        """Answer a prompt from the first ``start`` tokens in memory, and keep what that makes."""
        cache = memory.resume(start) if start else Recorder(self._model)
        run = plain_run(self._model, ids, self._new_tokens, cache)
        memory.absorb(run.output, cache, start)
        return run
