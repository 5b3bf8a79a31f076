"""What a replay finds out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.replay.bound import Bound

__all__ = ["Distribution", "Report", "TierReport"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds, over all requests."""

    total: float
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """The distribution of some values; all zeros if there are none."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        at = [ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99)]
        total = float(sum(ordered))
        return cls(total, total / len(ordered), *at)


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier.

    Attributes:
        name: Its name.
        capacity_blocks: Blocks that it holds; None: it never fills up.
        policy: Its policy.
        hit_blocks: Blocks of found prefixes whose fastest copy was here.
        hit_tokens: Their tokens.
        read_bytes: Bytes that loads and prefetches read from it.
        written_bytes: Bytes that were written into it.
        evictions: Copies that left it, by reason.
    """

    name: str
    capacity_blocks: int | None
    policy: str
    hit_blocks: int
    hit_tokens: int
    read_bytes: int
    written_bytes: int
    evictions: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one replay.

    Attributes:
        requests: Requests replayed.
        blocks: Blocks looked up.
        tokens: Tokens of the prompts.
        hit_blocks: Blocks found, in whichever tier (as prefixes).
        hit_tokens: Tokens found.
        token_hit_ratio: ``hit_tokens / tokens``.
        block_hit_ratio: ``hit_blocks / blocks``.
        fast_token_hit_ratio: Share of the tokens whose fastest copy was in the first tier.
        demand_loads: Blocks that a request had to wait for from a slower tier.
        ssd_writes: Bytes written into durable tiers.
        evicted_before_reuse: Blocks that were asked for again after they had left every tier.
        skipped: Blocks not stored, by reason.
        by_tier: One report a tier, fastest first.
        stall: Seconds for which requests waited for KV, beyond queue and own compute.
        ttft: Seconds from arrival to the first token.
        prefetch: Counters of each predictor.
        cpu_s: CPU seconds that the replay took.
        gap_closed: Share of the way from LRU to Belady's bound that was gone, if both are known.
    """

    requests: int
    blocks: int
    tokens: int
    hit_blocks: int
    hit_tokens: int
    token_hit_ratio: float
    block_hit_ratio: float
    fast_token_hit_ratio: float
    demand_loads: int
    ssd_writes: int
    evicted_before_reuse: int
    skipped: dict[str, int]
    by_tier: tuple[TierReport, ...]
    stall: Distribution
    ttft: Distribution
    prefetch: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpu_s: float = 0.0
    gap_closed: float | None = None

    def against(self, lru: Report, bound: Bound) -> Report:
        """This report with ``gap_closed``, from replays of the same trace and capacity."""
        gap = bound.token_hit_ratio - lru.token_hit_ratio
        gone = self.token_hit_ratio - lru.token_hit_ratio
        return replace(self, gap_closed=gone / gap if gap > 0 else None)

    def to_plain(self) -> dict[str, Any]:
        """The report as JSON knows it."""
        return asdict(self)
