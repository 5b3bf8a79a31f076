"""Counters of the ranks and of the scheduler's side, on vLLM's Prometheus page and in its log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COUNTERS", "TierKVPromMetrics", "TierKVStats"]

_PREFIX = "vllm:tierkv_"

COUNTERS = {
    "loads": "Loads that ended, on every rank.",
    "loads_short": "Loads that brought less than they were to; the rest was computed.",
    "load_tokens": "Tokens brought into pages, on every rank.",
    "load_bytes": "Bytes brought into pages.",
    "load_seconds": "Seconds from order to end of loads.",
    "saves": "Saves that ended, on every rank.",
    "saves_skipped": "Saves dropped before they began, since their pages went to others.",
    "saves_failed": "Saves that did not store all of their blocks.",
    "save_tokens": "Tokens stored, or found to be there.",
    "save_blocks": "Blocks newly stored.",
    "save_bytes": "Bytes newly stored.",
    "save_seconds": "Seconds from order to end of saves.",
    "deadline_misses": "Loads that their deadline cut short.",
    "corrupt": "Loads that damaged bytes cut short.",
    "fence_waits": "Steps that waited for copies out of pages about to be overwritten.",
    "fence_seconds": "Seconds that such steps waited.",
    "fence_gave_up": "Copies cut short because such a step waited too long.",
    "errors": "Orders that made no sense, and failures that nobody foresaw.",
    "hints": "Hints that were followed, on every rank.",
    "hints_refused": "Hints that were not, or not to their end: no room, or a failure.",
    "scheduler_hints_unknown": "Actions of KV hints that mean nothing here; ignored.",
    "scheduler_hints_unreadable": "Actions of KV hints whose payload made no sense; ignored.",
    "scheduler_malformed": "Requests whose own settings could not be read; not cached.",
    "scheduler_requests": "Requests seen by the scheduler.",
    "scheduler_uncacheable": "Requests of which nothing may be loaded or stored.",
    "scheduler_lookups": "Prompts looked up.",
    "scheduler_offered_tokens": "Tokens offered to vLLM.",
    "scheduler_accepted_tokens": "Tokens that vLLM asked to be loaded.",
    "scheduler_loaded_tokens": "Of those, tokens that came.",
    "scheduler_loads": "Loads ordered.",
    "scheduler_failed_loads": "Loads that fell short.",
    "scheduler_failed_tokens": "Tokens computed after all because their load fell short.",
    "scheduler_blocked": "Offers cut short by a block that failed a short while ago.",
    "scheduler_misaligned": "Offers not made because vLLM's own hit ends inside a block.",
    "scheduler_saves": "Saves ordered.",
    "scheduler_saved_blocks": "Blocks in them.",
    "scheduler_unbacked_blocks": "Blocks not saved because pages of them were gone.",
}
"""What is counted, and what it means; the scheduler's own counts have a prefix."""


class TierKVStats(KVConnectorStats):
    """What was counted since the last time: a flat mapping of names to increments."""

    @classmethod
    def of(cls, counts: Mapping[str, int | float]) -> TierKVStats:
        """Wrap increments; those of zero are left out."""
        return cls(data={name: value for name, value in counts.items() if value})

    @classmethod
    def of_scheduler(cls, before: Mapping[str, int], after: Mapping[str, int]) -> TierKVStats:
        """Wrap what the scheduler's side counted between two looks at its totals."""
        grown = {f"scheduler_{name}": value - before.get(name, 0) for name, value in after.items()}
        return cls.of({name: value for name, value in grown.items() if name in COUNTERS})

    def reset(self) -> None:
        """Forget everything counted."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank, or another step, counted."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs: the sums, and the bandwidth of loads and saves."""
        shown = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in sorted(self.data.items())
        }
        for kind in ("load", "save"):
            seconds = self.data.get(f"{kind}_seconds", 0)
            if seconds > 0:
                rate = self.data.get(f"{kind}_bytes", 0) / seconds / 1e9
                shown[f"{kind}_gigabytes_per_second"] = round(rate, 3)
        return shown

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class TierKVPromMetrics(KVConnectorPromMetrics):
    """One counter per name, ``vllm:tierkv_<name>_total``, with vLLM's labels.

    The names known beforehand exist at zero from the start, so that a rate can be computed over
    the first increment too.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        names: Mapping[str, str],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {}
        self._children: dict[tuple[str, int], Any] = {}
        counter = metric_types[Counter]
        for name, text in names.items():
            self._counters[name] = counter(
                name=_PREFIX + name, documentation=text, labelnames=labelnames
            )
            for engine in per_engine_labelvalues:
                self._child(name, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add increments; a name without a counter is left out, as there is no text for it."""
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._child(name, engine_idx).inc(value)

    def _child(self, name: str, engine: int) -> Any:
        child = self._children.get((name, engine))
        if child is None:
            values = self.per_engine_labelvalues[engine]
            child = self._children[name, engine] = self._counters[name].labels(*values)
        return child
