"""The planner by itself: what is offered, ordered, told, and never told."""

from __future__ import annotations

from tests.serving.planner_world import FULL, TOKENS, World
from tierkv.decisions.types import GroupRule
from tierkv.layout import GroupKind
from tierkv_adapters.serving.orders import RequestFacts
from tierkv_adapters.serving.settings import ServingSettings


def test_a_prompt_that_is_there_is_offered_whole_or_less_what_has_to_be_left() -> None:
    world = World()
    world.store()
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 40
    assert world.planner.offer("a", 0, 0.0, leave=1) == 32
    assert world.planner.offer("a", 16, 0.0) == 24
    assert world.planner.offer("a", 12, 0.0) == 28  # a page's border inside a block
    assert world.planner.offer("a", 13, 0.0) == 0
    assert world.planner.offer("a", 40, 0.0) == 0
    assert world.planner.counters.misaligned == 1


def test_any_rank_s_miss_shrinks_the_offer() -> None:
    world = World(ranks=3)
    world.store(TOKENS)
    world.store(TOKENS[24:], ranks=[1], bits=0)
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 40
    world.index.lost(2)
    assert world.planner.offer("a", 0, 0.0) == 0
    world.store(TOKENS[:24], ranks=[2])
    assert world.planner.offer("a", 0, 0.0) == 24


def test_keys_differ_by_rank() -> None:
    world = World(ranks=2)
    world.store(ranks=[0])
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 0


def test_an_order_comes_with_all_that_ranks_need_and_nothing_comes_without() -> None:
    world = World()
    world.store()
    world.admit(session="chat", tenant="t")  # nothing is stored for that tenant
    assert world.planner.offer("a", 0, 0.0) == 0
    assert world.planner.step().fresh == []
    world.admit("b")
    orders = world.load("b")
    assert [facts.id for facts in orders.fresh] == ["b"]
    (grown,) = orders.grown
    assert (grown.id, grown.replace, list(grown.tokens)) == ("b", False, list(TOKENS))
    assert [len(pages) for pages in grown.pages] == [10]
    (load,) = orders.loads
    assert (load.id, load.start, load.stop, load.deadline, load.sync) == ("b", 0, 40, 10.0, False)
    assert set(orders.taken[0]) == set(grown.pages[0])
    assert world.planner.step() == type(orders)()


def test_pages_before_what_is_computed_are_not_taken() -> None:
    world = World()
    world.store()
    world.admit()
    orders = world.load(computed=16)
    assert len(orders.taken[0]) == 6
    assert orders.loads[0].start == 16


def test_full_blocks_are_saved_once_each_as_they_fill() -> None:
    world = World()
    world.admit()
    pages = world.pages(60)
    world.planner.advance("a", tokens=(), pages=[p[:4] for p in pages], computed=15, replace=True)
    orders = world.planner.step()
    assert [save[1:] for save in orders.saves] == [(0, 8)]
    assert list(orders.grown[0].tokens) == list(TOKENS[:8])
    world.planner.advance("a", tokens=(), pages=[p[4:10] for p in pages], computed=40)
    orders = world.planner.step()
    assert [save[1:] for save in orders.saves] == [(8, 40)]
    assert (orders.fresh, list(orders.grown[0].tokens)) == ([], list(TOKENS[8:]))
    for at in range(40, 48):
        assert not world.planner.due("a", at)
        world.planner.advance("a", tokens=[at], pages=[[]], computed=at)
        assert world.planner.step().saves == []
    world.planner.advance("a", tokens=[], pages=[p[10:] for p in pages], computed=48)
    assert [save[1:] for save in world.planner.step().saves] == [(40, 48)]


def test_what_the_ranks_hold_is_not_saved_again() -> None:
    world = World()
    world.store(TOKENS[:24])
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 24
    world.planner.advance("a", tokens=(), pages=world.pages(40), computed=40, replace=True)
    assert [save[1:] for save in world.planner.step().saves] == [(24, 40)]


def test_limits_of_a_request() -> None:
    world = World()
    world.store()
    planner = world.planner
    for id, load, save in (("a", 20, None), ("b", 0, 0), ("c", None, 17)):
        planner.admit(RequestFacts(id), TOKENS, load_limit=load, save_limit=save)
    assert [planner.offer(id, 0, 0.0) for id in "abc"] == [16, 0, 40]
    world.store(bits=0)
    for id in "bc":
        planner.preempt(id)
        planner.advance(id, tokens=(), pages=world.pages(40), computed=40, replace=True)
    assert [(save.id, save.stop) for save in planner.step().saves] == [("c", 16)]


def test_small_offers_are_not_worth_a_load() -> None:
    world = World(settings=ServingSettings(min_load_tokens=24))
    world.store()
    world.admit()
    assert world.planner.offer("a", 24, 0.0) == 0
    assert world.planner.offer("a", 16, 0.0) == 24


def test_tokens_that_are_no_ids_are_not_cached() -> None:
    world = World()
    for id, tokens in (("a", [-1] * 16), ("b", [2**32] * 16), ("c", [None] * 16)):
        world.admit(id, tokens)  # type: ignore[arg-type]
        assert world.planner.offer(id, 0, 0.0) == 0
        world.planner.advance(id, tokens=(), pages=world.pages(16), computed=16, replace=True)
    orders = world.planner.step()
    assert orders.saves == []
    assert len(orders.taken[0]) == 12  # a copy may read them all the same


def test_unknown_requests_are_told_of_nowhere() -> None:
    world = World()
    planner = world.planner
    assert planner.known("x") is None
    assert planner.offer("x", 0, 0.0) == planner.source("x") == 0
    planner.accept("x", world.pages(8), 8)
    planner.loaded("x")
    planner.failed("x", 0, 0.0)
    planner.preempt("x")
    planner.finish("x")
    planner.learn("x", [1])
    planner.advance("x", tokens=(), pages=[[5, -1, 6]], computed=8)
    orders = planner.step()
    assert list(orders.taken[0]) == [5, 6]
    assert (orders.loads, orders.saves, orders.ended, orders.voided) == ([], [], [], [])


def test_speed_of_prefill_travels_along() -> None:
    assert World().planner.step((512, 0.25)).prefill == (512, 0.25)


def test_a_window_s_lost_pages_are_told_before_they_are_needed() -> None:
    """A group whose pages left the window is told anew where the save reads pages that differ."""
    world = World(groups=(FULL, GroupRule(GroupKind.SLIDING, 5)))
    world.admit()
    pages = world.pages(40)
    planner = world.planner
    first = [p[:4] for p in pages]
    planner.advance("a", tokens=(), pages=first, computed=15, replace=True)
    planner.step()
    gone = [pages[0][:10], [-1, -1, -1, *pages[1][3:10]]]
    planner.advance("a", tokens=(), pages=gone, computed=40, replace=True, kept=15)
    (grown,) = planner.step().grown
    assert grown.replace  # page 2 is of the block that is saved now
    assert [list(p) for p in grown.pages] == gone
    world.admit("b")
    planner.advance("b", tokens=(), pages=first, computed=16, replace=True)
    planner.step()
    gone = [pages[0][:10], [-1, -1, *pages[1][2:10]]]
    planner.advance("b", tokens=(), pages=gone, computed=24, replace=True, kept=16)
    assert not planner.step().grown[0].replace  # nobody reads those again


def test_a_hole_ends_what_is_saved_of_a_request() -> None:
    world = World()
    world.admit()
    pages = world.pages(40)
    pages[0][5] = -1
    world.planner.advance("a", tokens=(), pages=pages, computed=40, replace=True)
    assert [save[1:] for save in world.planner.step().saves] == [(0, 16)]
    assert world.planner.counters.unbacked_blocks == 3
    world.planner.advance("a", tokens=range(100, 116), pages=world.pages(16), computed=56)
    assert world.planner.step().saves == []


def test_source_is_the_slowest_tier_read() -> None:
    world = World(ranks=2)
    world.store()
    world.store(TOKENS, ranks=[1], bits=0b10)
    world.admit()
    assert world.planner.source("a") == 0
    world.planner.offer("a", 0, 0.0)
    assert world.planner.source("a") == 0b10
    world.planner.accept("a", world.pages(40), 40)
    assert world.planner.source("a") == 0b10
