"""Hit counts of the classical policies are those of libCacheSim, to the last hit."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tierkv.decisions.policy.arc import Arc
from tierkv.decisions.policy.fifo import Fifo
from tierkv.decisions.policy.lfu import Lfu
from tierkv.decisions.policy.lru import Lru
from tierkv.testing.caching import ObjectCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Policy

POLICIES: Final[dict[str, type[Policy]]] = {"FIFO": Fifo, "LRU": Lru, "LFU": Lfu, "ARC": Arc}

# What libCacheSim 0.3.5 (PyPI `libcachesim`) counts: hits at each capacity, in objects.
CAPACITIES: Final = (1, 2, 7, 50, 300)
SEEDED: Final = {
    "FIFO": (1394, 2397, 5016, 8738, 10775),
    "LRU": (1394, 2554, 5947, 9691, 11282),
    "LFU": (1394, 5079, 8541, 11022, 11839),
    "ARC": (1394, 4374, 8738, 11148, 11954),
}
LARGE: Final = (1_000, 10_000)
CONVERSATION: Final = {
    "FIFO": (12559, 53812),
    "LRU": (12831, 60921),
    "LFU": (13871, 38013),
    "ARC": (15275, 64205),
}


def seeded() -> list[int]:
    """20,000 names from 1: some popular, some in loops, a third seen once."""
    rng = random.Random(7)
    names = []
    for i in range(20_000):
        kind = rng.random()
        if kind < 0.6:
            names.append(1 + int((1.0 - rng.random()) ** -1.4) % 997)
        elif kind < 0.7:
            names.append(2_000 + i % 400)
        else:
            names.append(10_000 + i)
    return names


def conversation() -> list[int]:
    """Block accesses of a public chat trace, or skip."""
    zstandard = pytest.importorskip("zstandard")
    root = os.environ.get("TIERKV_TRACES") or Path(__file__).parents[3] / "shared" / "traces"
    path = Path(root) / "mooncake_fast25_conversation.jsonl.zst"
    if not path.exists():
        pytest.skip(f"{path.name} is not there; TIERKV_TRACES names its directory")
    with path.open("rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8")
        return [1 + block for line in lines for block in json.loads(line)["hash_ids"]]


def hits(name: str, capacity: int, names: Sequence[int]) -> int:
    cache = ObjectCache(POLICIES[name](), capacity)
    return sum(map(cache.access, names))


@pytest.mark.parametrize("name", POLICIES)
def test_hits_on_a_seeded_stream(name: str) -> None:
    names = seeded()
    assert tuple(hits(name, capacity, names) for capacity in CAPACITIES) == SEEDED[name]


@pytest.mark.stress
@pytest.mark.parametrize("name", POLICIES)
def test_hits_on_the_conversation_trace(name: str) -> None:
    names = conversation()
    assert tuple(hits(name, capacity, names) for capacity in LARGE) == CONVERSATION[name]


@pytest.mark.parametrize("name", POLICIES)
def test_hits_equal_those_of_the_library_itself(name: str) -> None:
    library = pytest.importorskip("libcachesim")
    rng = random.Random(11)
    names = [1 + int((1.0 - rng.random()) ** -1.2) % 3_000 for _ in range(20_000)]
    for capacity in (1, 2, 7, 100, 1_000):
        cache, request = getattr(library, name)(capacity), library.Request()
        request.obj_size = 1
        theirs = 0
        for request.obj_id in names:
            theirs += cache.get(request)
        assert hits(name, capacity, names) == theirs, f"{capacity} objects"
