"""Many requests, little memory: nothing of them stays, and nothing wrong is handed out."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import GUARD, Pages, RankRig, groups_of, prompt
from tierkv_adapters.serving.orders import RequestFacts
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from pathlib import Path

SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))


def _left(rig: RankRig) -> dict[str, int]:
    assert rig.rank.drain(GUARD)
    gc.collect()
    stats = rig.manager.stats()
    return {
        "requests": len(rig.rank._requests),
        "jobs": int(rig.rank.busy()),
        "sessions": stats.sessions,
        "leases": stats.leases,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def _serve(rig: RankRig, number: int, *, session: str | None = None) -> None:
    """One request, stored or loaded, and over."""
    free = {group: list(pages) for group, pages in rig.free.items()}
    facts = RequestFacts(f"r{number}", session=session)
    ids = prompt(16, number % 50)
    if number % 2:
        rig.save(facts.id, ids, facts)
    else:
        pages, ended = rig.load(facts.id, ids, facts=facts)
        assert rig.right(ids, pages, ended.tokens)
    rig.rank.begin(rig.step(ended=[facts.id]))
    rig.free = free


@pytest.mark.parametrize("tiers", ["host", "host+nvme"])
def test_requests_leave_nothing_behind(tiers: str, tmp_path: Path) -> None:
    _many(tiers, tmp_path, 120)


@pytest.mark.stress
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("tiers", ["host", "host+nvme"])
def test_ten_thousand_requests_leave_nothing_behind(tiers: str, tmp_path: Path) -> None:
    _many(tiers, tmp_path, max(500, int(10_000 * SCALE)))


def _many(tiers: str, path: Path, count: int) -> None:
    with RankRig("sliding", tiers=tiers, path=path) as rig:
        for number in range(100):
            _serve(rig, number)
        before = _left(rig)
        for number in range(100, 100 + count):
            _serve(rig, number)
        assert _left(rig) == before
        assert (before["requests"], before["jobs"], before["leases"]) == (0, 0, 0)


def test_names_of_sessions_are_bounded() -> None:
    with RankRig(settings=RankSettings(sessions=8)) as rig:
        for number in range(60):
            _serve(rig, number, session=f"s{number}")
        assert _left(rig)["sessions"] == 8
        assert len(rig.manager.call(rig.manager.asessions)) == 8


@pytest.mark.parametrize("kind", ["full", "sliding", "state"])
def test_c7_a_tier_of_two_blocks_stores_less_and_nothing_wrong(kind: str) -> None:
    pages = Pages(groups_of(kind)).pools.layout(8)
    capacity = sum(-(-group.raw_bytes(8) // 4096) * 4096 + 4096 for group in pages.groups) * 2
    with RankRig(kind, capacity=capacity) as rig:
        for number in range(20):
            free = {group: list(each) for group, each in rig.free.items()}
            ids = prompt(48, number % 3)
            rig.save(f"s{number}", ids)
            back, ended = rig.load(f"l{number}", ids)
            assert ended.tokens <= 16
            assert rig.right(ids, back, ended.tokens)
            rig.rank.begin(rig.step(ended=[f"s{number}", f"l{number}"]))
            rig.free = free
        assert rig.rank.counters.errors == 0
        assert rig.rank.drain(GUARD)
        assert rig.manager.stats().leases == 0
