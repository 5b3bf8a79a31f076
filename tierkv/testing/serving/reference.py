"""A small connector that is right: what the replay's mutants are broken copies of, and an example.

It keeps pages in a dictionary of the process, in blocks of one page, and copies at once: loads end
in the step that orders them. ``lag`` lets loads and saves take steps, as real ones do; saves are
then fenced. ``losses`` lets pages get lost between lookup and load.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.testing.serving.objects import TransferResults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tierkv.testing.serving.content import Memory
    from tierkv.testing.serving.objects import Mode, Request, StepOutput

__all__ = ["Copy", "ReferenceScheduler", "ReferenceWorker", "Step", "Store", "make_reference"]


class Copy(NamedTuple):
    """Pages to copy for a request: (group, key, page)."""

    request: str
    pages: tuple[tuple[int, bytes, int], ...]


@dataclass
class Step:
    """Metadata of one step."""

    taken: set[int] = field(default_factory=set)
    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)
    sync: bool = False


@dataclass
class Store:
    """Where the pages are: per rank, (group, key) -> cells."""

    ranks: list[dict[tuple[int, bytes], NDArray[Any]]]
    lag: int = 0
    losses: float = 0.0  # share of loads before which a page is lost
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def has(self, group: int, key: bytes) -> bool:
        """Whether every rank holds a page."""
        return all((group, key) in rank for rank in self.ranks)


class ReferenceScheduler:
    """The scheduler's side."""

    asynchronous = True

    def __init__(self, mode: Mode, store: Store) -> None:
        self._mode = mode
        self._store = store
        self._size = mode.groups[0].page_tokens
        self._requests: dict[str, Request] = {}
        self._saved: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._step = Step(sync=not self.asynchronous)

    def root(self, request: Request) -> bytes:
        """What a request's keys start from: everything but the tokens."""
        return repr((request.cache_salt, request.lora_request)).encode()

    def keys(self, request: Request, tokens: int) -> list[bytes]:
        """Key of each whole page of the first tokens."""
        media = {f.mm_position.offset: f.identifier for f in request.mm_features}
        state, found = self.root(request), []
        for at in range(tokens // self._size):
            page = range(at * self._size, (at + 1) * self._size)
            part = [(request.all_token_ids[place], media.get(place)) for place in page]
            state = hashlib.sha256(state + repr(part).encode()).digest()
            found.append(state)
        return found

    def plain(self, request: Request) -> bool:
        """Whether a request's KV is shared with others at all."""
        return request.pooling_params is None and request.prompt_embeds is None

    def limit(self, request: Request) -> int:
        """Tokens that may be offered; one less than all where a window's page would be missing."""
        count = request.num_tokens if self.asynchronous else request.num_tokens - 1
        for window, size in self._mode.groups:
            if window is not None and count >= window and (count - window + 1) % size == 0:
                return count - 1
        return count

    def first(self, window: int | None, tokens: int) -> int:
        """First page that a prefix of so many tokens needs."""
        return 0 if window is None else max(0, tokens - window + 1) // self._size

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """The longest prefix whose pages are all there."""
        self._computed[request.request_id] = computed
        if not self.plain(request) or request.skip_reading_prefix_cache:
            return 0, False
        keys = self.keys(request, self.limit(request))
        for count in range(len(keys), computed // self._size, -1):
            if all(
                self._store.has(number, key)
                for number, group in enumerate(self._mode.groups)
                for key in keys[self.first(group.window, count * self._size) : count]
            ):
                return count * self._size - computed, self.asynchronous
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, tokens: int) -> None:
        """Pages are there for what was offered."""
        if not tokens:
            return
        start = self._computed[request.request_id]
        stop = start + tokens
        self._step.loads.append(
            Copy(request.request_id, self.pages(request, blocks.get_block_ids(), start, stop))
        )
        self._saved[request.request_id] = stop

    def pages(
        self, request: Request, tables: Sequence[Sequence[int]], start: int, stop: int
    ) -> tuple[tuple[int, bytes, int], ...]:
        """The pages behind tokens ``[start, stop)`` that there are."""
        keys = self.keys(request, stop)
        return tuple(
            (number, keys[at], table[at])
            for number, table in enumerate(tables)
            for at in range(start // self._size, stop // self._size)
            if table[at]
        )

    def build_connector_meta(self, output: StepOutput) -> Step:
        """Save what is full after this step."""
        step, self._step = self._step, Step(sync=not self.asynchronous)
        step.taken = {page for group in output.fresh for page in group}
        state = output.kv_connector_block_state
        for name, count in output.num_scheduled_tokens.items():
            request = self._requests[name]
            sure = min(output.starts[name] + count, request.num_tokens)
            saved = self._saved.get(name, 0)
            stop = sure // self._size * self._size
            tables = state.get_block_ids(name) if state is not None else None
            if stop > saved and tables is not None and self.plain(request):
                step.saves.append(Copy(name, self.pages(request, tables, saved, stop)))
                self._saved[name] = stop
        return step

    def update_connector_output(self, output: Any) -> None:
        """Nothing is kept of it."""

    def request_finished(self, request: Request, tables: Any) -> tuple[bool, None]:
        """A request is over."""
        self._requests.pop(request.request_id)
        self._saved.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Forget everything."""
        for rank in self._store.ranks:
            rank.clear()
        return True


class ReferenceWorker:
    """One rank's side."""

    def __init__(self, mode: Mode, memory: Memory, store: Store, rank: int) -> None:
        self._pools = memory.pools
        self._store = store
        self._held = store.ranks[rank]
        self._lag = store.lag
        self._loads: list[tuple[int, Copy]] = []  # (steps to go, what)
        self._saves: list[tuple[int, Copy]] = []
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._step = Step()

    def handle_preemptions(self, step: Step) -> None:
        """The fence: copies out of pages that change hands end before anything is written."""
        for _, copy in [one for one in self._saves if self.touches(one[1], step.taken)]:
            self.save(copy)
        self._saves = [one for one in self._saves if not self.touches(one[1], step.taken)]

    def touches(self, copy: Copy, taken: set[int]) -> bool:
        """Whether a copy reads one of these pages."""
        return any(page in taken for _, _, page in copy.pages)

    def bind_connector_metadata(self, step: Step) -> None:
        """A step begins."""
        self._step = step

    def start_load_kv(self, context: Any) -> None:
        """Loads begin; synchronous ones are over at once."""
        if self._step.sync:
            for copy in self._step.loads:
                self.load(copy)
            self._done.clear()
            return
        self._loads += [(self._lag, copy) for copy in self._step.loads]

    def wait_for_save(self) -> None:
        """Saves begin."""
        self._saves += [(self._lag, copy) for copy in self._step.saves]

    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        """Time passes; what is over is reported."""
        for left, copy in self._saves:
            if left <= 0:
                self.save(copy)
        self._saves = [(left - 1, copy) for left, copy in self._saves if left > 0]
        for left, copy in self._loads:
            if left <= 0:
                self.load(copy)
        self._loads = [(left - 1, copy) for left, copy in self._loads if left > 0]
        done, self._done = self._done, set()
        failed, self._failed = self._failed, set()
        return TransferResults(finished_recving=done, failed_recving=failed)

    def save(self, copy: Copy) -> None:
        """Copy pages out."""
        for group, key, page in copy.pages:
            self._held[group, key] = self._pools[group][page].copy()

    def load(self, copy: Copy) -> None:
        """Copy pages in."""
        if copy.pages and self._store.dice.random() < self._store.losses:
            lost = self._store.dice.choice(copy.pages)
            self._held.pop(lost[:2], None)
        for group, key, page in copy.pages:
            held = self._held.get((group, key))
            if held is None:
                self._failed.add(copy.request)
                break
            self._pools[group][page] = held
        self._done.add(copy.request)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: failures are reported by request."""
        return set()

    def build_connector_worker_meta(self) -> None:
        """Nothing is told."""

    def clear_connector_metadata(self) -> None:
        """A step ended."""
        self._step = Step()


def make_reference(
    mode: Mode,
    memories: Sequence[Memory],
    *,
    lag: int = 0,
    losses: float = 0.0,
    scheduler: type[ReferenceScheduler] = ReferenceScheduler,
    worker: type[ReferenceWorker] = ReferenceWorker,
) -> tuple[ReferenceScheduler, list[ReferenceWorker]]:
    """Make both sides, or a mutant's."""
    store = Store([{} for _ in memories], lag, losses)
    return scheduler(mode, store), [
        worker(mode, memory, store, rank) for rank, memory in enumerate(memories)
    ]
