"""What the decision object costs, counted in calls: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.decisions.chains import items, keys
from tierkv.decisions.core import Decisions
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import TierLimits

if TYPE_CHECKING:
    from types import FrameType

    from tierkv.abc import Policy
    from tierkv.decisions.types import StoreItem

CHAIN = 64
MOST = 24.0
"""Functions of ours that are called for a block that is stored where another one has to go."""


def _store(decisions: Decisions, chain: list[StoreItem]) -> int:
    reservation = decisions.reserve(0, chain, tenant="t", now=1.0)
    done = [i for i, outcome in enumerate(reservation.outcomes) if outcome.generation]
    decisions.commit(reservation.id, done, 1.0)
    return len(reservation.drops)


@pytest.mark.parametrize("policy", [Lru, Lrfu])
def test_a_stored_block_takes_few_calls(policy: type[Policy]) -> None:
    chains = [items(keys(range(start, start + CHAIN))) for start in range(0, 8 * CHAIN, CHAIN)]
    nbytes = chains[0][0].nbytes
    decisions = Decisions([TierLimits("host", 4 * CHAIN * nbytes)], policy=policy)
    for chain in chains[:6]:
        _store(decisions, chain)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        gone = sum(_store(decisions, chain) for chain in chains[6:])
    finally:
        sys.setprofile(before)
    assert gone == 2 * CHAIN
    assert calls.total() / gone <= MOST, calls.most_common(30)
