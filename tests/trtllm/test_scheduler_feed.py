"""The thread that gets blocks held: what it asks the ranks for, and what it gives back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.trtllm.running import PATIENT
from tierkv.blocks import BlockKey, Identity, KeyChain, PartId, part_id
from tierkv.errors import ClosedError
from tierkv.layout import Layout, Space
from tierkv_adapters.serving.orders import RequestFacts
from tierkv_adapters.trtllm.feed import HoldFeed, Wish
from tierkv_adapters.trtllm.holds import Run
from tierkv_adapters.trtllm.shapes import RankFacts, write_facts
from tierkv_adapters.trtllm.watching import Residency

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tierkv_adapters.serving.replicas import ReplicaIndex

SIZE = 4
RANKS = 2
TOKENS = list(range(40))
FACTS = RequestFacts("1")


class Held:
    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = tuple(keys)
        self.blocks = len(keys)
        self.parts: tuple[PartId, ...] = tuple(part_id(key, 0) for key in keys)
        self.released = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class Rank:
    """A rank that holds what it is told to."""

    index: ReplicaIndex
    number: int
    most: int = 1000
    broken: bool = False
    closed: bool = False
    holds: list[Held] = field(default_factory=list)

    def start(self, within: float) -> None:
        self.index.complete(self.number)

    def hold(self, space: Space, facts: RequestFacts, keys: Sequence[BlockKey]) -> Held:
        if self.broken:
            raise ClosedError("planted")
        self.holds.append(Held(keys[: self.most]))
        return self.holds[-1]

    def close(self) -> None:
        self.closed = True

    def has(self, facts: RankFacts, tokens: Sequence[int]) -> None:
        """Tell that the blocks of a prompt are in some tier."""
        self.index.apply(self.number, [(part_id(key, 0), 2) for key in keys(facts, tokens)])

    def standing(self) -> list[int]:
        """Blocks of the holds that were not given back."""
        return [held.blocks for held in self.holds if not held.released]


def facts_of(number: int, memory: int = 1 << 24) -> RankFacts:
    layout = Layout.uniform(1, 1, 8, "float32")
    identity = Identity("m", "w", shard=(number, RANKS))
    return RankFacts(number, RANKS, identity, layout, SIZE, (SIZE,), memory)


def keys(facts: RankFacts, tokens: Sequence[int]) -> list[BlockKey]:
    chain = KeyChain(facts.space(None).root("", b""), SIZE)
    chain.follow(tokens)
    return chain.keys


class Rig:
    def __init__(self, folder: Path, memory: int = 1 << 24) -> None:
        self.ranks: dict[int, Rank] = {}
        self.facts = [facts_of(number, memory) for number in range(RANKS)]
        self.folder = str(folder)
        self.feed = HoldFeed(self.folder, RANKS, 0.5, self._connect)

    def _connect(self, path: str, index: ReplicaIndex, rank: int) -> Rank:
        self.ranks[rank] = Rank(index, rank)
        return self.ranks[rank]

    def start(self) -> Rig:
        self.feed.start()
        for facts in self.facts:
            assert self.feed.connected() is None
            write_facts(self.folder, facts)
        self.wait(lambda: self.feed.connected() is not None)
        return self

    @staticmethod
    def wait(true: object) -> None:
        deadline = time.monotonic() + PATIENT
        while not true():  # type: ignore[operator]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def has(self, tokens: Sequence[int]) -> None:
        for number, rank in self.ranks.items():
            rank.has(self.facts[number], tokens)

    def ask(self, tokens: Sequence[int], *, stored: bool = False) -> None:
        self.feed.wish(Wish(FACTS, tokens, len(tokens), stored))
        assert self.feed.settled(PATIENT)

    def ready(self, tokens: Sequence[int]) -> int:
        ranks = self.feed.connected()
        return 0 if ranks is None else ranks.book.ready_blocks(keys(self.facts[0], tokens))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path).start()
    yield rig
    rig.feed.close()
    assert all(rank.closed for rank in rig.ranks.values())
    assert "tierkv-trtllm-feed" not in {thread.name for thread in threading.enumerate()}


def test_what_some_tier_has_is_held_on_every_rank(rig: Rig) -> None:
    rig.has(TOKENS[:24])
    rig.ask(TOKENS)

    assert rig.ready(TOKENS) == 6
    assert [rank.standing() for rank in rig.ranks.values()] == [[6], [6]]
    assert rig.ranks[0].holds[0].keys != rig.ranks[1].holds[0].keys


def test_a_prompt_that_nobody_knows_costs_the_ranks_nothing(rig: Rig) -> None:
    rig.ask(TOKENS)
    assert not any(rank.holds for rank in rig.ranks.values())


def test_the_rank_that_holds_least_decides(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.ranks[1].most = 3
    rig.ask(TOKENS)

    assert rig.ready(TOKENS) == 3
    assert [rank.standing() for rank in rig.ranks.values()] == [[3], [3]]


def test_a_rank_that_does_not_answer_leaves_nothing_held(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.ranks[1].broken = True
    rig.ask(TOKENS)

    assert rig.ready(TOKENS) == 0
    assert rig.ranks[0].standing() == []
    assert rig.feed.errors == 1


def test_blocks_that_are_being_stored_are_waited_for(rig: Rig) -> None:
    rig.feed.wish(Wish(FACTS, TOKENS, len(TOKENS), stored=True))
    assert not rig.feed.settled(0.1)
    rig.has(TOKENS)
    assert rig.feed.settled(PATIENT)
    assert rig.ready(TOKENS) == 10


def test_blocks_that_are_never_stored_are_not_waited_for_for_ever(rig: Rig) -> None:
    rig.has(TOKENS[:8])
    rig.ask(TOKENS, stored=True)
    assert rig.ready(TOKENS) == 2


def test_a_rank_that_is_lost_and_comes_back_at_once_holds_nothing(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.ask(TOKENS)
    rank = rig.ranks[1]
    rank.index.lost(1)
    rank.index.complete(1)
    rig.wait(lambda: rig.feed.connected() is not None)

    assert rig.ready(TOKENS) == 0
    assert rig.ranks[0].standing() == []
    rig.has(TOKENS)
    rig.ask(TOKENS)
    assert rig.ready(TOKENS) == 10


def test_what_makes_room_is_given_back_on_every_rank(tmp_path: Path) -> None:
    rig = Rig(tmp_path, memory=2 * 12 * 8192).start()  # a part takes two pages: room for twelve
    try:
        others = list(range(100, 132))
        rig.has(TOKENS)
        rig.has(others)
        rig.ask(TOKENS)
        rig.ask(others)
        assert [rig.ready(TOKENS), rig.ready(others)] == [0, 8]
        assert [rank.standing() for rank in rig.ranks.values()] == [[8], [8]]
    finally:
        rig.feed.close()


def test_a_wish_that_fails_costs_the_others_nothing(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.feed.wish(Wish(FACTS, ["no token"], 1, stored=False))  # type: ignore[list-item]
    rig.ask(TOKENS)

    assert rig.ready(TOKENS) == 10
    assert rig.feed.errors == 1


def test_closing_gives_every_hold_back(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.ask(TOKENS)
    rig.feed.close()
    assert [rank.standing() for rank in rig.ranks.values()] == [[], []]
    assert rig.ready(TOKENS) == 0


# ---------------------------------------------------------------------- damage


def _moves(rig: Rig, rank: int, block: int, tiers: int) -> None:
    """A rank tells where a block's part is."""
    name = keys(rig.facts[rank], TOKENS)[block]
    rig.ranks[rank].index.apply(rank, [(part_id(name, 0), tiers)])


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("tiers", [0, 2], ids=["nowhere", "disk"])
def test_a_held_part_that_left_memory_is_offered_no_more(rig: Rig, rank: int, tiers: int) -> None:
    other = list(range(100, 124))
    rig.has(TOKENS)
    rig.has(other)
    rig.ask(TOKENS[:24])
    rig.ask(TOKENS)
    rig.ask(other)
    _moves(rig, rank, 3, tiers)
    rig.wait(lambda: rig.ready(TOKENS) == 0)
    assert rig.ready(other) == 6
    rig.wait(lambda: all(r.standing() == [6] for r in rig.ranks.values()))
    ranks = rig.feed.connected()
    assert ranks is not None
    assert ranks.book.counters.damaged >= 1
    rig.has(TOKENS)  # somebody stored it again
    rig.ask(TOKENS)
    assert rig.ready(TOKENS) == 10


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_part_that_is_damaged_while_others_are_asked_is_not_offered(
    rig: Rig, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.has(TOKENS)
    slow = rig.ranks[1 - rank]
    hold = slow.hold

    def late(space: Space, facts: RequestFacts, names: Sequence[BlockKey]) -> Held:
        rig.wait(lambda: rig.ranks[rank].holds)
        _moves(rig, rank, 3, 0)
        return hold(space, facts, names)

    monkeypatch.setattr(slow, "hold", late)
    rig.ask(TOKENS)
    rig.wait(lambda: rig.ready(TOKENS) == 0)
    rig.wait(lambda: not any(r.standing() for r in rig.ranks.values()))
    ranks = rig.feed.connected()
    assert ranks is not None
    assert ranks.book.counters.damaged == 1
    assert not any(rig.feed._index._watched)


def test_what_a_load_under_way_may_read_stays_held(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.ask(TOKENS)
    ranks = rig.feed.connected()
    assert ranks is not None
    with ranks.book.lock:
        assert ranks.book.match([keys(rig.facts[0], TOKENS)], ranks.rules, SIZE) == 10
        ranks.book.pin("a", 10)
    _moves(rig, 1, 3, 0)
    rig.wait(lambda: rig.ready(TOKENS) == 0)
    assert [rank.standing() for rank in rig.ranks.values()] == [[10], [10]]
    ranks.book.unpin("a")
    rig.wait(lambda: not any(rank.standing() for rank in rig.ranks.values()))


def test_copies_that_come_and_go_elsewhere_are_no_damage(rig: Rig) -> None:
    rig.has(TOKENS)
    rig.ask(TOKENS[:24])
    ranks = rig.feed.connected()
    assert ranks is not None
    for tiers in (3, 1, 3):
        _moves(rig, 0, 3, tiers)
    _moves(rig, 0, 9, 0)  # it is not held
    rig.ask(TOKENS[:24])
    assert rig.ready(TOKENS) == 6
    assert ranks.book.counters.damaged == 0


def test_what_is_told_late_is_no_damage() -> None:
    """A part was on disk alone before it was held: that may be told behind the hold."""
    woken: list[int] = []
    index = Residency(2, woken.append, lambda: woken.append(-1))
    names = [part_id(key, 0) for key in keys(facts_of(0), TOKENS)]
    run = Run(tuple(keys(facts_of(0), TOKENS)), tuple(names), [Held([]), Held([])])
    run.handles[1].parts = tuple(names)
    index.learn(1, 0b11)
    index.watch(run)
    index.apply(1, [(names[4], 0b100)])
    assert woken == [-1]
    assert index.damaged([run]) == []
    assert index.suspects()
    index.apply(1, [(names[4], 0b110)])
    assert index.damaged([run]) == []
    assert not index.suspects()
    index.apply(1, [(names[4], 0b100)])
    assert [index.damaged([run]) for _ in range(3)] == [[], [run], []]
    index.forget(run)
    index.apply(1, [(names[4], 0)])
    assert not index.suspects()
    index.lost(0)
    assert woken[-1] == 0
