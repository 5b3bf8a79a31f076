"""What this vLLM's offloading interface is called and how it is called: found out by looking.

That interface is marked experimental and changed in each of the versions that were compared:

=========  ==================================================================================
0.25.1     specs get the whole ``VllmConfig``; jobs have ``block_ids``; results say yes or no;
           policies are not told of requests; no policy or tier from outside by module path
0.28.0     specs get an excerpt; ``TransferJob``; results may name the keys that came; media are
           an enum; tiers and policies by module path
0.30.0     ``block_ids`` became ``chunk_ids``
0.32.0     tiers always get ``backpressure_detector``; results may tell bytes; policies hear when
           a request is over
=========  ==================================================================================

So nothing here asks for a version: attributes and signatures decide, and what is not there is not
used. What is indispensable and not there is an error that names the versions that work.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["TESTED", "TierApi", "detect"]

TESTED: Final = "0.25.1, 0.28.0, 0.30.0 and 0.32.0"
"""Versions of vLLM whose interface this was written against; the last is run in tests."""

_BASE: Final = "vllm.v1.kv_offload.base"
_TIERS: Final = "vllm.v1.kv_offload.tiering.base"
_POLICIES: Final = "vllm.v1.kv_offload.cpu.policies.base"
_STATS: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
_METHODS: Final = (
    *("drain_jobs", "get_finished_jobs", "has_pending_work", "lookup", "on_new_request"),
    *("submit_load", "submit_store"),
)
_POLICY_METHODS: Final = (
    *("clear", "evict", "get", "insert", "mark_evictable", "mark_non_evictable", "remove", "touch"),
)
_OURS: Final = frozenset({"offloading_spec", "primary_kv_view", "tier_type"})


class TierApi:
    """The interface of one vLLM; made by :func:`detect`.

    Attributes:
        tier: Base class of tiers.
        policy: Base class of policies of the CPU tier.
        medium: vLLM's word for a storage medium, None where it has none.
        hears_requests: Whether policies are told that a request is over.
    """

    def __init__(self, find: Callable[[str], Any]) -> None:
        base, tiers, policies = find(_BASE), find(_TIERS), find(_POLICIES)
        self.tier: Any = _have(tiers, "SecondaryTierManager", _METHODS)
        self.policy: Any = _have(policies, "CachePolicy", _POLICY_METHODS)
        self.hears_requests = hasattr(self.policy, "on_request_finished")
        results = _have(base, "LookupResult", ("HIT", "MISS", "RETRY"))
        self._answers = {name.lower(): getattr(results, name) for name in ("HIT", "MISS", "RETRY")}
        self._result: Any = _have(tiers, "JobResult")
        self._result_fields = {each.name for each in dataclasses.fields(self._result)}
        if missing := {"job_id", "success"} - self._result_fields:
            raise _unknown(f"JobResult has no {', '.join(sorted(missing))}")
        self._context: Any = _have(base, "RequestOffloadingContext")
        media = getattr(base, "Medium", None)
        self.medium: Any = getattr(media, "STORAGE", None)
        self._locality: Any = getattr(base, "Locality", None)
        self._counter: Any = getattr(base, "OffloadingCounterMetadata", None)
        self._gauge: Any = getattr(base, "OffloadingGaugeMetadata", None)
        self._init = inspect.signature(self.tier.__init__).parameters
        if lacking := sorted(_OURS - set(self._init)):
            raise _unknown(f"SecondaryTierManager takes no {', '.join(lacking)}")
        self._find = find

    def answer(self, text: str) -> Any:
        """What this vLLM calls ``"hit"``, ``"miss"`` or ``"retry"``."""
        return self._answers[text]

    def base_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the factory's arguments that the base class wants."""
        return {name: value for name, value in given.items() if name in self._init}

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The factory's other arguments: what the user wrote for the tier."""
        vllms = {*self._init, "backpressure_detector", "backpressure"}
        return {name: value for name, value in given.items() if name not in vllms}

    def rows(self, job: Any) -> list[int]:
        """Rows of the CPU tier that a job names.

        Raises:
            AttachError: if it names none under any known name.
        """
        for name in ("chunk_ids", "block_ids"):
            found = getattr(job, name, None)
            if found is not None:
                return [int(row) for row in found]
        raise _unknown("a job has neither chunk_ids nor block_ids")

    def result(
        self, number: int, *, success: bool, keys: Sequence[bytes] | None, seconds: float, size: int
    ) -> Any:
        """A result of a job, with as much as this vLLM can take."""
        told = {
            "job_id": number,
            "success": success,
            "successful_keys": keys if keys and not success else None,
            "transfer_time": seconds,
            "transfer_bytes": size,
        }
        return self._result(**{n: v for n, v in told.items() if n in self._result_fields})

    def new_request(self) -> Any:
        """That chunks are to be offered as they come."""
        return self._context()

    def locality(self, text: str | None) -> Any:
        """What this vLLM calls a place of storage; None where it has no word for it."""
        return None if text is None or self._locality is None else self._locality(text)

    def metrics(self, prefix: str, counters: Mapping[str, str], gauges: Mapping[str, str]) -> Any:
        """Definitions of metrics with one label, ``tier``; none where vLLM takes none."""
        if self._counter is None or self._gauge is None:
            return {}
        kinds = ((self._counter, counters), (self._gauge, gauges))
        return {
            prefix + name: kind(documentation=text, labelnames=("tier",))
            for kind, texts in kinds
            for name, text in texts.items()
        }

    def stats(
        self,
        prefix: str,
        label: str,
        counters: Mapping[str, int | float],
        gauges: Mapping[str, int | float],
    ) -> Any:
        """Increments and levels as vLLM takes them; None if there are none, or it takes none."""
        made: Any = getattr(self._find(_STATS), "OffloadingConnectorStats", None)
        grown = {name: value for name, value in counters.items() if value}
        if made is None or self._counter is None or not grown:
            return None
        out = made()
        for name, value in grown.items():
            out.increase_counter(prefix + name, value, labelvalues=(label,))
        for name, value in gauges.items():
            out.set_gauge(prefix + name, value, labelvalues=(label,))
        return out


def detect(find: Callable[[str], Any] = importlib.import_module) -> TierApi:
    """Look at the vLLM of this process.

    Args:
        find: Imports a module by name.

    Raises:
        AttachError: if there is none, or its interface lacks what the tier or the policy needs;
            names what is missing and the versions that work.
    """
    try:
        return TierApi(find)
    except ImportError as error:
        raise _unknown(f"it has no module {error.name or error}") from error


def _have(module: Any, name: str, attributes: Sequence[str] = ()) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise _unknown(f"there is no {name}")
    for attribute in attributes:
        if not hasattr(found, attribute):
            raise _unknown(f"{name} has no {attribute}")
    return found


def _unknown(why: str) -> AttachError:
    return AttachError(
        f"the offloading interface of this vLLM is not one that tierkv knows: {why}. It knows that "
        f'of vLLM {TESTED}; TierKVConnector (kv_connector="TierKVConnector") needs none of it'
    )
