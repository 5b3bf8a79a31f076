"""Every policy under any sequence of calls, against what is tracked and free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Policy

KINDS = (
    *("insert", "touch", "release", "evict"),
    *("insert", "touch", "release", "evict"),
    *("hold", "remove", "expedite", "shift", "score", "resized", "resize"),
)
OPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 13), st.integers(0, 40)), max_size=90
)


@pytest.mark.parametrize("name", registry.names("policies"))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(ops=OPS, scale=st.sampled_from([1, 1, 60_000]))
def test_victims_are_free_and_rank_lowest(
    name: str, ops: Sequence[tuple[str, int, int]], scale: int
) -> None:
    policy: Policy = registry.resolve("policies", name)()
    tracked: dict[int, int] = {}  # idents
    free: set[int] = set()
    for clock, (op, small, value) in enumerate(ops):
        row = small * scale
        if op == "resize":
            policy.resize(value / 2 + 0.5)
        elif op == "insert":
            if row not in tracked:
                policy.insert(row, 100 + value, clock, value)
                tracked[row] = value
        elif op == "evict":
            victim = policy.victim()
            if victim is not None:
                policy.remove(victim, evicted=True, ident=tracked.pop(victim))
                free.remove(victim)
        elif row in tracked:
            apply(policy, op, row, clock, value)
            if op == "remove":
                del tracked[row]
            free = free - {row} if op in ("remove", "hold") else free
            free = free | {row} if op == "release" else free
        victim = policy.victim()
        assert (victim in free) if free else victim is None
        assert policy.victim() == victim
        if victim is not None:
            assert policy.rank(victim) == min(policy.rank(row) for row in free)
    for _ in range(len(free)):
        victim = policy.victim()
        assert victim in free
        policy.remove(victim, evicted=True, ident=tracked[victim])
        free.remove(victim)
    assert policy.victim() is None


def apply(policy: Policy, op: str, row: int, clock: int, value: int) -> None:
    if op == "touch":
        policy.touch(row, clock)
    elif op == "shift":
        policy.shift(row, 5.0 * value - 100.0)
    elif op == "score":
        policy.score(row, value / 40)
    elif op == "resized":
        policy.resized(row, 1 + value)
    else:
        {
            "release": policy.release,
            "hold": policy.hold,
            "remove": policy.remove,
            "expedite": policy.expedite,
        }[op](row)
