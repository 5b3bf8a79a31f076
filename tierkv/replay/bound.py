"""The bound: what a cache that knows the future would have found."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.traces import Trace

__all__ = ["Bound", "belady"]

_NEVER = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a single tier of so many blocks can find on a trace.

    Attributes:
        capacity_blocks: Blocks that it holds.
        token_hit_ratio: Share of the tokens.
        block_hit_ratio: Share of the blocks.
    """

    capacity_blocks: int
    token_hit_ratio: float
    block_hit_ratio: float


def belady(trace: Trace, capacity_blocks: int) -> Bound:
    """MIN (Belady, IBM Systems Journal 5(2), 1966) on prefixes, with bypass.

    After each request the blocks that are needed again soonest are kept, of equals the ones
    nearer to the root; what is never needed again is not kept at all. A prefix is needed no later
    than what is behind it, so the cache stays closed under prefixes, and the bound holds for
    caches that evict leaves only. Blocks count alike; O(n log n), one pass backwards and one
    forwards.

    Args:
        trace: Is read into memory once.
        capacity_blocks: Blocks that the tier holds.

    Raises:
        ConfigError: if the capacity is negative.
    """
    if capacity_blocks < 0:
        raise ConfigError(f"a capacity cannot be negative: {capacity_blocks}")
    requests = [(r.keys + r.reply_keys, len(r.keys), r.tokens, r.block_tokens) for r in trace]
    following: dict[int, int] = {}
    uses: list[array[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        chain, looked, _, _ = requests[number]
        uses.append(array("q", [following.get(key, _NEVER) for key in chain]))
        following.update(dict.fromkeys(chain[:looked], number))
    uses.reverse()
    kept: dict[int, int] = {}  # when each block is needed again
    order: list[tuple[int, int, int]] = []
    hit_blocks = hit_tokens = blocks = tokens = 0
    for (chain, looked, asked, size), again in zip(requests, uses, strict=True):
        found = 0
        while found < looked and chain[found] in kept:
            found += 1
        hit_blocks += found
        blocks += looked
        hit_tokens += min(found * size, asked)
        tokens += asked
        for depth, (key, use) in enumerate(zip(chain, again, strict=True)):
            if use == _NEVER:
                kept.pop(key, None)
            else:
                kept[key] = use
                heappush(order, (-use, -depth, key))
        while len(kept) > capacity_blocks:
            use, _, key = heappop(order)
            if kept.get(key) == -use:
                del kept[key]
    return Bound(capacity_blocks, hit_tokens / max(tokens, 1), hit_blocks / max(blocks, 1))
