"""Which blocks are held ready, which holds are given back, and what an offer keeps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tierkv.blocks import BlockKey, KeyChain, part_id
from tierkv.decisions.types import GroupRule
from tierkv.layout import GroupKind
from tierkv_adapters.serving.replicas import needed_parts
from tierkv_adapters.trtllm.holds import HoldBook, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

FULL = (GroupRule(GroupKind.FULL),)
SIZE = 4


def keys(seed: int, blocks: int, shared: int = 0) -> list[BlockKey]:
    """Keys of a prompt that begins with ``shared`` blocks of prompt 0."""
    chain = KeyChain(BlockKey(bytes(32)), SIZE)
    chain.follow([*range(shared * SIZE), *(1000 * seed + i for i in range(blocks * SIZE))])
    return chain.keys[:blocks]


def book(blocks: int, rules: Sequence[GroupRule] = FULL) -> HoldBook:
    """A book with room for that many parts."""
    return HoldBook(rules, [10] * len(rules), SIZE, blocks * 10)


def hold(held: HoldBook, names: Sequence[BlockKey]) -> tuple[int, list[Run]]:
    """Hold a run as the feed does; blocks held, and what was given back."""
    blocks, gone = held.fit(names)
    if blocks:
        run = tuple(names[:blocks])
        gone += held.admit(Run(run, needed_parts(run, held.rules, SIZE)))
    return blocks, gone


def pin(held: HoldBook, name: str, names: Sequence[BlockKey]) -> int:
    """Offer as the scheduler does."""
    with held.lock:
        found = held.match([names], held.rules, SIZE)
        if found:
            held.pin(name, found)
    return found


def test_nothing_is_ready_that_is_not_held() -> None:
    held = book(10)
    mine = keys(1, 6)
    assert held.match([mine], FULL, SIZE) == 0
    hold(held, mine[:4])
    assert held.match([mine], FULL, SIZE) == 4
    assert held.source([mine], FULL, SIZE, 4) == 1


def test_the_least_recently_offered_run_goes_first() -> None:
    held = book(12)
    one, two, three, four = (keys(seed, 4) for seed in (1, 2, 3, 4))
    for mine in (one, two, three):
        assert hold(held, mine) == (4, [])
    pin(held, "a", one)
    held.unpin("a")
    blocks, gone = hold(held, four)

    assert blocks == 4
    assert [run.keys for run in gone] == [tuple(two)]
    assert [held.ready_blocks(mine) for mine in (one, two, three, four)] == [4, 0, 4, 4]
    assert held.used == 120


def test_what_an_offer_in_flight_needs_is_never_given_back() -> None:
    held = book(8)
    one, two = keys(1, 4), keys(2, 4)
    hold(held, one)
    hold(held, two)
    assert pin(held, "a", one) == pin(held, "b", two) == 4

    assert hold(held, keys(3, 4)) == (0, [])
    held.unpin("a")
    blocks, gone = hold(held, keys(3, 3))
    assert (blocks, [run.keys for run in gone]) == (3, [tuple(one)])


def test_a_longer_run_takes_the_place_of_its_beginning() -> None:
    held = book(20)
    mine = keys(1, 8)
    hold(held, mine[:5])
    pin(held, "a", mine[:5])
    blocks, gone = hold(held, mine)

    assert (blocks, [run.keys for run in gone]) == (8, [tuple(mine[:5])])
    assert held.ready_blocks(mine) == 8
    assert held.used == 80


def test_shared_beginnings_are_counted_once_and_stay_with_the_last_run() -> None:
    held = book(10)
    one, two = keys(1, 5, shared=3), keys(2, 5, shared=3)
    assert one[:3] == two[:3]
    hold(held, one)
    hold(held, two)
    assert held.used == 70
    pin(held, "a", two)
    blocks, gone = hold(held, keys(3, 5))

    assert (blocks, [run.keys for run in gone]) == (5, [tuple(one)])
    assert held.ready_blocks(one) == 3
    assert held.ready_blocks(two) == 5


def test_a_run_that_cannot_fit_is_held_in_part() -> None:
    held = book(3)
    assert hold(held, keys(1, 9)) == (3, [])
    assert held.ready_blocks(keys(1, 9)) == 3


def test_windows_and_states_need_the_parts_at_the_end_only() -> None:
    rules = (
        GroupRule(GroupKind.FULL),
        GroupRule(GroupKind.SLIDING, 6),
        GroupRule(GroupKind.STATE),
    )
    mine = keys(1, 6)
    parts = needed_parts(mine, rules, SIZE)

    assert parts == (
        *(part_id(key, 0) for key in mine),
        *(part_id(key, 1) for key in mine[4:]),  # the last five tokens
        part_id(mine[5], 2),
    )
    held = book(30, rules)
    hold(held, mine)
    assert [held.ready_blocks(mine[:n]) for n in (4, 5, 6)] == [0, 0, 6]


def test_a_lost_rank_leaves_nothing_ready() -> None:
    held = book(30)
    for seed in range(3):
        hold(held, keys(seed, 4))

    assert len(held.clear()) == 3
    assert (held.used, held.ready_blocks(keys(1, 4))) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_books_balance_whatever_happens(seed: int) -> None:
    """Against a mirror: what is ready is exactly what some run holds; pins are kept."""
    rng = random.Random(seed)
    held = book(16)
    runs: list[Run] = []
    pinned: dict[str, list[BlockKey]] = {}
    for step in range(300):
        mine = keys(rng.randrange(6), rng.randrange(1, 9), shared=rng.randrange(3))
        if rng.random() < 0.5:
            blocks, gone = held.fit(mine)
            if blocks:
                names = tuple(mine[:blocks])
                run = Run(names, needed_parts(names, FULL, SIZE))
                runs.append(run)
                gone += held.admit(run)
            runs = [run for run in runs if run not in gone]
        elif rng.random() < 0.6:
            found = pin(held, str(step), mine)
            pinned[str(step)] = mine[:found]
        elif pinned:
            name = rng.choice(sorted(pinned))
            held.unpin(name)
            del pinned[name]
        parts = {part for run in runs for part in run.parts}
        assert held.used == 10 * len(parts) <= held.budget
        assert held.ready_blocks(mine) == next(
            (i for i, key in enumerate(mine) if part_id(key, 0) not in parts), len(mine)
        )
        for kept in pinned.values():
            assert all(part_id(key, 0) in parts for key in kept)


def test_a_prompt_far_beyond_the_room_is_cut_in_a_few_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lookups wait meanwhile, so the work must not grow with the square of the prompt."""
    held, looks = book(100), 0
    more = held._more

    def counted(names: Sequence[BlockKey]) -> int:
        nonlocal looks
        looks += 1
        return more(names)

    monkeypatch.setattr(held, "_more", counted)
    blocks, _ = held.fit(keys(1, 2000))
    assert blocks == 100
    assert looks <= 4


@pytest.mark.parametrize("seed", range(20))
def test_as_many_blocks_are_held_as_there_is_room_for(seed: int) -> None:
    rng = random.Random(seed)
    rules = (GroupRule(GroupKind.FULL), GroupRule(GroupKind.SLIDING, rng.randrange(1, 40)))
    held = HoldBook(rules, [rng.randrange(1, 9), rng.randrange(1, 9)], SIZE, 150)
    hold(held, keys(1, rng.randrange(1, 12)))
    pin(held, "a", keys(1, 12))
    names = keys(1, 60) if rng.random() < 0.5 else keys(2, 60)
    blocks, _ = held.fit(names)
    room = held.budget - held.used
    most = max(n for n in range(61) if held._more(names[:n]) <= room)
    assert held._more(names[:blocks]) <= room
    assert blocks == most
