"""vLLM's offloading interface in two generations, as stand-ins, and the order of its calls.

The modules have the names, signatures and fields of vLLM 0.25.1 and 0.32.0, as far as a tier or a
policy meets them. :class:`FakeTiering` does what vLLM's tiering manager does around a tier, with
its assertions: a broken promise dies here as it would there.
"""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

GENERATIONS = ("0.25.1", "0.32.0")


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class ReqContext:
    req_id: str
    positions: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.positions.get(key)


@dataclass(frozen=True)
class Metadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


class CounterMetadata(Metadata):
    pass


class GaugeMetadata(Metadata):
    pass


@dataclass
class OldJob:
    job_id: int
    keys: list[bytes]
    block_ids: np.ndarray[Any, Any]
    is_promotion: bool
    req_context: ReqContext


@dataclass
class NewJob:
    job_id: int
    keys: list[bytes]
    chunk_ids: np.ndarray[Any, Any]
    is_promotion: bool
    req_context: ReqContext


@dataclass
class OldResult:
    job_id: int
    success: bool


@dataclass
class NewResult:
    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class _Tier:
    """What both generations of ``SecondaryTierManager`` have."""

    lookup: Any
    submit_store: Any
    submit_load: Any
    get_finished_jobs: Any
    drain_jobs: Any
    on_new_request: Any

    def has_pending_work(self) -> bool:
        return False


class OldTier(_Tier):
    lookup = submit_store = submit_load = get_finished_jobs = drain_jobs = on_new_request = None

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type


class NewTier(_Tier):
    lookup = submit_store = submit_load = get_finished_jobs = drain_jobs = on_new_request = None
    medium: Medium | None = None

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object = None,
    ) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type
        self.locality: Locality | None = None
        self._bp_detector = backpressure_detector


class _Policy:
    get = insert = remove = touch = evict = clear = None

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    def mark_evictable(self, key: bytes) -> None:
        pass

    def mark_non_evictable(self, key: bytes) -> None:
        pass


class OldPolicy(_Policy):
    pass


class NewPolicy(_Policy):
    def on_store_miss(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        pass

    def on_request_finished(
        self, key_groups: Any, insertion_only_keys: Any, reused_keys: Any, req_context: Any
    ) -> None:
        pass


class Stats:
    """``OffloadingConnectorStats``, as far as a tier fills it."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(
        self, name: str, value: float = 1, labelvalues: tuple[str, ...] = ()
    ) -> None:
        assert value > 0
        self.values[name, labelvalues] = self.values.get((name, labelvalues), 0) + value

    def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = value


def modules(generation: str) -> dict[str, types.ModuleType]:
    """The modules of a generation, by name."""
    old = generation == GENERATIONS[0]
    base: dict[str, Any] = {
        "LookupResult": LookupResult,
        "RequestOffloadingContext": RequestOffloadingContext,
        "OffloadingCounterMetadata": CounterMetadata,
        "OffloadingGaugeMetadata": GaugeMetadata,
    }
    if not old:
        base |= {"Medium": Medium, "Locality": Locality}
    tiers = {
        "SecondaryTierManager": OldTier if old else NewTier,
        "JobResult": OldResult if old else NewResult,
        ("JobMetadata" if old else "TransferJob"): OldJob if old else NewJob,
    }
    names = {
        "vllm.v1.kv_offload.base": base,
        "vllm.v1.kv_offload.tiering.base": tiers,
        "vllm.v1.kv_offload.cpu.policies.base": {"CachePolicy": OldPolicy if old else NewPolicy},
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
            "OffloadingConnectorStats": Stats
        },
    }
    out: dict[str, types.ModuleType] = {}
    for name, content in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            out.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        out[name] = types.ModuleType(name)
        vars(out[name]).update(content)
    return out


class FakeTiering:
    """What vLLM's tiering manager does around one tier, its CPU tier boiled down to a table.

    Args:
        tier: The tier.
        generation: Whose jobs and results.
        rows: Rows of the CPU tier.
    """

    def __init__(self, tier: Any, generation: str, rows: int) -> None:
        import numpy

        self.tier = tier
        self._job: Callable[..., Any] = OldJob if generation == GENERATIONS[0] else NewJob
        self._array: Callable[[list[int]], Any] = lambda ids: numpy.array(ids, numpy.int32)
        self.rows: dict[bytes, int] = {}
        self.ready: set[bytes] = set()
        self._free = list(range(rows))
        self._jobs: dict[int, Any] = {}
        self._next = 0
        self._wanted: dict[str, list[bytes]] = {}
        self.promotions = 0

    def lookup(self, key: bytes, context: ReqContext) -> LookupResult:
        self.poll()
        if key in self.rows:
            return LookupResult.HIT if key in self.ready else LookupResult.HIT_PENDING
        answer = self.tier.lookup(key, context)
        assert isinstance(answer, LookupResult)
        if answer is not LookupResult.HIT:
            return answer
        if not self._free:
            return LookupResult.MISS
        self.rows[key] = self._free.pop()
        self._wanted.setdefault(context.req_id, []).append(key)
        return LookupResult.HIT_PENDING

    def end_step(self) -> None:
        self.poll()
        for request, keys in self._wanted.items():
            self.promotions += 1
            self.tier.submit_load(self._make(keys, ReqContext(request), promotion=True))
        self._wanted.clear()

    def store(self, keys: list[bytes], context: ReqContext) -> None:
        """The GPU has filled rows (the caller has); they cascade."""
        self.ready.update(keys)
        self.tier.submit_store(self._make(keys, context, promotion=False))

    def allocate(self, key: bytes) -> int:
        self.rows[key] = self._free.pop()
        return self.rows[key]

    def drop(self, key: bytes) -> None:
        """Evict one chunk of the CPU tier."""
        assert all(key not in job.keys for job in self._jobs.values()), "it is pinned"
        self.ready.discard(key)
        self._free.append(self.rows.pop(key))

    def _make(self, keys: list[bytes], context: ReqContext, *, promotion: bool) -> Any:
        job = self._job(
            self._next, keys, self._array([self.rows[k] for k in keys]), promotion, context
        )
        self._jobs[self._next] = job
        self._next += 1
        return job

    def poll(self) -> None:
        for result in self.tier.get_finished_jobs():
            job = self._jobs.pop(result.job_id, None)
            assert job is not None, "an unknown job, or one told twice"
            if not job.is_promotion:
                continue
            came = set(job.keys) if result.success else set()
            came |= set(getattr(result, "successful_keys", None) or ())
            assert came <= set(job.keys), "unknown keys"
            self.ready |= came
            for key in set(job.keys) - came:
                self._free.append(self.rows.pop(key))

    def busy(self) -> bool:
        assert bool(self._jobs) <= self.tier.has_pending_work(), "vLLM would stop stepping"
        return bool(self._jobs)

    def reset(self) -> None:
        self.tier.drain_jobs()
        self.poll()
        assert not self._jobs
        for key in list(self.rows):
            self.drop(key)
