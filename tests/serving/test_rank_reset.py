"""A reset while copies are under way: nothing of before is found after it.

After an update of the weights in place the keys are the same, so that a block stored too late is
another model's.
"""

from __future__ import annotations

import random
import threading
from array import array
from typing import TYPE_CHECKING

import pytest

from tests.serving.planner_world import World
from tests.serving.rank_rig import GUARD, RankRig, prompt, start_save
from tests.serving.test_rank_races import Slow
from tierkv.errors import BackendError
from tierkv_adapters.serving.orders import HintOrder, LoadOrder, RequestFacts, SaveOrder
from tierkv_adapters.serving.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_thread_leaks")

IDS = prompt(48)


class Forgetful(Rank):
    """Does not stop what was ordered before a reset."""

    def _renew(self) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Gathers that wait."""
    found = Slow(monkeypatch)
    yield found
    found.go.set()


@pytest.mark.parametrize("rank", [Rank, Forgetful])
def test_what_waits_to_be_saved_is_not_found_after_a_reset(rank: type[Rank], slow: Slow) -> None:
    with RankRig(rank=rank) as rig:
        start_save(rig, "a", IDS)
        assert slow.entered.wait(GUARD)
        start_save(rig, "b", IDS)
        pages = rig.take(48)
        orders = rig.step(
            fresh=[RequestFacts("c")],
            grown=[rig.grown("c", IDS, pages)],
            saves=[SaveOrder("c", 0, 48)],
        )
        rig.rank.begin(orders)
        slow.go.set()
        rig.manager.reset()  # as the scheduler's side does at once
        rig.rank.begin(rig.step(reset=True))
        rig.rank.start_saves()
        assert rig.rank.drain(GUARD)
        rig.rank.poll()
        assert rig.load("d", IDS)[1].tokens == (0 if rank is Rank else 48)
        rig.save("e", IDS)
        assert rig.load("f", IDS)[1].tokens == 48
        assert rig.rank.counters.errors == 0


@pytest.mark.parametrize("rank", [Rank, Forgetful])
def test_a_load_of_the_same_step_comes_behind_the_reset(rank: type[Rank]) -> None:
    """What was offered of blocks that were stored late is a miss."""
    with RankRig(rank=rank) as rig:
        rig.save("a", IDS)
        pages = rig.take(48)
        orders = rig.step(
            reset=True,
            fresh=[RequestFacts("b")],
            grown=[rig.grown("b", IDS, pages)],
            loads=[LoadOrder("b", 0, 48, 30.0)],
        )
        rig.rank.begin(orders)
        rig.rank.start_loads()
        ended = rig.until(("b", "load"))["b", "load"]
        assert ended.tokens == (0 if rank is Rank else 48)


def test_what_is_pinned_goes_too() -> None:
    with RankRig() as rig:
        facts = RequestFacts("a")
        rig.save("a", IDS, facts)
        rig.rank.begin(rig.step(hints=[HintOrder(facts, "pin", array("I", IDS), seconds=3600)]))
        for _ in range(int(GUARD / 0.002)):
            if rig.rank.counters.hints:
                break
            rig.rank.drain(0.002)
            threading.Event().wait(0.002)
        assert rig.manager.stats().leases > 0
        rig.rank.begin(rig.step(reset=True))
        assert rig.load("b", IDS)[1].tokens == 0
        assert rig.manager.stats().leases == 0


def test_saves_that_were_not_started_are_forgotten() -> None:
    with RankRig() as rig:
        pages = rig.take(48)
        rig.rank.begin(
            rig.step(
                fresh=[RequestFacts("a")],
                grown=[rig.grown("a", IDS, pages)],
                saves=[SaveOrder("a", 0, 48)],
            )
        )
        rig.rank.begin(rig.step(reset=True))
        rig.rank.start_saves()
        assert rig.rank.drain(GUARD)
        assert rig.rank.poll() == []


@pytest.mark.parametrize("tiers", ["host", "nvme", "host+nvme"])
@pytest.mark.parametrize("seed", range(3))
def test_resets_at_any_moment(seed: int, tiers: str, tmp_path: Path) -> None:
    """Saves of an old model and of a new one; what is loaded is the new one's, or nothing."""
    chance = random.Random(seed)
    with RankRig(path=tmp_path, tiers=tiers) as rig:
        for turn in range(8):
            free = {group: list(pages) for group, pages in rig.free.items()}
            old, new = prompt(48, 7), [prompt(48, 7)[0], *prompt(47, turn)]
            for name, ids in (("o", old), ("n", new)):
                pages = rig.take(48)
                rig.rank.begin(
                    rig.step(
                        fresh=[RequestFacts(name)],
                        grown=[rig.grown(name, ids, pages)],
                        saves=[SaveOrder(name, 0, 48)],
                    )
                )
                rig.pages.compute(ids, pages, 0, 48)
                rig.rank.start_saves()
                threading.Event().wait(chance.choice([0, 0, 0.001, 0.003]))
            if chance.random() < 0.5:
                rig.manager.reset()
            rig.rank.begin(rig.step(reset=True, ended=["o", "n"]))
            for name, ids in (("p", old), ("q", new)):
                assert rig.load(name, ids)[1].tokens == 0
            rig.rank.begin(rig.step(ended=["p", "q"]))
            assert rig.rank.drain(GUARD)
            rig.rank.poll()
            rig.free = free
        assert rig.rank.counters.errors == 0


def test_what_is_stored_behind_several_resets_stays() -> None:
    with RankRig() as rig:
        for turn in range(20):
            free = {group: list(pages) for group, pages in rig.free.items()}
            start_save(rig, "a", prompt(48, turn))
            for _ in range(3):
                rig.rank.begin(rig.step(reset=True, ended=["a"]))
            rig.save("b", IDS)
            assert rig.load("c", IDS)[1].tokens == 48
            rig.rank.begin(rig.step(ended=["b", "c"]))
            assert rig.rank.drain(GUARD)
            rig.rank.poll()
            rig.free = free


def test_an_engine_that_was_closed_has_nothing_to_forget() -> None:
    with RankRig() as rig:
        rig.save("a", IDS)
        rig.manager.close()
        rig.rank.begin(rig.step(reset=True))
        assert rig.rank.drain(GUARD)
        assert rig.rank.counters.errors == 0


def test_a_reset_that_fails_is_told_and_jobs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankRig() as rig:

        async def broken() -> int:
            raise BackendError("host", "planted")

        monkeypatch.setattr(rig.manager, "areset", broken)
        rig.rank.begin(rig.step(reset=True))
        assert rig.save("a", IDS)[1].tokens == 48
        assert rig.rank.counters.errors == 1


# ---------------------------------------------------------------------- the scheduler's side


def test_the_next_step_tells_the_ranks() -> None:
    world = World()
    world.planner.renew()
    assert world.planner.step().reset
    assert not world.planner.step().reset


def test_what_was_computed_before_is_not_saved_after() -> None:
    world = World()
    planner = world.planner
    world.admit("old")
    world.admit("waiting")
    assert planner.advance("old", tokens=(), pages=world.pages(16), computed=16) == (0, 16)
    planner.renew()
    assert planner.step().saves == []
    assert planner.advance("old", tokens=(), pages=world.pages(24), computed=40) is None
    assert planner.advance("waiting", tokens=(), pages=world.pages(40), computed=40) == (0, 40)
    planner.preempt("old")  # its pages go, and all of it is computed anew
    pages = world.pages(40)
    assert planner.advance("old", tokens=(), pages=pages, computed=40, replace=True) == (0, 40)


def test_what_was_seen_at_the_ranks_before_is_saved_again() -> None:
    world = World()
    world.store()
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 40
    world.store(bits=0)  # the ranks were emptied
    world.planner.renew()
    assert world.planner.advance("a", tokens=(), pages=world.pages(40), computed=40) == (0, 40)


def test_a_load_under_way_ends_and_nothing_of_its_request_is_saved() -> None:
    world = World()
    world.store(world_tokens := list(range(1, 41)))
    world.admit("a", [*world_tokens, *range(100, 124)])
    world.load("a")
    world.planner.renew()
    world.planner.loaded("a")
    assert world.planner.advance("a", tokens=(), pages=world.pages(24), computed=64) is None
