"""The connector's scheduler side over ranks that keep cells in a dictionary, or over real ones."""

from __future__ import annotations

import contextlib
import random
import time
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tierkv
from tests.serving.dict_rank import DictRank, Faults, Meta
from tierkv.blocking import CacheManager
from tierkv.blocks import AdapterId, Identity
from tierkv.layout import Group as LayoutGroup
from tierkv.layout import GroupKind, Layout, TensorSpec
from tierkv.layout import Layer as LayoutLayer
from tierkv.testing.serving import Mode, Replay, TransferResults
from tierkv_adapters.serving.pages import PagedLayer, PageGroup, PagePools
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.settings import ServingSettings
from tierkv_adapters.vllm.facts import space_of
from tierkv_adapters.vllm.scheduling.scheduler import SchedulerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.testing.serving import Memory
    from tierkv_adapters.serving.orders import StepOrders
    from tierkv_adapters.serving.replicas import ReplicaIndex

GUARD = 60.0


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class RealRank:
    """A :class:`~tierkv_adapters.serving.rank.Rank` behind vLLM's worker calls."""

    def __init__(
        self, mode: Mode, memory: Memory, facts: Mapping[str, Any], manager: CacheManager
    ) -> None:
        self._mode = mode
        self.manager = manager
        self.pools = PagePools(page_groups(mode, memory))
        self.rank = Rank(
            manager,
            self.pools,
            lambda adapter: space_of(
                facts["identity"], facts["layout"], facts["block_tokens"], adapter
            ),
        )
        self._pages: dict[str, list[int]] = {}
        self._loading: dict[str, tuple[int, list[int]]] = {}
        self._ended: list[Any] = []

    def handle_preemptions(self, orders: StepOrders) -> None:
        for grown in orders.grown:
            before = [] if grown.replace else self._pages.get(grown.id, [])
            self._pages[grown.id] = [*before, *grown.pages[0]]
        for order in orders.loads:
            self._loading[order.id] = order.stop, list(self._pages[order.id])
        for name in (*orders.voided, *orders.ended):
            self._pages.pop(name, None)
        self.rank.begin(orders)

    def bind_connector_metadata(self, orders: StepOrders) -> None:
        pass

    def start_load_kv(self, context: object) -> None:
        self.rank.start_loads()

    def wait_for_save(self) -> None:
        self.rank.start_saves()

    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        self._ended = [one for one in self.rank.poll() if one.kind == "load"]
        results = TransferResults({*()}, {one.id for one in self._ended})
        if len(self._mode.groups) > 1:
            results.failed_recving = {o.id for o in self._ended if o.tokens < self._stop(o.id)}
        return results

    def _stop(self, name: str) -> int:
        return self._loading[name][0]

    def get_block_ids_with_load_errors(self) -> set[int]:
        if len(self._mode.groups) > 1:
            return set()
        size, bad = self._mode.groups[0].page_tokens, set()
        for one in self._ended:
            stop, pages = self._loading[one.id]
            bad |= set(pages[one.tokens // size : -(-stop // size)])
        return bad

    def build_connector_worker_meta(self) -> Meta | None:
        meta = Meta({one.id: (one.tokens, one.reason) for one in self._ended})
        return meta if meta.loads else None

    def clear_connector_metadata(self) -> None:
        for one in self._ended:
            del self._loading[one.id]
        self._ended = []


def page_groups(mode: Mode, memory: Memory) -> list[PageGroup]:
    """The replay's cells as opaque pages of eight bytes a token."""
    groups = []
    for number, (spec, pool) in enumerate(zip(mode.groups, memory.pools, strict=True)):
        cells = torch.from_numpy(pool.view(np.uint8)).view(len(pool), 1, spec.page_tokens, 8)
        kind = GroupKind.FULL if spec.window is None else GroupKind.SLIDING
        layer = PagedLayer(number, {"page": cells}, "test")
        groups.append(PageGroup(kind, spec.window, spec.page_tokens, (layer,)))
    return groups


def layout_of(mode: Mode) -> Layout:
    """The layout of such pages."""
    return Layout(
        tuple(
            LayoutGroup(
                GroupKind.FULL if spec.window is None else GroupKind.SLIDING,
                (LayoutLayer(number, (TensorSpec("page", "uint8", (1, 8), "test"),)),),
                spec.window,
            )
            for number, spec in enumerate(mode.groups)
        )
    )


def handshakes(mode: Mode, block: int) -> dict[int, dict[str, Any]]:
    """What the ranks tell of themselves."""
    layout = layout_of(mode)
    shapes = tuple(
        (group.kind.value, group.window, spec.page_tokens)
        for group, spec in zip(layout.groups, mode.groups, strict=True)
    )
    return {
        rank: {
            "rank": rank,
            "world": mode.ranks,
            "identity": Identity("model", "weights", shard=(rank, mode.ranks)),
            "layout": layout,
            "block_tokens": block,
            "groups": shapes,
            "socket": "",
            "pid": 0,
            "tiers": (("ram", "host"),),
        }
        for rank in range(mode.ranks)
    }


def digest(lora: Any) -> AdapterId:
    """Identity of a stand-in adapter."""
    return AdapterId(lora.lora_name, lora.version)


class Rig:
    """A replay with the connector in it.

    Args:
        mode: How the engine runs.
        block: Tokens of a block.
        faults: What goes wrong in dictionary ranks.
        settings: The adapter's settings.
        real: Whether ranks are real ones, over an engine with a host tier.
        digest: Reads an adapter's files.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        block: int = 4,
        faults: Faults | None = None,
        settings: ServingSettings | None = None,
        real: bool = False,
        digest: Callable[[Any], AdapterId] = digest,
    ) -> None:
        self.digest = digest
        self.mode = Mode() if mode is None else mode
        self.block = block
        self.faults = Faults() if faults is None else faults
        self.settings = ServingSettings() if settings is None else settings
        self.real = real
        self.clock = Clock()
        self.stack = contextlib.ExitStack()
        self.ranks: list[Any] = []
        patience = {"idle": lambda: None, "patience": 2000}
        self.replay = Replay(self.mode, self.make, **({} if real else patience))  # type: ignore[arg-type]

    def make(self, memories: Sequence[Memory]) -> tuple[SchedulerSide, list[Any]]:
        """Both sides over each rank's memory."""
        facts = handshakes(self.mode, self.block)
        groups = [SimpleNamespace(enable_kv_transfer=True) for _ in self.mode.groups]
        overlap = SimpleNamespace(async_scheduling=self.mode.overlap)
        if self.real:
            for rank, memory in enumerate(memories):
                manager = CacheManager(
                    name=f"rank{rank}", tiers=[tierkv.Tier("host", capacity="64MiB")]
                )
                self.stack.enter_context(manager)
                worker = RealRank(self.mode, memory, facts[rank], manager)
                self.stack.callback(worker.rank.close)
                self.ranks.append(worker)
        else:
            for rank, memory in enumerate(memories):
                self.ranks.append(DictRank(self.mode, memory, rank, facts[rank], self.faults))
        self.side = SchedulerSide(
            SimpleNamespace(scheduler_config=overlap),
            SimpleNamespace(kv_cache_groups=groups),
            self.settings,
            clock=self.clock,
            digest=self.digest,
            link=self.link,
        )
        self.side.started(facts)
        self.stack.callback(self.side.close)
        return self.side, self.ranks

    def link(self, number: int, facts: Mapping[str, Any], index: ReplicaIndex) -> Any:
        """Connect a rank."""
        if not self.real:
            self.ranks[number].index = index
            index.complete(number)
            return self.ranks[number]
        from tierkv_adapters.remote.feeds import LocalFeed
        from tierkv_adapters.vllm.scheduling.links import RankLink

        feed = LocalFeed(self.ranks[number].manager, index, number)
        assert feed.start(GUARD)
        return RankLink(number, feed, self.ranks[number].manager, owned=False)

    def settle(self) -> None:
        """Wait until saves are over and the index knows of them."""
        for rank in self.ranks if self.real else ():
            assert rank.rank.drain(GUARD)
            rank.manager.flush()
            for _ in range(3):  # the feed tells once a turn of the loop
                rank.manager.call(_turn)
        while not self.real and any(rank._saves for rank in self.ranks):
            self.replay.step()

    def until(self, there: Callable[[], bool]) -> bool:
        """Wait for another thread; False: it took too long."""
        end = time.monotonic() + GUARD
        while not there() and time.monotonic() < end:
            time.sleep(0.001)
        return there()

    def close(self) -> None:
        """Take everything down."""
        self.stack.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)


def tokens(count: int, seed: int = 1) -> tuple[int, ...]:
    """Token ids of a prompt."""
    dice = random.Random(seed)
    return tuple(dice.randrange(1000) for _ in range(count))


def ids(values: Sequence[int]) -> array[int]:
    """Token ids as orders hold them."""
    return array("I", values)
