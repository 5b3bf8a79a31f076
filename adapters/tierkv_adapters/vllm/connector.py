"""``TierKVConnector``: what vLLM calls, handed on to the scheduler's or the worker's side.

vLLM makes one connector in the scheduler's process and one in each worker's; each holds one side.
The order of the calls is that of vLLM 0.25 to 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm.config
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from tierkv.errors import AttachError
from tierkv_adapters.vllm.logs import show_logs
from tierkv_adapters.vllm.metadata import TierKVHandshake, TierKVMetadata, TierKVWorkerMetadata
from tierkv_adapters.vllm.scheduling.scheduler import SchedulerSide
from tierkv_adapters.vllm.stats import COUNTERS, TierKVPromMetrics, TierKVStats
from tierkv_adapters.vllm.vocabulary import hit_sources, kv_events
from tierkv_adapters.vllm.worker import (
    WorkerSide,
    check_policy,
    check_settings,
    connector_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

__all__ = ["TierKVConnector"]


class _Sides(KVConnectorBase_V1):
    """Makes the side that is asked for, and ends it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        show_logs()
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._ended = TierKVWorkerMetadata()
        self._counted: dict[str, int] = {}
        self._tiers: tuple[str, ...] = ()
        _check_reporting(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            settings = connector_settings(vllm_config).settings
            self._scheduler_side = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            self._worker_side = WorkerSide(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss: no request waits for one."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's side.

        Raises:
            AttachError: in a worker.
        """
        if self._scheduler_side is None:
            raise AttachError("this connector is a worker's: ask the scheduler's for this")
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's side.

        Raises:
            AttachError: in the scheduler.
        """
        if self._worker_side is None:
            raise AttachError("this connector is the scheduler's: ask a worker's for this")
        return self._worker_side

    def shutdown(self) -> None:
        """Close whatever this side has open."""
        for side in (self._scheduler_side, self._worker_side):
            if side is not None:
                side.close()

    def get_kv_connector_stats(self) -> TierKVStats | None:
        """What this side counted since the last step."""
        if self._scheduler_side is not None:
            before, self._counted = self._counted, self._scheduler_side.stats()
            stats = TierKVStats.of_scheduler(before, self._counted)
        else:
            stats = TierKVStats.of(self.worker_side.counted())
        return None if stats.is_empty() else stats


class _WorkerCalls(_Sides):
    """What vLLM calls in a worker."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the rank's engine over vLLM's pages.

        Raises:
            ConfigError: if a connector around this one is set to fail requests.
            AttachError: if they are those of another engine in this process. vLLM keeps one
                worker's connector for a whole process and hands it to whoever comes next, whose
                pages would be taken for those of the first.
        """
        current = _owner(self._vllm_config)
        try:
            check_policy(current.kv_transfer_config)  # of a MultiConnector, too
            self.worker_side.register(kv_caches)
        except BaseException:
            # this engine will not be: the next one in this process has to get one of its own
            ensure_kv_transfer_shutdown()
            raise

    def get_handshake_metadata(self) -> TierKVHandshake | None:
        """What the scheduler's side needs to know of this rank."""
        facts = self.worker_side.handshake()
        return None if facts is None else TierKVHandshake(facts)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Take the step's orders before any page of it is written."""
        self.worker_side.begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the step's orders, if they were not taken yet."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.begin(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        super().clear_connector_metadata()
        self.worker_side.end()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads."""
        self.worker_side.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before a forward pass reads them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves are gathered after the forward pass."""

    def wait_for_save(self) -> None:
        """Submit the step's saves, without waiting: :meth:`handle_preemptions` is the fence."""
        self.worker_side.start_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load ended; what else they tell is kept for the calls that follow."""
        results = self.worker_side.results()
        self._failed = results.failed
        self._invalid |= results.invalid
        self._ended.loads.update(results.loads)
        self._ended.saves.update(results.saves)
        return None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose load ended, and those of them that are computed anew as a whole."""
        results = super().get_transfer_results(finished_req_ids)  # asks get_finished()
        results.failed_recving = self._failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that loads reported by this step left without content."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> TierKVWorkerMetadata | None:
        """What ended, for the scheduler's side."""
        ended, self._ended = self._ended, TierKVWorkerMetadata()
        return ended if ended.loads or ended.saves else None


class _SchedulerCalls(_WorkerCalls):
    """What vLLM calls in the scheduler."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """Learn of the ranks, and listen to what they hold from now on."""
        facts = [handshake.facts for handshake in metadata.values()]
        self._tiers = tuple(kind for _, kind in facts[0]["tiers"]) if facts else ()
        self.scheduler_side.started({one["rank"]: one for one in facts})

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """As above, for versions that know no pipeline ranks here."""
        self.set_xfer_handshake_metadata_pp_aware(metadata)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens behind those computed can be brought, and that it happens meanwhile."""
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pages were allocated."""
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Which kind of tier tokens come from: the slowest that is read."""
        found = self.scheduler_side.hit_sources(request, num_external_tokens)
        return hit_sources(found, self._tiers)

    def build_connector_meta(self, scheduler_output: Any) -> TierKVMetadata:
        """The step's orders."""
        orders = self.scheduler_side.build_connector_meta(scheduler_output)
        return TierKVMetadata(orders, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks told of the step."""
        self.scheduler_side.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; its pages are vLLM's at once."""
        return self.scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As above, for every group."""
        return self.scheduler_side.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        """KV events since the last call, in vLLM's words."""
        return kv_events(self.scheduler_side.take_events())

    def reset_cache(self) -> bool | None:
        """Forget every stored block; sessions lose their history."""
        return self.scheduler_side.reset_cache()


class TierKVConnector(_SchedulerCalls, SupportsHMA):
    """Tiers, sessions and verified loads for vLLM; a best-effort cache, never a hand-off.

    Args:
        vllm_config: vLLM's configuration.
        role: Which side this is.
        kv_cache_config: vLLM's ``KVCacheConfig``.

    Raises:
        ConfigError: if a setting is unknown, malformed or cannot be honoured.
        AttachError: if this model, or this way of running vLLM, cannot be served.
    """

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loads and saves are whole outside of graphs; asked before the model is loaded.

        Raises:
            ConfigError: if a setting is unknown or malformed, or there is no tier.
        """
        check_settings(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any layout will do; asked before the model is loaded.

        Raises:
            ConfigError: if a setting is unknown, malformed or cannot be honoured.
        """
        connector_settings(vllm_config)
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierKVStats:
        """Wrap increments that came from another process."""
        return TierKVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierKVPromMetrics:
        """Counters on vLLM's Prometheus page."""
        return TierKVPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, COUNTERS
        )


def _owner(mine: Any) -> Any:
    """Configuration of the engine that calls, which has to be the one of this connector."""
    current = getattr(vllm.config, "get_current_vllm_config_or_none", lambda: None)()
    if current is None:
        return mine
    if current is mine or current.instance_id == mine.instance_id:
        return current
    raise AttachError(
        "this process has another vLLM engine with a connector, and vLLM keeps one connector for a "
        "process: end the other one first (llm.llm_engine.engine_core.shutdown()), or let each "
        "have a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)"
    )


def _check_reporting(kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    several = len(groups) > 1 or bool(getattr(kv_cache_config, "has_mamba_layers", False))
    if several and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        raise AttachError(
            "this vLLM cannot be told that a load failed for a model with several KV cache groups, "
            "or with recurrent states: update vLLM (0.30 can), or set "
            "--disable-hybrid-kv-cache-manager"
        )
