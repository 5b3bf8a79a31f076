"""A connector that is right, as small as that can be: a dictionary of blocks per rank.

It offers what every rank holds and saves each block once it is full. Its copies are late on
purpose: a transfer takes a few polls, as one by DMA would.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tierkv.testing.trtllm.connector import Connector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from tierkv.testing.trtllm.args import FakeLlmArgs

__all__ = [
    "Item",
    "Job",
    "Meta",
    "ReferenceScheduler",
    "ReferenceWorker",
    "State",
    "Store",
    "reference",
]


class Item(NamedTuple):
    """One block of one layer group, and the page it is in."""

    key: bytes
    group: int
    page: int


@dataclass
class Job:
    """Blocks to copy for a request, on every rank."""

    id: int
    items: list[Item]
    asynchronous: bool = True
    wait: int = 0


@dataclass
class Meta:
    """What the ranks are told in a step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    taken: set[tuple[int, int]] = field(default_factory=set)
    """(group, page) that were given to a request: saves that read them must be over."""


class Store:
    """What all ranks hold, by (key, group)."""

    def __init__(self) -> None:
        self.ranks: dict[int, dict[tuple[bytes, int], Tensor]] = {}
        self.windows: Sequence[int | None] = (None,)

    def has(self, key: bytes, group: int) -> bool:
        """Whether every rank has it."""
        return all((key, group) in held for held in self.ranks.values())

    def put(self, rank: int, item: Item, data: Tensor) -> None:
        """Keep a block of a rank."""
        self.ranks[rank][item.key, item.group] = data

    def get(self, rank: int, item: Item) -> Tensor | None:
        """A block of a rank."""
        return self.ranks[rank].get((item.key, item.group))


@dataclass
class State:
    """What the scheduler's side knows of a request."""

    root: bytes
    tokens: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    first: int = 0
    """Blocks that were computed when it was asked; ``stop``: those and the offered ones."""
    stop: int = 0
    saved: int = 0
    issued: bool = False
    loading: bool = False


class ReferenceScheduler:
    """The scheduler's side."""

    def __init__(self, args: FakeLlmArgs, store: Store, *, asynchronous: bool) -> None:
        self.block = args.kv_cache_config.tokens_per_block
        self.store = store
        self.asynchronous = asynchronous
        self.requests: dict[int, State] = {}
        self.meta = Meta()

    def root(self, request: Any) -> bytes:
        """Everything that KV depends on beside tokens."""
        salt = getattr(request, "cache_salt", None) or getattr(request, "cache_salt_id", None)
        return repr((salt, request.lora_task_id, self.media(request))).encode()

    def media(self, request: Any) -> object:
        """What placeholder tokens stand for."""
        return request.multimodal_hashes, request.multimodal_positions

    def extend(self, state: State, tokens: Sequence[int]) -> None:
        """Chain the keys of the blocks that ``tokens`` fill."""
        key = state.keys[-1] if state.keys else state.root
        for at in range(len(state.keys) * self.block, len(tokens) - self.block + 1, self.block):
            text = repr(tokens[at : at + self.block]).encode()
            key = hashlib.sha256(key + text).digest()
            state.keys.append(key)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Offer what every rank holds."""
        tokens = request.get_tokens(0)
        state = self.requests[request.request_id] = State(self.root(request))
        self.extend(state, tokens)
        count = self.offer(state, tokens, computed)
        state.first = computed // self.block
        state.stop = state.first + -(-count // self.block)
        return count, self.asynchronous and count > 0

    def offer(self, state: State, tokens: Sequence[int], computed: int) -> int:
        """Tokens behind ``computed`` that can be loaded."""
        if computed % self.block:
            return 0
        first = computed // self.block
        limit = (len(tokens) - 1) // self.block
        return max(0, self.held(state, first, limit) - first) * self.block

    def held(self, state: State, first: int, limit: int) -> int:
        """Blocks of the longest prefix that can be loaded behind ``first``."""
        full = [g for g, window in enumerate(self.store.windows) if window is None]
        stop = first
        while stop < limit and all(self.store.has(state.keys[stop], group) for group in full):
            stop += 1
        while stop > first and not self.windows_held(state, first, stop):
            stop -= 1
        return stop

    def windows_held(self, state: State, first: int, stop: int) -> bool:
        """Whether the blocks that windows reach from the token behind ``stop`` blocks are there."""
        for group, window in enumerate(self.store.windows):
            if window is not None:
                begin = max(first, max(0, stop * self.block - window + 1) // self.block)
                keys = state.keys[begin:stop]
                if not all(self.store.has(key, group) for key in keys):
                    return False
        return True

    def update_state_after_alloc(self, request: Any, pages: list[int]) -> None:
        """The same, of a cache whose pages are one list."""
        self.update_state_after_alloc_by_layer_group(request, [pages])

    def update_state_after_alloc_by_layer_group(self, request: Any, pages: list[list[int]]) -> None:
        """Plan the load: a request that loads asynchronously is in no output."""
        state = self.requests.get(request.request_id)
        if state is None:
            return
        self.take(pages)
        if state.stop > state.first or state.loading:
            items = self.items(state, pages, state.first, state.stop)
            self.meta.loads.append(Job(request.request_id, items, self.asynchronous))
            state.loading = True

    def items(self, state: State, pages: list[list[int]], first: int, stop: int) -> list[Item]:
        """Blocks ``[first, stop)`` of all groups that have a page for them."""
        return [
            Item(state.keys[block], group, mine[block])
            for group, mine in enumerate(pages)
            for block in range(first, stop)
            if mine[block] != -1
        ]

    def take(self, pages: list[list[int]]) -> None:
        """Pages were given to a request."""
        self.meta.taken.update((group, page) for group, mine in enumerate(pages) for page in mine)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine does not want all that was offered; it waits for the load all the same."""
        state = self.requests.get(request.request_id)
        if state is not None and start < state.stop * self.block:
            state.stop = max(state.first, start // self.block)
            state.loading = True

    def request_reset(self, request: Any) -> None:
        """The pages of a request are no longer its own."""
        self.requests.pop(request.request_id, None)
        self.meta.loads = [job for job in self.meta.loads if job.id != request.request_id]

    def build_connector_meta(self, output: Any) -> Meta:
        """Tell the ranks what to load, and what to save after the forward pass."""
        fresh = [] if output is None else output.new_requests
        for data in fresh:
            self.begin(data)
        for data in [] if output is None else [*fresh, *output.cached_requests]:
            state = self.requests.get(data.request_id)
            if state is not None:
                self.advance(state, data)
        meta, self.meta = self.meta, Meta()
        return meta

    def begin(self, data: Any) -> None:
        """A request is in an output for the first time: if it had a load, that is over."""
        state = self.requests.get(data.request_id)
        if state is not None:
            state.tokens, state.pages = [], []
            state.loading = False

    def advance(self, state: State, data: Any) -> None:
        """Learn what a request got, and plan its saves."""
        pages = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
        self.take(pages)
        state.tokens.extend(data.new_tokens)
        state.pages.extend([] for _ in range(len(pages) - len(state.pages)))
        for mine, more in zip(state.pages, pages, strict=True):
            mine.extend(more)
        self.extend(state, state.tokens)
        full = self.full(state, data)
        items = self.items(state, state.pages, state.saved, full)
        items = [item for item in items if not self.store.has(item.key, item.group)]
        state.saved = max(state.saved, full)
        if items:
            state.issued = True
            self.meta.saves.append(Job(data.request_id, items))

    def full(self, state: State, data: Any) -> int:
        """Blocks whose every token is computed when this step's forward pass is over."""
        computed: int = data.computed_position + data.num_scheduled_tokens
        return min(computed, len(state.tokens)) // self.block

    def request_finished(self, request: Any, pages: list[int]) -> bool:
        """Whether copies may still use its pages."""
        return self.request_finished_by_layer_group(request, [pages])

    def request_finished_by_layer_group(self, request: Any, pages: list[list[int]]) -> bool:
        """Whether copies may still use its pages."""
        state = self.requests.pop(request.request_id, None)
        return state is not None and (state.issued or state.loading)


class ReferenceWorker:
    """A rank's side."""

    def __init__(self, store: Store, rank: int, lag: int) -> None:
        self.store = store
        self.rank = rank
        self.lag = lag
        self.meta = Meta()
        self.regions: list[list[Tensor]] = []
        self.loads: list[Job] = []
        self.saves: list[Job] = []
        self.asked: tuple[set[int], set[int]] = (set(), set())
        store.ranks[rank] = {}

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """There is nothing to do at the end of a forward pass: ``wait_for_save`` does it."""
        return None

    def register_kv_caches(self, pool: Tensor) -> None:
        """One tensor of all pages and layers."""
        self.regions = [[pool.view(torch.uint8).view(len(pool), -1)]]

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Pages per layer group."""
        self.regions = [[region.as_tensor() for region in group.regions] for group in layout.groups]
        self.store.windows = [group.window_size for group in layout.groups]

    def bind_connector_meta(self, meta: Meta | None) -> None:
        """Wait for saves out of pages that are somebody else's from now on."""
        self.meta = meta or Meta()
        self.fence(self.meta.taken)

    def fence(self, taken: set[tuple[int, int]]) -> None:
        """Finish the saves that read these pages."""
        for job in list(self.saves):
            if any((item.group, item.page) in taken for item in job.items):
                self.saves.remove(job)
                self.save(job)

    def start_load_kv(self, stream: object) -> None:
        """Begin the loads."""
        for job in self.meta.loads:
            if job.asynchronous:
                job.wait = self.lag
                self.loads.append(job)
            else:
                self.load(job)

    def wait_for_layer_load(self, layer: int, stream: object) -> None:
        """Loads that a step needs are over before its layers run."""

    def save_kv_layer(self, layer: int, stream: object) -> None:
        """Whole blocks are saved after the last layer."""

    def wait_for_save(self, stream: object) -> None:
        """Begin the saves."""
        for job in self.meta.saves:
            job.wait = self.lag
            self.saves.append(job)
        self.meta.saves = []

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        """What is over of what was asked for."""
        self.asked[0].update(saving)
        self.asked[1].update(loading)
        self.move()
        reading = {job.id for job in self.loads}
        writing = {job.id for job in self.saves}
        return self.over(0, reading | writing), self.over(1, reading)

    def over(self, kind: int, busy: Iterable[int]) -> list[int]:
        """Ids that were asked for and are not busy; each once."""
        done = sorted(self.asked[kind].difference(busy))
        self.asked[kind].difference_update(done)
        return done

    def move(self) -> None:
        """Time passes: copies get done."""
        for jobs, do in ((self.loads, self.load), (self.saves, self.save)):
            for job in list(jobs):
                job.wait -= 1
                if job.wait < 0:
                    jobs.remove(job)
                    do(job)

    def load(self, job: Job) -> None:
        """Copy into pages."""
        for item in job.items:
            data = self.store.get(self.rank, item)
            if data is not None:
                self.write(item, data)

    def save(self, job: Job) -> None:
        """Copy out of pages."""
        for item in job.items:
            self.store.put(self.rank, item, self.read(item))

    def read(self, item: Item) -> Tensor:
        """A page's bytes."""
        return torch.cat([region[item.page] for region in self.regions[item.group]])

    def write(self, item: Item, data: Tensor) -> None:
        """Put a page's bytes in place."""
        at = 0
        for region in self.regions[item.group]:
            region[item.page] = data[at : at + region.shape[1]]
            at += region.shape[1]


def reference(
    *,
    asynchronous: bool = True,
    lag: int = 2,
    scheduler: type[ReferenceScheduler] = ReferenceScheduler,
    worker: type[ReferenceWorker] = ReferenceWorker,
) -> Connector:
    """The reference connector, or one with other sides.

    Args:
        asynchronous: Whether loads are asynchronous.
        lag: Polls that a copy takes on rank 0; one more on each further rank.
        scheduler: Class of the scheduler's side.
        worker: Class of the ranks' sides.
    """
    store = Store()
    return Connector(
        scheduler=lambda args: scheduler(args, store, asynchronous=asynchronous),
        worker=lambda args, rank: worker(store, rank, lag + rank),
    )
