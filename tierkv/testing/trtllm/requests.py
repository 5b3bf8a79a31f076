"""Requests: what a test asks for, and what a connector gets to see of it."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.errors import ConfigError
from tierkv.testing.trtllm.content import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from tierkv.testing.trtllm.modes import Mode

__all__ = ["FirstRequest", "Item", "Phase", "Prompt", "Request", "SecondRequest"]


class Item(NamedTuple):
    """One image or sound in a prompt."""

    content: bytes
    position: int
    length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as a test makes it, with what shall happen to it on the way.

    Attributes:
        tokens: Token ids of the prompt, at least one.
        max_tokens: Tokens to generate, at least one.
        salt: ``cache_salt``.
        lora: ``lora_task_id``.
        media: What placeholder tokens stand for.
        eos_after: Generated tokens after which the model ends by itself. Under overlap one more
            step was launched by then.
        on_device: Leading tokens that the engine's own block reuse finds; need not be whole
            blocks (``enable_partial_reuse``).
        defer: Steps between the question what can be loaded and the allocation (second API).
        honour: Most tokens of an offer that the engine has room for, rounded down to whole
            blocks (second API); it tells the rest by ``cancel_load``.
        reset: Whether its first allocation is rolled back (second API).
    """

    tokens: SequenceOf[int]
    max_tokens: int = 1
    salt: str | None = None
    lora: int | None = None
    media: tuple[Item, ...] = ()
    eos_after: int | None = None
    on_device: int = 0
    defer: int = 0
    honour: int | None = None
    reset: bool = False

    def __post_init__(self) -> None:
        if not self.tokens or self.max_tokens < 1 or not 0 <= self.on_device < len(self.tokens):
            raise ConfigError("a prompt needs a token, must generate one, and computes one")

    def media_by_position(self) -> dict[int, bytes]:
        """Content behind each placeholder token, by its index."""
        spans = [(range(m.position, m.position + m.length), m.content) for m in self.media]
        return {at: content for span, content in spans for at in span}


class Phase(enum.Enum):
    """Where in its life a request is."""

    WAITING = "waiting"
    ASKED = "asked, and not allocated yet"
    LOADING = "out of the batch until its load is over"
    CONTEXT = "prefill"
    DECODE = "decode"
    LAST = "all of its steps are launched"
    PREEMPTED = "begins anew once its saves let go of its pages"
    SAVING = "over, its pages are held for its saves"
    DONE = "over"


@dataclass(eq=False, slots=True)
class Request:
    """A request's state in the engine.

    Attributes:
        id: Its number.
        prompt: What was asked for.
        sequence: Its tokens, those not delivered yet included, and their KV.
        told: Tokens that the host knows: prompt and delivered ones.
        context: Tokens that prefill computes; more than the prompt after a preemption.
        device: Leading tokens that the engine's own block reuse finds.
        position: Leading tokens whose KV is computed or loaded.
        pages: Per layer group the page of each block, -1: none.
        offered: Tokens the connector offered when it was last asked.
        asynchronous: Whether they load asynchronously.
        honoured: Tokens of the offer that the engine takes.
        external: Honoured tokens that this step loads before it computes.
        reset: Whether its next allocation is rolled back.
        reported: Whether a scheduler's output had it since its pages are its own.
        placed: Whether the KV that the engine's own blocks had is in its pages.
        seen_tokens: Tokens that outputs told of; ``seen_pages``: pages, per group.
        view: What the connector gets to see.
        aborted: Whether the user gave it up.
    """

    id: int
    prompt: Prompt
    mode: Mode
    sequence: Sequence
    told: int
    context: int
    defer: int
    pages: list[list[int]]
    device: int
    phase: Phase = Phase.WAITING
    position: int = 0
    offered: int = 0
    asynchronous: bool = False
    honoured: int = 0
    external: int = 0
    reset: bool = False
    aborted: bool = False
    reported: bool = False
    placed: bool = False
    seen_tokens: int = 0
    seen_pages: list[int] = field(default_factory=list)
    view: Any = None

    @classmethod
    def new(cls, number: int, prompt: Prompt, mode: Mode) -> Request:
        """A request that has just come in."""
        length, groups = len(prompt.tokens), len(mode.windows)
        request = cls(
            number,
            prompt,
            mode,
            Sequence(prompt, mode.ranks, mode.layers),
            told=length,
            context=length,
            defer=prompt.defer,
            pages=[[] for _ in range(groups)],
            device=prompt.on_device,
            reset=prompt.reset,
            seen_pages=[0] * groups,
        )
        request.view = (FirstRequest if mode.api == "first" else SecondRequest)(request)
        return request

    @property
    def tokens(self) -> list[int]:
        """Prompt and delivered tokens."""
        return self.sequence.tokens[: self.told]

    @property
    def over(self) -> bool:
        """Whether it needs no further step."""
        return self.phase in (Phase.SAVING, Phase.DONE)

    def restart(self) -> None:
        """Lose its pages and begin anew, with the tokens it was given so far as its prompt."""
        self.sequence.truncate(self.told)
        self.context, self.device, self.position = self.told, 0, 0
        self.pages = [[] for _ in self.pages]
        self.offered = self.honoured = self.external = 0
        self.asynchronous = self.reported = self.placed = False
        self.phase = Phase.WAITING
        self.seen_tokens, self.seen_pages = 0, [0] * len(self.pages)


class _LlmRequest:
    """What the engine's C++ side lets a connector see of a request."""

    is_generation_only_request = False
    is_dummy_request = False
    kv_cache_retention_config = None

    def __init__(self, request: Request) -> None:
        self._request = request
        self.request_id = self.py_request_id = request.id
        self.prompt_len = len(request.prompt.tokens)
        self.lora_task_id = request.prompt.lora
        media = request.prompt.media
        digests = [hashlib.sha256(item.content).digest() for item in media]
        words = [[d[i : i + 4] for i in range(0, 32, 4)] for d in digests]
        self.multimodal_hashes = [
            [int.from_bytes(w, "little", signed=True) for w in one] for one in words
        ] or None
        self.multimodal_positions = [item.position for item in media] or None
        self.multimodal_lengths = [item.length for item in media] or None

    def get_tokens(self, beam: int) -> list[int]:
        """Prompt and delivered tokens of a beam; there is only beam 0."""
        if beam != 0:
            raise IndexError(f"beam {beam} of 1")
        return self._request.tokens

    @property
    def context_current_position(self) -> int:
        """Where prefill goes on."""
        return self._request.position

    @property
    def is_finished(self) -> bool:
        """Whether it needs no further step."""
        return self._request.over


class FirstRequest(_LlmRequest):
    """``LlmRequest`` of the first API: the salt is a number."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        salt = request.prompt.salt
        digest = hashlib.sha256((salt or "").encode()).digest()
        self.cache_salt_id = None if salt is None else int.from_bytes(digest[:7], "little")


class SecondRequest(_LlmRequest):
    """``LlmRequest`` of the second API."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.cache_salt = request.prompt.salt

    @property
    def is_finished_normal(self) -> bool:
        """Whether it ended by itself."""
        return self._request.over and not self._request.aborted
