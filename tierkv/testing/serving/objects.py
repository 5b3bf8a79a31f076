"""Stand-ins for what vLLM hands to a connector: the same attribute names, plain data.

The names are those of vLLM 0.32 (``v1/request.py``, ``v1/core/sched/output.py``,
``v1/outputs.py``); attributes that no connector of tierkv reads are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "BlockState",
    "Blocks",
    "CachedRequests",
    "ConnectorOutput",
    "Feature",
    "GroupSpec",
    "Lora",
    "Mode",
    "NewRequest",
    "Place",
    "Prompt",
    "Request",
    "StepOutput",
    "TransferResults",
    "Violation",
]


class Violation(AssertionError):
    """A connector did what a serving engine would die of, hang on, or answer wrongly from.

    Attributes:
        kind: Short name of what went wrong, e.g. ``"wrong-kv"``.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class GroupSpec(NamedTuple):
    """One page group: ``window`` None means full attention."""

    window: int | None = None
    page_tokens: int = 4


@dataclass(frozen=True)
class Mode:
    """How the engine runs.

    Attributes:
        groups: Page groups; all with pages of equal size.
        ranks: Tensor-parallel ranks.
        pages: Pages in the pool, the null page included.
        chunk: Most tokens of a step: longer prompts are computed in chunks.
        running: Most requests that run at once.
        overlap: Whether a step is scheduled while the one before it is computed.
        drafts: Draft tokens of each decode step (not with ``overlap``).
        prefix_caching: Whether the engine finds prefixes in its own pages.
        sync_loads: Whether a connector may load synchronously.
        seed: Of the draft tokens' luck.
    """

    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    ranks: int = 1
    pages: int = 256
    chunk: int = 64
    running: int = 4
    overlap: bool = False
    drafts: int = 0
    prefix_caching: bool = True
    sync_loads: bool = True
    seed: int = 0


class Lora(NamedTuple):
    """vLLM's ``LoRARequest``; ``version`` stands for the content of its files."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = "/adapters/one"
    version: str = "1"
    load_inplace: bool = False


class Place(NamedTuple):
    """Where the placeholder tokens of a medium are."""

    offset: int
    length: int


class Feature(NamedTuple):
    """One image or sound of a prompt."""

    identifier: str
    mm_position: Place


@dataclass(frozen=True)
class Prompt:
    """One request to be made.

    Attributes:
        tokens: Token ids.
        max_tokens: Tokens to decode.
        salt: ``cache_salt``.
        lora: Active adapter.
        media: Images among the tokens.
        params: ``kv_transfer_params``.
        skip_reading: Whether cached prefixes must not be used.
        pooling: Whether it is a pooling request.
        embeds: Whether the prompt comes as embeddings.
    """

    tokens: tuple[int, ...]
    max_tokens: int = 3
    salt: str | None = None
    lora: Lora | None = None
    media: tuple[Feature, ...] = ()
    params: Any = None
    skip_reading: bool = False
    pooling: bool = False
    embeds: bool = False


class Request:
    """vLLM's ``Request``, as connectors see it, and what the replay keeps of it."""

    def __init__(self, request_id: str, prompt: Prompt) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids: list[int] | None = list(prompt.tokens)
        self.all_token_ids = list(prompt.tokens)
        self.num_prompt_tokens = len(prompt.tokens)
        self.max_tokens = prompt.max_tokens
        self.cache_salt = prompt.salt
        self.lora_request = prompt.lora
        self.mm_features = list(prompt.media)
        self.kv_transfer_params = prompt.params
        self.pooling_params = object() if prompt.pooling else None
        self.prompt_embeds = object() if prompt.embeds else None
        self.prompt_is_token_ids = None
        self.skip_reading_prefix_cache = prompt.skip_reading
        self.resumable = False
        self.session_id = None
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.num_in_flight_tokens = 0
        self.num_stale_tokens = 0
        self.status = "waiting"
        self.offered = 0
        self.cached = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens decoded and known."""
        return len(self.all_token_ids) - self.num_prompt_tokens


class Blocks:
    """vLLM's ``KVCacheBlocks``."""

    def __init__(self, tables: tuple[list[int], ...]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Page ids by group; 0 is the null page."""
        return tuple(list(table) for table in self._tables)


class NewRequest(NamedTuple):
    """vLLM's ``NewRequestData``."""

    req_id: str
    prompt_token_ids: list[int] | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """vLLM's ``CachedRequestData``."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


class BlockState:
    """vLLM's ``KVConnectorBlockState``: whole page tables, for whoever asks."""

    def __init__(self, tables: dict[str, tuple[list[int], ...]]) -> None:
        self._tables = tables

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """All page ids of a scheduled request, by group."""
        tables = self._tables.get(req_id)
        return None if tables is None else tuple(list(table) for table in tables)


@dataclass
class StepOutput:
    """vLLM's ``SchedulerOutput``."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    has_sync_kv_loads: bool
    kv_connector_block_state: BlockState | None
    kv_connector_metadata: Any = None
    starts: dict[str, int] = field(default_factory=dict)
    fresh: list[list[int]] = field(default_factory=list)  # pages that change hands, by group


@dataclass
class TransferResults:
    """vLLM's ``KVConnectorTransferResults``."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class ConnectorOutput:
    """vLLM's ``KVConnectorOutput``."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: Any = None
