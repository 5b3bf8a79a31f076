"""What is counted during a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.replay.report import Distribution, Report, TierReport

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tierkv.decisions.types import Found
    from tierkv.replay.moves import Moves
    from tierkv.replay.setup import Setup
    from tierkv.traces import TraceRequest

__all__ = ["Counts"]


class Counts:
    """Sums over the requests of one replay.

    Attributes:
        demand: Blocks that requests waited for from a slower tier.
    """

    def __init__(self, tiers: int) -> None:
        self.demand = 0
        self._stalls: list[float] = []
        self._waits: list[float] = []
        self._blocks = self._tokens = self._hit_blocks = self._hit_tokens = self._lost = 0
        self._near_blocks = [0] * tiers
        self._near_tokens = [0] * tiers
        self._seen: set[int] = set()

    def looked_up(self, request: TraceRequest, found: Found, *, many: bool) -> int:
        """Count a lookup.

        Args:
            request: Whose.
            found: What was found.
            many: Whether there are several tiers.

        Returns:
            Tokens found.
        """
        size, blocks = request.block_tokens, found.blocks
        hit = min(blocks * size, request.tokens)
        self._blocks += len(request.keys)
        self._tokens += request.tokens
        self._hit_blocks += blocks
        self._hit_tokens += hit
        if blocks < len(request.keys):
            self._lost += sum(map(self._seen.__contains__, request.keys[blocks:]))
        if not many:
            self._near_blocks[0] += blocks
            self._near_tokens[0] += hit
            return hit
        for part in found.parts:
            self._near_blocks[part.tier] += 1
            self._near_tokens[part.tier] += max(0, min(size, request.tokens - part.block * size))
        return hit

    def stored(self, keys: Sequence[int]) -> None:
        """Note blocks that are in some tier now."""
        self._seen.update(keys)

    def served(self, *, wait: float, stall: float) -> None:
        """Count the times of a request."""
        self._waits.append(wait)
        self._stalls.append(stall)

    def report(
        self,
        setup: Setup,
        block_bytes: int,
        moves: Moves,
        *,
        read: Sequence[int],
        prefetch: dict[str, dict[str, Any]],
        durable: Collection[str],
        cpu_s: float,
    ) -> Report:
        """Sum up.

        Args:
            setup: What was replayed.
            block_bytes: Bytes of a block.
            moves: What was moved.
            read: Bytes read from each tier.
            prefetch: Counters of the predictors.
            durable: Names of tiers whose writes wear a medium out.
            cpu_s: CPU seconds.
        """
        names, blocks = setup.tier_names(), setup.blocks(block_bytes)
        policies = setup.each(setup.policy)
        tiers = tuple(
            TierReport(
                name=name,
                capacity_blocks=size,
                policy=policies[tier],
                hit_blocks=self._near_blocks[tier],
                hit_tokens=self._near_tokens[tier],
                read_bytes=read[tier],
                written_bytes=moves.written[tier],
                evictions={r.value: n for r, n in moves.evictions[tier].items()},
            )
            for tier, (name, size) in enumerate(zip(names, blocks, strict=True))
        )
        tokens = max(self._tokens, 1)
        return Report(
            requests=len(self._waits),
            blocks=self._blocks,
            tokens=self._tokens,
            hit_blocks=self._hit_blocks,
            hit_tokens=self._hit_tokens,
            token_hit_ratio=self._hit_tokens / tokens,
            block_hit_ratio=self._hit_blocks / max(self._blocks, 1),
            fast_token_hit_ratio=self._near_tokens[0] / tokens,
            demand_loads=self.demand,
            ssd_writes=sum(t.written_bytes for t in tiers if t.name in durable),
            evicted_before_reuse=self._lost,
            skipped={reason.value: n for reason, n in moves.skipped.items()},
            by_tier=tiers,
            stall=Distribution.of(self._stalls),
            ttft=Distribution.of(self._waits),
            prefetch=prefetch,
            cpu_s=cpu_s,
        )
