"""Field cases of the planner: identities, ends in every state, loads that fall short."""

from __future__ import annotations

from array import array

import pytest

from tests.serving.planner_world import BLOCK, TOKENS, World
from tierkv.blocks import AdapterId, Media
from tierkv_adapters.serving.orders import RequestFacts


def test_f005_another_adapter_is_another_space() -> None:
    world = World()
    one, two = AdapterId("one", "1"), AdapterId("two", "1")
    world.store(facts=RequestFacts("x", adapter=one))
    for id, adapter in (("a", None), ("b", two), ("c", one)):
        world.admit(id, adapter=adapter)
    assert [world.planner.offer(id, 0, 0.0) for id in "abc"] == [0, 0, 40]


def test_f006_an_adapter_reloaded_under_its_name_is_another_space() -> None:
    world = World()
    world.store(facts=RequestFacts("x", adapter=AdapterId("one", "1")))
    world.admit(adapter=AdapterId("one", "2"))
    assert world.planner.offer("a", 0, 0.0) == 0


def test_f010_salt_and_tenant_reach_every_key() -> None:
    world = World()
    world.store(facts=RequestFacts("x", salt=b"s", tenant="t"))
    for id, salt, tenant in (("a", b"", "t"), ("b", b"s", ""), ("c", b"z", "t"), ("d", b"s", "t")):
        world.admit(id, salt=salt, tenant=tenant)
    assert [world.planner.offer(id, 0, 0.0) for id in "abcd"] == [0, 0, 0, 40]


def test_f011_media_behind_equal_placeholders_are_told_apart() -> None:
    world = World()
    cat, dog = Media(20, b"cat" * 10), Media(20, b"dog" * 10)
    world.store(facts=RequestFacts("x", media=(cat,)))
    for id, media in (("a", (dog,)), ("b", ()), ("c", (cat,))):
        world.admit(id, media=media)
    assert [world.planner.offer(id, 0, 0.0) for id in "abc"] == [16, 16, 40]


def test_f020_a_load_that_falls_short_is_computed_and_not_offered_again() -> None:
    """What was said to be there is gone: no exception, no second try, and the block is saved."""
    world = World()
    world.store()
    world.admit()
    world.load()
    planner = world.planner
    planner.failed("a", 16, 0.0)
    assert planner.offer("a", 16, 1.0) == 0
    world.admit("b")
    assert planner.offer("b", 0, 1.0) == 16  # nor to others, for a while
    assert planner.offer("b", 0, 31.0) == 40
    planner.advance("a", tokens=(), pages=world.pages(40), computed=40, replace=True, kept=16)
    orders = planner.step()
    assert [save[1:] for save in orders.saves] == [(16, 40)]
    counts = planner.counters
    assert (counts.loads, counts.failed_loads) == (1, 1)
    assert (counts.loaded_tokens, counts.failed_tokens) == (16, 24)


@pytest.mark.parametrize("place", [0, 16, 40])
def test_a_request_tries_twice_at_most(place: int) -> None:
    world = World()
    world.store()
    world.admit()
    planner, tries = world.planner, 0
    while planner.offer("a", 0, 1000.0 * tries):
        tries += 1
        assert tries <= 2
        world.load()
        planner.failed("a", min(place, 8 * tries), 1000.0 * tries, anew=True)
    assert tries >= 1


def test_f050_a_preempted_request_comes_back_while_its_save_is_under_way() -> None:
    world = World()
    world.admit()
    planner, first = world.planner, world.pages(40)
    planner.advance("a", tokens=(), pages=first, computed=40, replace=True)
    assert planner.step().saves
    planner.preempt("a")
    second = world.pages(40)
    planner.advance("a", tokens=(), pages=second, computed=40, replace=True)
    orders = planner.step()
    assert orders.voided == ["a"]
    assert (orders.ended, orders.fresh) == ([], [])
    (grown,) = orders.grown
    assert (grown.replace, list(grown.tokens), list(grown.pages[0])) == (True, [], second[0])
    assert [save[1:] for save in orders.saves] == [(0, 40)]  # the other save may be dropped
    assert set(orders.taken[0]) == set(second[0])


def test_f050_preempted_and_back_with_an_offer_in_one_step() -> None:
    world = World()
    world.admit()
    planner = world.planner
    planner.advance("a", tokens=(), pages=world.pages(40), computed=40, replace=True)
    planner.step()
    world.store()
    planner.preempt("a")
    orders = world.load()
    assert orders.voided == ["a"]
    assert orders.grown[0].replace
    assert (orders.loads[0].start, orders.loads[0].stop) == (0, 40)


@pytest.mark.parametrize("state", ["waiting", "offered", "loading", "loaded", "running"])
def test_f051_a_request_may_end_in_any_state(state: str) -> None:
    world = World()
    world.store()
    world.admit()
    planner = world.planner
    if state != "waiting":
        planner.offer("a", 0, 0.0)
    if state in {"loading", "loaded", "running"}:
        world.load()
    if state in {"loaded", "running"}:
        planner.loaded("a")
    if state == "running":
        planner.advance("a", tokens=[7] * 8, pages=world.pages(8), computed=48)
    planner.finish("a")
    planner.finish("a")
    orders = planner.step()
    assert orders.ended == (["a"] if state in {"loading", "loaded", "running"} else [])
    assert (orders.loads, orders.saves, orders.grown) == ([], [], [])
    planner.loaded("a")  # what comes late is for nobody
    planner.failed("a", 0, 0.0)
    world.admit()
    assert planner.offer("a", 0, 0.0) == 40


def test_f051_a_request_that_ends_before_its_step_is_never_told() -> None:
    world = World()
    world.store()
    world.admit()
    planner = world.planner
    planner.accept("a", world.pages(40), planner.offer("a", 0, 0.0))
    planner.finish("a")
    orders = planner.step()
    assert (orders.fresh, orders.grown, orders.loads, orders.ended) == ([], [], [], [])


def test_f051_a_load_of_a_request_that_is_over_teaches_nothing() -> None:
    """It was given up by whoever asked: that says nothing about the block."""
    world = World()
    world.store()
    world.admit()
    world.load()
    world.planner.finish("a")
    world.planner.failed("a", 8, 0.0)
    world.admit("b")
    assert world.planner.offer("b", 0, 1.0) == 40


def test_orders_do_not_change_behind_the_ranks_back() -> None:
    """In one process orders are not pickled: what was handed over is a copy."""
    world = World()
    world.admit()
    planner = world.planner
    planner.advance("a", tokens=(), pages=world.pages(16), computed=16, replace=True)
    (grown,) = planner.step().grown
    before = grown.pages[0][:]
    planner.advance("a", tokens=(), pages=world.pages(24), computed=40)
    assert grown.pages[0] == before
    assert grown.tokens == array("I", TOKENS[:16])


def test_hashing_stops_at_the_first_slice_that_nobody_holds() -> None:
    world = World()
    long = tuple(range(100_000, 100_000 + 400 * BLOCK))
    world.store(long[: 70 * BLOCK])
    world.admit(tokens=long)
    assert world.planner.offer("a", 0, 0.0) == 70 * BLOCK
    assert len(world.planner._plans["a"]._chains[0].keys) == 128
    world.store(long)
    assert world.planner.offer("a", 0, 0.0) == 400 * BLOCK


def test_f051_an_id_that_comes_again_while_its_old_load_is_under_way() -> None:
    """The old load's end must not pass for the new one's, whose pages it did not fill."""
    world = World()
    world.store()
    world.admit()
    world.load()
    world.planner.finish("a")
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 0
    assert world.planner.advance("a", tokens=(), pages=world.pages(40), computed=40) is None
    world.planner.failed("a", 0, 0.0)  # of the old one
    assert world.planner.offer("a", 0, 1.0) == 0  # this one is computed, as it began
    world.planner.finish("a")
    world.admit()
    assert world.planner.offer("a", 0, 1.0) == 40


def test_f051_a_load_whose_end_nobody_tells_leaves_nothing_behind() -> None:
    world = World()
    world.store()
    world.admit()
    world.load()
    world.planner.finish("a", awaited=False)
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 40
