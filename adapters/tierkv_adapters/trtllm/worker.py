"""The worker's half of the connector: one for each rank, called by the runtime's executor.

All copies run in the engine's own threads and streams. The hooks start them and ask after them; the
only one that waits is ``bind_connector_meta``, for copies out of pages that this very step is going
to overwrite.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from tierkv.blocking import CacheManager
from tierkv.errors import ConfigError
from tierkv_adapters.remote.server import RemoteServer
from tierkv_adapters.serving.managers import is_lossy, rank_config
from tierkv_adapters.serving.orders import StepOrders
from tierkv_adapters.serving.pages import PagePools, block_tokens_for
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.registry import announce, withdraw
from tierkv_adapters.trtllm.bases import WorkerBase, rank_of
from tierkv_adapters.trtllm.guarding import guarded
from tierkv_adapters.trtllm.identity import identity_of
from tierkv_adapters.trtllm.lost import Ending, LostLoadError
from tierkv_adapters.trtllm.metadata import StepMeta
from tierkv_adapters.trtllm.pools import flat_groups, layout_groups
from tierkv_adapters.trtllm.requests import request_name
from tierkv_adapters.trtllm.settings import check_llm_args, read_config
from tierkv_adapters.trtllm.shapes import RankFacts, host_name, socket_path, write_facts
from tierkv_adapters.trtllm.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.blocks import AdapterId
    from tierkv.layout import Space
    from tierkv_adapters.serving.pages import PageGroup

__all__ = ["TierKVConnectorWorker"]

_log = logging.getLogger("tierkv.trtllm")
_MEMORY: Final = ("host", "device")
_PATIENCE_S: Final = 1.0
_LOOK_S: Final = 0.0005


def _none_finished(_: object) -> tuple[list[int], list[int]]:
    return [], []


def _nothing_lost(_: object) -> str | None:
    return None


class TierKVConnectorWorker(WorkerBase):
    """``connector_worker_class``; see the module.

    Args:
        llm_args: The runtime's settings. Ours come from the file that ``TLLM_TIERKV_CONFIG`` names.
        rank: Which rank this is; None asks MPI.

    Raises:
        ConfigError: if a setting of either is refused, by name; or if the weights cannot be told
            from others.
    """

    supports_attention_dp = False

    def __init__(self, llm_args: Any, rank: int | None = None) -> None:
        check_llm_args(llm_args)
        super().__init__(llm_args)
        self._config = read_config()
        if is_lossy(self._config.engine):
            raise ConfigError(
                "a lossy codec needs pages whose axes are known, which TensorRT-LLM does not tell: "
                "configure 'raw', 'planes', 'lz4' or 'zstd'"
            )
        self._rank_of = rank_of(llm_args, rank)
        self._identity = identity_of(llm_args, self._config, self._rank_of)
        self.errors = 0
        self._manager: CacheManager | None = None
        self._rank: Rank | None = None
        self._server: RemoteServer | None = None
        self._facts: RankFacts | None = None
        self._foreign = False
        self._directory: str | None = None  # where the ranks of this machine meet
        self._ending = Ending(*self._rank_of)
        self._windowed = False
        self._saved: set[str] = set()  # whose saves may be under way; kept where windows slide
        self._transfers = Transfers(lambda text: _log.error("tierkv: %s", text))

    # ------------------------------------------------------------------ start-up and end

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the flat pool, and open this rank's engine.

        Raises:
            ConfigError, LayoutError, BackendError: if it cannot be served.
        """
        args = self._llm_args.kv_cache_config
        self._refuse_windows(args)
        self._serve(flat_groups(kv_cache_tensor, int(args.tokens_per_block)))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Take pools of layer groups, and open this rank's engine.

        Raises:
            ConfigError, LayoutError, BackendError: if it cannot be served.
        """
        self._serve(layout_groups(layout))

    def _refuse_windows(self, args: Any) -> None:
        windows = getattr(args, "max_attention_window", None) or []
        longest = getattr(self._llm_args, "max_seq_len", None)
        if any(longest is None or int(window) < int(longest) for window in windows):
            raise ConfigError(
                f"kv_cache_config.max_attention_window = {list(windows)!r}: blocks of the flat "
                "pool do not tell which of them a window has passed; set "
                "kv_cache_config.use_kv_cache_manager_v2 = true, or leave the windows out"
            )

    def _serve(self, groups: tuple[PageGroup, ...]) -> None:
        self.shutdown()  # the runtime may measure with one cache and then make another
        rank, world = self._rank_of
        pools = PagePools(groups, numbered="apart")
        size = block_tokens_for(groups, self._config.serving.block_tokens)
        engine = rank_config(self._config.engine, rank, world)
        memory = engine.tiers[0]
        if memory.kind not in _MEMORY:
            raise ConfigError(
                f"the first tier is {memory.kind!r}: TensorRT-LLM is offered only what lies in "
                "memory; put a 'host' tier before it"
            )
        self._facts = RankFacts(
            rank,
            world,
            self._identity,
            pools.layout(size),
            size,
            tuple(group.page_tokens for group in groups),
            memory.capacity_bytes,
            sum(1 << at for at, tier in enumerate(engine.tiers) if tier.kind in _MEMORY),
        )
        self._manager = CacheManager(engine).open()
        self._windowed = any(group.window is not None for group in groups)
        self._rank = Rank(self._manager, pools, self._spaces(self._facts, self._manager))
        self._transfers = Transfers(lambda text: _log.error("tierkv: %s", text))
        _log.info(
            "tierkv: rank %d of %d keeps blocks of %d tokens in %s",
            *(rank, world, size, ", ".join(f"{t.name} ({t.capacity})" for t in engine.tiers)),
        )

    @staticmethod
    def _spaces(facts: RankFacts, manager: CacheManager) -> Callable[[AdapterId | None], Space]:
        known: dict[AdapterId | None, Space] = {}

        def space(adapter: AdapterId | None) -> Space:
            if adapter not in known:
                known[adapter] = facts.space(adapter)
                manager.bind(known[adapter])
            return known[adapter]

        space(None)
        return space

    def shutdown(self) -> None:
        """End this rank's engine: what is queued for slower tiers is written first. Idempotent."""
        if self._server is not None:
            withdraw(self._server.path)
            self._server.close()
            self._server = None
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    # ------------------------------------------------------------------ steps

    def register_forward_pass_callable(self) -> None:
        """Nothing: ``wait_for_save`` comes on the same stream, also after a replayed graph."""

    @guarded(lambda _: None)
    def bind_connector_meta(self, metadata: object) -> None:
        """Take a step's orders; waits for copies out of pages that the step overwrites."""
        super().bind_connector_meta(metadata)
        if not isinstance(metadata, StepMeta):
            return
        if metadata.host == host_name():
            self._directory = metadata.directory
        if self._rank is None:
            return
        orders = metadata.orders
        self._transfers.ordered(orders, metadata.dropped)
        if self._windowed and any(orders.taken):
            self._let_saves_end(self._rank)
        if self._windowed:
            self._saved |= {order.id for order in orders.saves}
        self._rank.begin(orders)
        if self._server is None and not self._foreign:
            self._meet(metadata)

    def _let_saves_end(self, rank: Rank) -> None:
        """Let the last step's saves read their pages before those that a window left are reused.

        A save that comes too late would be dropped, and the block be a hole in every prompt that
        goes on behind it. It began a whole step ago: as a rule there is nothing to wait for.
        """
        until = time.monotonic() + _PATIENCE_S
        while self._saved:
            self._saved = {name for name in self._saved if rank.saving(name)}
            if not self._saved or time.monotonic() >= until:
                break
            time.sleep(_LOOK_S)

    def _meet(self, meta: StepMeta) -> None:
        """Open this rank's socket where the scheduler's side looks for it; at the first step."""
        assert self._manager is not None
        assert self._facts is not None
        if meta.host != host_name():
            self._foreign = True
            _log.error(
                "tierkv: the scheduler runs on %s, this rank on %s, whose engine it cannot ask: "
                "nothing will be offered; run all ranks on one machine",
                *(meta.host, host_name()),
            )
            return
        path = socket_path(meta.directory, self._facts.rank)
        server = RemoteServer(self._manager, path)
        server.start()
        self._server = server
        announce(path, self._manager)
        write_facts(meta.directory, self._facts)

    @guarded(lambda _: None)
    def start_load_kv(self, stream: Any) -> None:
        """Start the step's loads; the request of a load is not in the batch until it is over."""
        if self._rank is not None:
            with _on(stream):
                self._rank.start_loads()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: all loads are asynchronous; in a replayed graph it would not be called."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: blocks are saved whole, all layers at once, behind the forward pass."""

    @guarded(lambda _: None)
    def wait_for_save(self, stream: Any) -> None:
        """Start the step's saves behind the forward pass on this stream; waits for none."""
        if self._rank is not None:
            with _on(stream):
                self._rank.start_saves()

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Ids of saves and of loads that are over; needs no further step of the engine.

        Raises:
            LostLoadError: on all ranks at the same call, if what was offered has been out of reach
                for ``serving.lost_after``: its request can neither run nor be given back, and would
                wait for ever. See :mod:`tierkv_adapters.trtllm.lost`.
        """
        found = self._over(finished_gen_req_ids, started_loading_req_ids)
        why = self._ending.call(self._lost(), self._directory)
        if why is not None:
            raise LostLoadError(
                f"{why}. TensorRT-LLM counts what it was offered as computed and cannot be told "
                "that a load failed, so the engine ends instead of serving what lies in those "
                "pages. serving.lost_after says how long is waited before ('never': for ever)"
            )
        return found

    @guarded(_nothing_lost)
    def _lost(self) -> str | None:
        return self._transfers.lost(time.monotonic(), self._config.serving.lost_after)

    @guarded(_none_finished)
    def _over(self, finished: Sequence[int], started: Sequence[int]) -> tuple[list[int], list[int]]:
        transfers, rank, now = self._transfers, self._rank, time.monotonic()
        transfers.announced(finished, started, now)
        if rank is None:
            return transfers.finished(lambda _: False)
        again = transfers.ended(rank.poll(), now)
        if again:
            rank.begin(StepOrders(loads=again))
            rank.start_loads()
        return transfers.finished(lambda number: rank.saving(request_name(number)))

    # ------------------------------------------------------------------ figures

    def stats(self) -> dict[str, int | float]:
        """Counts of this rank by name."""
        found: dict[str, int | float] = asdict(self._transfers.counters) | {"errors": self.errors}
        if self._rank is not None:
            counters = self._rank.counters.snapshot()
            found |= counters | {"errors": self.errors + int(counters["errors"])}
        return found

    @property
    def manager(self) -> CacheManager | None:
        """This rank's engine, once the pools are known."""
        return self._manager


def _on(stream: Any) -> contextlib.AbstractContextManager[object]:
    """Make the runtime's stream the current one of this thread, where it is one of CUDA."""
    import torch

    if torch.cuda.is_available() and isinstance(stream, torch.cuda.Stream):
        return torch.cuda.stream(stream)
    return contextlib.nullcontext()
