"""Small random traces, and plain references to check a replay against."""

from __future__ import annotations

import random
from itertools import combinations

from tierkv.traces import Trace, TraceHeader, TraceRequest

SIZE = 16
HEADER = TraceHeader(SIZE, 64, "random")


def request(time: float, keys: tuple[int, ...], **more: object) -> TraceRequest:
    """A request whose blocks are all full."""
    plain: dict[str, object] = {
        "session": str(keys[0]) if keys else "",
        "tenant": "",
        "tokens": len(keys) * SIZE,
        "output_tokens": 0,
        "block_tokens": SIZE,
    }
    return TraceRequest(time=time, keys=keys, **(plain | more))  # type: ignore[arg-type]


def trace(*requests: TraceRequest) -> Trace:
    return Trace.of(HEADER, requests)


def tree(seed: int, requests: int, *, roots: int = 3, width: int = 2, depth: int = 4) -> Trace:
    """Requests for paths of a random tree; an id names its whole path."""
    rng = random.Random(seed)
    made = []
    for number in range(requests):
        path, keys = 1, []
        for level in range(rng.randint(1, depth)):
            path = path * 10 + 1 + rng.randrange(roots if level == 0 else width)
            keys.append(path)
        made.append(request(float(number), tuple(keys), session=str(keys[0])))
    return trace(*made)


def naive_lru(source: Trace, capacity: int) -> int:
    """Blocks that a leaf-only LRU of so many blocks finds; plain and slow."""
    used: dict[int, int] = {}
    parent: dict[int, int | None] = {}
    clock = hits = 0
    for item in source:
        found = 0
        while found < len(item.keys) and item.keys[found] in used:
            found += 1
        hits += found
        clock += 100
        for depth in range(found):
            used[item.keys[depth]] = clock + 50 - depth
        clock += 100
        kept = set(item.keys)
        for depth in range(found, len(item.keys)):
            parents = {parent[key] for key in used}
            if len(used) >= capacity:
                free = [k for k in used if k not in parents and k not in kept]
                if not free:
                    break
                del used[min(free, key=used.__getitem__)]
            used[item.keys[depth]] = clock + 50 - depth
            parent[item.keys[depth]] = item.keys[depth - 1] if depth else None
    return hits


def best(source: Trace, capacity: int) -> int:
    """The most blocks that any prefix-closed cache of so many blocks can find: all are tried."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for item in source:
        following: dict[frozenset[int], int] = {}
        for state, hits in states.items():
            found = 0
            while found < len(item.keys) and item.keys[found] in state:
                found += 1
            there = state | set(item.keys)
            for kept in _closed(there, capacity):
                following[kept] = max(following.get(kept, 0), hits + found)
        states = following
    return max(states.values())


def _closed(there: frozenset[int], capacity: int) -> list[frozenset[int]]:
    """Prefix-closed subsets; an id in decimal is its parent's id and one digit more."""
    out = []
    for count in range(min(capacity, len(there)) + 1):
        for chosen in combinations(sorted(there), count):
            kept = frozenset(chosen)
            if all(key < 100 or key // 10 in kept for key in kept):
                out.append(kept)
    return out
