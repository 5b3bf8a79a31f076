"""tierkv as a secondary tier of vLLM's OffloadingConnector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv_adapters.vllm.tier.counters import TIER_COUNTERS, TIER_GAUGES
from tierkv_adapters.vllm.tier.facts import replica_of, tier_space
from tierkv_adapters.vllm.tier.settings import TierSettings
from tierkv_adapters.vllm.tier.shim import detect
from tierkv_adapters.vllm.tier.side import TierSide

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["TierKVTier"]

_PREFIX = "vllm:tierkv_tier_"
API = detect()


class TierKVTier(API.tier):  # type: ignore[name-defined] # found at run time
    """Keeps chunks of vLLM's CPU tier in tierkv's tiers: bounded, verified, durable, in time.

    One entry of ``secondary_tiers``::

        {"type": "TierKVTier", "module_path": "tierkv_adapters.vllm.tier",
         "config": "tierkv.toml", "load_deadline": "2s", "ttl": "6h"}

    Every load is verified; what is damaged, late or gone is reported as not loaded, is a miss for
    ``retry_after``, and vLLM computes it. Disk and memory are bounded by the engine's capacities.
    Nothing here blocks the scheduler's thread; the engine's loop has a thread of its own.

    Args:
        offloading_spec: vLLM's, which tells whose KV it is.
        primary_kv_view: vLLM's CPU tier ``[chunks, bytes]``.
        tier_type: vLLM's name of this tier.
        **given: What this vLLM adds, and the settings of
            :class:`~tierkv_adapters.vllm.tier.settings.TierSettings`.

    Raises:
        AttachError: if the KV cannot be told from that of others.
        ConfigError: if a setting is unknown or cannot be honoured.
        BackendError: if a tier cannot be used.
    """

    medium = API.medium

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **given: Any
    ) -> None:
        arguments = {
            "offloading_spec": offloading_spec,
            "primary_kv_view": primary_kv_view,
            "tier_type": tier_type,
            **given,
        }
        super().__init__(**API.base_arguments(arguments))
        settings = TierSettings.parse(API.settings(arguments))
        self._label = tier_type
        self._told: dict[str, int | float] = {}
        self.locality = API.locality(settings.locality)
        row_bytes = primary_kv_view.nbytes // max(1, len(primary_kv_view))
        replica = replica_of(offloading_spec)
        self.side = TierSide(
            tier_space(offloading_spec, row_bytes, settings),
            primary_kv_view,
            settings,
            number=replica.number,
            replicas=replica.replicas,
        )

    def lookup(self, key: bytes, req_context: Any = None) -> Any:
        """Whether a chunk could be loaded now."""
        return API.answer(self.side.lookup(key))

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to keep chunks."""
        keys = list(job_metadata.keys)
        self.side.submit_store(job_metadata.job_id, keys, API.rows(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to bring chunks."""
        keys = list(job_metadata.keys)
        self.side.submit_load(job_metadata.job_id, keys, API.rows(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that have ended since the last call."""
        return [
            API.result(
                ended.number,
                success=ended.success,
                keys=ended.keys,
                seconds=ended.seconds,
                size=ended.nbytes,
            )
            for ended in self.side.finished()
        ]

    def has_pending_work(self) -> bool:
        """Whether vLLM should go on stepping for this tier."""
        return self.side.busy()

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks are wanted as they come."""
        return API.new_request()

    def drain_jobs(self) -> None:
        """Wait until no job touches the CPU tier; bounded by the deadline of loads and 10 s.

        vLLM resets its caches then: see the setting ``weights_are_fixed``.
        """
        self.side.drain()

    def shutdown(self) -> None:
        """Close the engine. What it acknowledged was durable before."""
        self.side.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> Any:
        """Metrics on vLLM's Prometheus page; see ``TIER_COUNTERS``."""
        return API.metrics(_PREFIX, TIER_COUNTERS, TIER_GAUGES)

    def get_stats(self) -> Any:
        """What was counted since the last call."""
        now = self.side.counters.snapshot()
        grown = {name: value - self._told.get(name, 0) for name, value in now.items()}
        self._told = now
        return API.stats(_PREFIX, self._label, grown, {"chunks": self.side.chunks})
