"""A client hangs up while its KV is on the way: that is nobody's failure."""

from __future__ import annotations

from tests.serving.planner_world import World


def test_a_load_that_was_given_up_blocks_nobody() -> None:
    world = World()
    world.store()
    world.admit("a")
    world.load("a")
    world.planner.finish("a")
    assert world.planner.step().ended == ["a"]
    world.planner.failed("a", 8, 1.0)  # a block came before it was stopped
    counters = world.planner.counters
    assert (counters.loaded_tokens, counters.failed_loads, counters.failed_tokens) == (8, 0, 0)
    world.admit("b")
    assert world.planner.offer("b", 0, 1.0) == 40
    assert counters.blocked == 0


def test_a_load_that_fell_short_for_one_that_waits_blocks_the_block() -> None:
    world = World()
    world.store()
    world.admit("a")
    world.load("a")
    world.planner.failed("a", 8, 1.0)
    world.admit("b")
    assert world.planner.offer("b", 0, 1.0) == 8
    assert world.planner.counters.failed_loads == 1
