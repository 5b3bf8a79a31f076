"""Real models, prompts of a given length, and the judge of every reply."""

from __future__ import annotations

import importlib.util
import random
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_adapters.hf import AsyncHandle, GenerateResult
    from tierkv_adapters.hf.demo.reference import Memory

INSTALLED = importlib.util.find_spec("transformers") is not None
if INSTALLED:
    import tests.models
    from tierkv_adapters.hf.demo.reference import Memory, Recorder, plain_run
    from tierkv_adapters.hf.probe import layout_of, probe_layers
else:
    collect_ignore_glob = ["test_*.py"]

NEW_TOKENS = 3
_TEXT = (
    "harbour library orchard mill station museum quarry bakery lamp chair map boat barrel book "
    "tool bell ladder before after during under between seven twelve forty repaired lost sold "
    "painted counted moved Ada Bruno Chioma Dmitri Elif Farid Greta Hana and but because the a"
)
WORDS = tuple(_TEXT.split())


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One event loop: real models are too slow to run everything three times."""
    return "asyncio", {"debug": False, "use_uvloop": False}


class Lab:
    """A real model, and what its replies have to be.

    Every reply is compared with the same model resuming Transformers' own cache after the very
    tokens that were restored.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.tokenizer = tests.models.load_model(name)
        self.block_bytes = layout_of(probe_layers(self.model)).raw_bytes(64)

    @cached_property
    def told(self) -> tuple[Memory, list[int]]:
        """A prompt of 140 tokens with its reply, computed once; copy before use."""
        return self.remember(self.prompt(140))

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Exactly ``tokens`` ids of text; different for each seed from the first words on."""
        draw = random.Random(seed)
        text = f"Note {seed}. " + " ".join(draw.choice(WORDS) for _ in range(2 * tokens))
        ids: list[int] = self.tokenizer(text)["input_ids"][:tokens]
        assert len(ids) == tokens
        return ids

    def words(self, tokens: int, seed: int) -> list[int]:
        """Text that goes on after a prompt: no token that only begins a text."""
        ids: list[int] = self.tokenizer(" ".join(self._draw(seed, tokens)))["input_ids"]
        first = 1 if ids[0] in self.tokenizer.all_special_ids else 0
        return ids[first : first + tokens]

    @staticmethod
    def _draw(seed: int, count: int) -> list[str]:
        draw = random.Random(seed)
        return [draw.choice(WORDS) for _ in range(count + 1)]

    def remember(self, ids: Sequence[int]) -> tuple[Memory, list[int]]:
        """In-memory KV of a prompt computed in one pass and of its reply, and both as ids."""
        cache, memory = Recorder(self.model), Memory(self.model)
        output = plain_run(self.model, ids, NEW_TOKENS, cache).output
        memory.absorb(output, cache)
        return memory, output

    def resumed(self, memory: Memory, ids: Sequence[int], tokens: int) -> list[int]:
        """Prompt and reply of the in-memory cache resumed after ``tokens``; memory goes on."""
        cache = memory.resume(tokens)
        output = plain_run(self.model, ids, NEW_TOKENS, cache).output
        memory.absorb(output, cache, tokens)
        return output

    async def ask(self, handle: AsyncHandle, ids: Sequence[int], **options: Any) -> GenerateResult:
        """Ask through the store, greedily."""
        return await handle.generate(
            list(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **options
        )

    def check(
        self, result: GenerateResult, memory: Memory, *, reused: int, tier: str | None = None
    ) -> None:
        """Assert how much was restored and from where, and that the reply is the right one."""
        assert result.reused_tokens == reused
        if tier is not None:
            assert result.by_tier == {tier: reused}
        expected = self.resumed(memory, result.input_ids, reused)
        assert result.output_ids == expected


@pytest.fixture(scope="session")
def smollm2() -> Lab:
    """SmolLM2-135M-Instruct: full attention."""
    return Lab("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Lab:
    """Gemma 3 270M: a sliding window of 512 tokens on 15 of 18 layers."""
    return Lab("gemma3")


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def lab(request: pytest.FixtureRequest) -> Lab:
    """Each real model in turn."""
    found: Lab = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def told(lab: Lab) -> tuple[Memory, list[int]]:
    """What this model said; copy before use."""
    return lab.told
