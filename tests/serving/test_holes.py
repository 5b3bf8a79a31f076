"""A hole in a stored prefix: what is offered in front of it and behind it, and how it is filled.

A store of prefixes finds nothing behind a hole from token 0 on, so that such an offer ends there,
and the request that computes the rest fills the hole with it. Where the engine itself has in place
what fills the hole, what lies behind it can be loaded.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.serving.contract_rig import Rig, tokens
from tests.serving.planner_world import BLOCK, FULL, TOKENS, World
from tests.serving.rank_rig import RankRig, prompt
from tierkv.blocks import KeyChain, part_id
from tierkv.decisions.types import EvictReason, GroupRule
from tierkv.layout import GroupKind
from tierkv.testing.serving import GroupSpec, Mode, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId

SLIDING = GroupRule(GroupKind.SLIDING, 9)


def _hole(world: World, block: int, ids: Sequence[int] = TOKENS) -> None:
    """The ranks hold a prompt but for one block of it, of the first group."""
    for rank in range(world.ranks):
        space = world.spaces(None)[rank]
        chain = KeyChain(space.root("", b""), BLOCK)
        chain.follow(ids)
        world.index.apply(rank, [(part_id(chain.keys[block], 0), 0)])


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)], ids=["full", "sliding"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offer_ends_at_a_hole_unless_the_engine_has_it_in_place(
    groups: Sequence[GroupRule], ranks: int
) -> None:
    world = World(ranks, groups)
    world.store()
    _hole(world, 1)
    world.admit()
    offers = [world.planner.offer("a", computed, 0.0) for computed in (0, 8, 16, 24, 20)]
    assert offers == [8, 0, 24, 16, 20]


def test_of_two_holes_the_first_that_is_not_in_place_ends_the_offer() -> None:
    world = World()
    world.store()
    _hole(world, 0)
    _hole(world, 3)
    world.admit()
    assert [world.planner.offer("a", computed, 0.0) for computed in (0, 8, 16, 32)] == [0, 16, 8, 8]


def test_a_hole_is_saved_by_who_loads_what_lies_behind_it() -> None:
    world = World()
    world.store()
    _hole(world, 1)
    world.admit()
    orders = world.load(computed=16)
    assert [load[1:3] for load in orders.loads] == [(16, 40)]
    world.planner.loaded("a")
    assert world.planner.due("a", 40)
    world.planner.advance("a", tokens=[7], pages=world.pages(8), computed=41)
    assert [save[1:] for save in world.planner.step().saves] == [(8, 40)]
    world.planner.advance("a", tokens=[7] * 7, pages=[[]], computed=48)
    assert [save[1:] for save in world.planner.step().saves] == [(40, 48)]


def test_a_hole_is_saved_too_if_the_load_behind_it_fails() -> None:
    world = World()
    world.store()
    _hole(world, 1)
    world.admit()
    world.load(computed=16)
    world.planner.failed("a", 24, 0.0)
    world.planner.advance("a", tokens=(), pages=world.pages(40), computed=40, replace=True, kept=24)
    assert [save[1:] for save in world.planner.step().saves] == [(8, 40)]


def test_behind_a_hole_what_failed_lately_is_not_offered() -> None:
    world = World()
    world.store()
    world.admit("x")
    world.load("x")
    world.planner.failed("x", 24, 0.0)
    _hole(world, 0)
    world.admit()
    assert world.planner.offer("a", 8, 1.0) == 16
    assert world.planner.offer("a", 8, 31.0) == 32


@pytest.mark.parametrize("mode", [Mode(), Mode(groups=(GroupSpec(), GroupSpec(window=9)))])
def test_a_hole_that_the_engine_covers_costs_no_recomputation_and_is_filled(mode: Mode) -> None:
    long, short = tokens(48), tokens(48)[:16]
    with Rig(mode) as rig:
        rig.replay.run(("first", Prompt(long)))
        rig.settle()
        rig.replay.reset(connector=False)
        rig.replay.run(("short", Prompt((*short, 5000))))  # it is in the engine's own cache now
        (rank,) = rig.ranks
        first = _first_parts(rank)
        rank._forget(first[2])
        rig.replay.run(("long", Prompt((*long, 6000))))
        assert rig.replay.offered["long"] == 32
        rig.settle()
        assert first[2] in rank._parts
        rig.replay.reset(connector=False)
        rig.replay.run(("again", Prompt((*long, 7000))))
        assert rig.replay.offered["again"] == 48


def _first_parts(rank: object) -> list[PartId]:
    """Parts of the first prompt that was stored, as a dictionary rank got them."""
    return list(rank._parts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["full", "sliding", "latent"])
def test_what_lies_behind_a_hole_is_not_copied_again_and_is_found_once_it_is_filled(
    kind: str,
) -> None:
    with RankRig(kind) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        before = rig.rank.counters.snapshot()
        chain = KeyChain(rig.space.root("", b""), rig.block)
        chain.follow(ids)
        group = next(n for n, g in enumerate(rig.pages.groups) if g.window is None)

        async def drop() -> None:
            core = rig.manager.engine.core
            part = part_id(chain.keys[2], group)
            core.free(core.decisions.forget([part], EvictReason.DAMAGED, core.clock()))

        rig.manager.call(drop)
        # a request that is offered more has no pages for the windows of a shorter prefix
        assert rig.load("b", ids)[1].tokens == (0 if kind == "sliding" else 16)
        pages, behind = rig.load("c", ids, start=32)
        assert behind.tokens == 48
        assert rig.right(ids, pages, 48)
        rig.save("d", ids)
        after = rig.rank.counters.snapshot()
        assert after["save_blocks"] - before["save_blocks"] == 1  # the others were there
        assert rig.load("e", ids)[1].tokens == 48


@pytest.mark.parametrize("seed", range(4))
def test_f020_holes_at_any_place_change_no_answer(seed: int) -> None:
    """Blocks go one by one, the engine's own cache comes and goes: what runs reads what it should.

    The replay checks every page that a step reads.
    """
    dice = random.Random(seed)
    mode = Mode(groups=(GroupSpec(), GroupSpec(window=9))) if seed % 2 else Mode()
    roots = [tokens(40, at) for at in range(3)]
    offered = 0
    with Rig(mode) as rig:
        (rank,) = rig.ranks
        for turn in range(60):
            root = dice.choice(roots)[: dice.randrange(8, 41)]
            rig.replay.run((f"r{turn}", Prompt((*root, 9000 + turn), max_tokens=4)))
            offered += rig.replay.offered[f"r{turn}"]
            if dice.random() < 0.3:
                rig.replay.reset(connector=False)
            for part in dice.sample(list(rank._parts), min(2, len(rank._parts))):
                rank._forget(part)
    assert offered > 0
