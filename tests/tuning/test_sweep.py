"""Sweeps tell what replays tell, and samples come near to it."""

from __future__ import annotations

import csv
import io
import random
from typing import TYPE_CHECKING

import pytest

from tests.tuning.planted import BLOCK, FRAME, HEADER, request, scans
from tierkv.errors import ConfigError, MissingDependencyError
from tierkv.replay import CostModel, Setup, replay
from tierkv.traces import Trace
from tierkv.tuning import Sweep, sampled, sweep
from tierkv.tuning.plotting import plot
from tierkv.tuning.sweeping import Point, _Amounts, _Found

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def chats(seed: int, sessions: int = 150) -> Trace:
    """Conversations that grow, behind one system prompt; those of low number are busier."""
    rng = random.Random(seed)
    length = [3] * sessions
    made = []
    for at in range(12 * sessions):
        who = min(int(rng.expovariate(0.04)), sessions - 1)
        length[who] = min(length[who] + rng.randrange(3), 20)
        keys = (1, *(1000 * (who + 1) + i for i in range(length[who])))
        made.append(request(float(at), keys, str(who)))
    return Trace.of(HEADER, made)


def test_a_point_is_a_replay() -> None:
    trace = scans(10)
    found = sweep(trace, [{"host": 20 * FRAME}, {"host": 0, "nvme": 9 * FRAME}], policies=["lru"])
    for point, blocks in zip(found.points, (20, 9), strict=True):
        report = replay(trace, Setup(capacity_blocks=blocks, policy="lru"))
        assert point.token_hit_ratio == report.token_hit_ratio
        assert point.block_hit_ratio == report.block_hit_ratio
        assert point.error == 0.0
        assert point.saved_s == pytest.approx(report.hit_tokens / 40_000)
    assert [list(point.tiers) for point in found.points] == [["host"], ["nvme"]]


def test_what_waits_for_a_slow_link_saves_less() -> None:
    trace = scans(10)
    tiers = [{"host": FRAME, "nvme": 500 * FRAME}]
    quick = sweep(trace, tiers, base=Setup(capacity_blocks=1)).points[0]
    slow = Setup(capacity_blocks=1, model=CostModel(bandwidth=1e5))
    (late,) = sweep(trace, tiers, base=slow).points
    assert late.token_hit_ratio == quick.token_hit_ratio
    assert late.saved_s < quick.saved_s


def test_the_cheapest_that_is_enough() -> None:
    def point(cost: float, hit: float, saved: float) -> Point:
        return Point("lru", {"host": 1}, hit, hit, 0.0, saved, cost)

    found = Sweep((point(3, 0.5, 9), point(1, 0.2, 2), point(2, 0.5, 5), point(2, 0.6, 4)))
    assert found.cheapest(hit=0.5) == found.points[3]
    assert found.cheapest(saved_s=5) == found.points[2]
    assert found.cheapest(hit=0.6, saved_s=5) is None
    assert found.cheapest() == found.points[1]


def test_the_price_is_that_of_the_tiers() -> None:
    sizes = [{"host": 2 << 30, "nvme": 10 << 30}]
    (dear,) = sweep(scans(2), sizes, prices={"host": 4.0, "nvme": 0.5}).points
    assert dear.cost == 13.0
    with pytest.raises(ConfigError, match="no price for a 'tape' tier"):
        sweep(scans(2), [{"tape": FRAME}])
    with pytest.raises(ConfigError, match="without any tier"):
        sweep(scans(2), [{"host": 0}])


def test_csv_has_a_line_a_point_and_a_column_a_tier() -> None:
    sizes = [{"host": FRAME}, {"host": FRAME, "nvme": 2 * FRAME}]
    found = sweep(scans(2), sizes, policies=["lru", "lrfu"])
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [(r["policy"], r["host_bytes"], r["nvme_bytes"]) for r in rows] == [
        (policy, str(FRAME), nvme) for policy in ("lru", "lrfu") for nvme in ("0", str(2 * FRAME))
    ]
    assert float(rows[0]["token_hit_ratio"]) == found.points[0].token_hit_ratio


def test_progress_counts_replays() -> None:
    seen: list[tuple[int, int]] = []
    sizes = [{"host": FRAME}, {"host": 2 * FRAME}]
    sweep(scans(2), sizes, sample=0.5, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 4) for n in range(1, 5)]


# --------------------------------------------------------------------------- samples


def test_ctrl_c_keeps_what_was_found() -> None:
    def stop_at(last: int) -> Callable[[int, int], None]:
        def told(done: int, total: int) -> None:
            if done == last:
                raise KeyboardInterrupt

        return told

    sizes = [{"host": blocks * FRAME} for blocks in (9, 20, 30)]
    whole = sweep(scans(10), sizes)
    assert not whole.interrupted
    found = sweep(scans(10), sizes, progress=stop_at(3))
    assert found == Sweep(whole.points[:2], interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        sweep(scans(10), sizes, progress=stop_at(1))


def test_a_block_is_sampled_wherever_it_is_used() -> None:
    trace = chats(1)
    parts = [sampled(trace, 0.25, number) for number in range(4)]
    kept = [{key for item in part for key in item.keys} for part in parts]
    assert all(a.isdisjoint(b) for n, a in enumerate(kept) for b in kept[:n])
    whole = [key for item in trace for key in item.keys]
    assert set(whole) == set().union(*kept)
    assert sum(len(item.keys) for part in parts for item in part) == len(whole)
    assert sum(item.tokens for part in parts for item in part) == len(whole) * BLOCK


def test_a_partial_block_keeps_its_tokens() -> None:
    keys = tuple(range(1, 41))
    short = Trace.of(HEADER, [request(0.0, keys)])
    (only,) = short
    partial = Trace.of(HEADER, [only.__class__(0.0, "", "", keys, 39 * BLOCK + 5, 0, BLOCK)])
    parts = [sampled(partial, 0.2, number) for number in range(5)]
    assert sum(item.tokens for part in parts for item in part) == 39 * BLOCK + 5


def test_samples_come_near_the_whole() -> None:
    """Chance is in one sample; all samples together show that there is no bias."""
    trace = chats(2, 400)
    whole = _Amounts.of(trace)
    for blocks in (400, 800, 1200):
        exact = replay(trace, Setup(capacity_blocks=blocks, policy="lru"))
        found = [
            _Found.of(
                replay(sampled(trace, 0.25, n), Setup(capacity_blocks=blocks // 4, policy="lru")),
                whole,
                0.25,
                CostModel(),
            )
            for n in range(4)
        ]
        assert sum(f.token_hit_ratio for f in found) / 4 == pytest.approx(
            exact.token_hit_ratio, abs=0.03
        )
        assert sum(f.saved_s for f in found) == pytest.approx(exact.hit_tokens / 40_000, rel=0.1)


def test_a_sampled_sweep_tells_its_error() -> None:
    (point,) = sweep(chats(2), [{"host": 400 * FRAME}], sample=0.5).points
    assert 0 < point.error < 0.2
    assert 0 < point.token_hit_ratio < 1


@pytest.mark.parametrize(("rate", "part"), [(0.0, 0), (1.5, 0), (0.5, 2), (0.5, -1)])
def test_no_such_sample(rate: float, part: int) -> None:
    with pytest.raises(ConfigError, match="no sample"):
        sampled(scans(1), rate, part)


# --------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_picture(form: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = [{"host": n * FRAME, "nvme": m * FRAME} for n in (4, 8) for m in (0, 50)]
    target = tmp_path / f"curve.{form}"
    plot(sweep(scans(5), sizes, policies=["lru", "lrfu"], sample=0.5), target, "title")
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG" if form == "png" else b"<?xml")
    if form == "svg":
        assert data.count(b'id="legend_1"') == 1


def test_a_picture_needs_a_form_and_points(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a picture ends in"):
        plot(Sweep(()), tmp_path / "curve.txt")
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot(Sweep(()), tmp_path / "curve.svg")


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"\[tune\]"):
        plot(Sweep(()), tmp_path / "curve.svg")
