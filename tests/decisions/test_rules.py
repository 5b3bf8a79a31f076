"""Rules of a tier in order: size before session, sessions swapped whole, what is shared stays."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import LineLog, replay
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.ruling import Rule, Ruled
from tierkv.decisions.types import EvictReason, GroupRule, TenantLimits, TierLimits
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import Demote, Drop, Found

NBYTES = 10
SWAP = Rule(Lru, sessions=True, target=1)


class Largest(Lru):
    """Largest first; the least recent one of equals."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        self.sizes[row] = nbytes
        super().insert(row, nbytes, clock, ident)
        self.raise_rank(row, self._rank_of(row, clock))

    def touch(self, row: int, clock: int) -> None:
        self.raise_rank(row, self._rank_of(row, clock))

    def _rank_of(self, row: int, clock: int) -> int:
        return 10**6 * (1000 - self.sizes[row]) + clock + 1


class World:
    def __init__(
        self, *rules: Rule, fast: int = 12, log: LineLog | None = None, **options: object
    ) -> None:
        self.tiers = [
            TierLimits("device", fast * NBYTES, high=1.0, low=1.0),
            TierLimits("host", 1000 * NBYTES),
            TierLimits("disk", 10000 * NBYTES),
        ]
        self.policies = [partial(Ruled, rules), Lru, Lru]
        self.core = Decisions(self.tiers, policy=self.policies, log=log, **options)  # type: ignore[arg-type]

    def put(
        self, path: Sequence[int], *, clean: bool = False, nbytes: int = NBYTES
    ) -> list[BlockKey]:
        chain = chains.keys(path)
        wanted = chains.items(chain, nbytes=nbytes)
        self.demote(*self.room(sum(i.nbytes for i in wanted)))
        stored = chains.store(self.core, 0, wanted)
        assert set(chains.skips(stored)) == {None}
        if clean:
            chains.copy(self.core, 0, 1, wanted)
        return chain

    def room(self, nbytes: int) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        return self.core.make_room(0, nbytes, tenant="t", now=0.0)

    def demote(self, drops: Sequence[Drop], demotes: Sequence[Demote]) -> None:
        """Do what an engine does with proposals."""
        del drops
        for demote in demotes:
            item = chains.items([demote.part[:32]], nbytes=demote.nbytes)[0]  # type: ignore[list-item]
            item = item._replace(part=demote.part)
            chains.copy(self.core, demote.source, demote.target, [item])
            gone = [(demote.part, demote.generation)]
            self.core.dropped(gone, demote.source, EvictReason.DEMOTED, 0.0)
        self.core.check()

    def tiers_of(self, chain: Sequence[BlockKey], group: int = 0) -> list[tuple[int, ...]]:
        return [self.core.state(chains.part(key, group), 0.0).tiers for key in chain]

    def load(self, chain: Sequence[BlockKey]) -> Found:
        return self.core.lookup(chains.query(chain), 0.0)


def test_a_whole_session_is_swapped_out_together() -> None:
    world = World(SWAP)
    idle, busy = world.put([1] * 5), world.put([2] * 5)
    drops, demotes = world.room(3 * NBYTES)  # one block is missing
    assert not drops
    assert [d.part for d in demotes] == [chains.part(key) for key in reversed(idle)]
    assert {d.target for d in demotes} == {1}
    world.demote(drops, demotes)
    assert world.tiers_of(idle) == [(1,)] * 5
    assert world.tiers_of(busy) == [(0,)] * 5


def test_the_coldest_session_goes_and_not_the_one_stored_first() -> None:
    world = World(SWAP)
    first, second = world.put([1] * 5), world.put([2] * 5)
    chains.look(world.core, first)
    world.demote(*world.room(3 * NBYTES))
    assert world.tiers_of(first) == [(0,)] * 5
    assert world.tiers_of(second) == [(1,)] * 5


def test_a_block_shared_with_an_active_session_stays() -> None:
    world = World(SWAP)
    idle = world.put([9, 9, 1, 1])
    busy = world.put([9, 9, 2, 2])
    world.demote(*world.room(7 * NBYTES))
    assert world.tiers_of(idle) == [(0,), (0,), (1,), (1,)]
    assert world.tiers_of(busy) == [(0,)] * 4


def test_a_prefix_that_another_session_uses_later_stays() -> None:
    world = World(SWAP)
    long = world.put([1] * 6)
    chains.look(world.core, long[:3])  # a session that ends where the other one goes on
    world.demote(*world.room(7 * NBYTES))
    assert world.tiers_of(long) == [(0,)] * 3 + [(1,)] * 3


def test_a_leased_session_stays() -> None:
    world = World(SWAP)
    first, second = world.put([1] * 5), world.put([2] * 5)
    found = world.load(first)
    chains.look(world.core, second)  # used later, but not in use
    world.demote(*world.room(3 * NBYTES))
    assert world.tiers_of(first) == [(0,)] * 5
    assert world.tiers_of(second) == [(1,)] * 5
    world.core.release(found.lease, 0.0)
    world.core.check()


def test_parts_of_all_groups_go_together() -> None:
    groups = (
        GroupRule(GroupKind.FULL),
        GroupRule(GroupKind.SLIDING, 8),
        GroupRule(GroupKind.STATE),
    )
    world = World(SWAP, fast=20)
    chain = chains.keys([1] * 3)
    wanted = [i for i in chains.items(chain, groups=groups) if i.part[-2:] != b"\x02\x00"]
    wanted += chains.items(chain[-1:], groups=groups)[2:]
    chains.store(world.core, 0, wanted)
    busy = world.put([2] * 5)
    _, demotes = world.room(20 * NBYTES - 11 * NBYTES)
    assert {d.part for d in demotes} == {item.part for item in wanted}
    world.demote((), demotes)
    assert world.tiers_of(busy) == [(0,)] * 5


def test_the_size_rule_is_exhausted_before_a_session_is_swapped() -> None:
    world = World(Rule(Largest), SWAP)
    clean = world.put([1] * 2, clean=True)
    large = world.put([2], clean=True, nbytes=3 * NBYTES)
    dirty = world.put([3] * 5)
    drops, demotes = world.room(3 * NBYTES)  # there are two
    assert [d.part for d in drops] == [chains.part(large[0])]
    assert not demotes
    drops, demotes = world.room(7 * NBYTES)
    assert [d.part for d in drops] == [chains.part(key) for key in reversed(clean)]
    assert not demotes
    drops, demotes = world.room(8 * NBYTES)
    assert not drops
    assert [d.part for d in demotes] == [chains.part(key) for key in reversed(dirty)]
    world.demote(drops, demotes)
    assert world.tiers_of(large + clean + dirty) == [(1,)] * 8


def test_stores_drop_what_is_clean_and_ask_for_the_rest() -> None:
    world = World(Rule(Largest), SWAP)
    world.put([1] * 4, clean=True)
    world.put([2] * 8)
    wanted = chains.items(chains.keys([3] * 5))
    taken = world.core.reserve(0, wanted, tenant="t", now=0.0)
    assert len(taken.drops) == 4
    assert taken.short == NBYTES
    world.core.rollback(taken.id, chains.reserved(taken), 0.0)
    world.core.check()


def test_to_names_the_tier_past_the_next_one() -> None:
    world = World(Rule(Lru, target=2))
    chain = world.put([1] * 4)
    world.demote(*world.room(9 * NBYTES))
    assert world.tiers_of(chain) == [(0,)] * 3 + [(2,)]


def test_what_the_named_tier_has_is_let_go() -> None:
    world = World(SWAP)
    chain = world.put([1] * 4, clean=True)
    drops, demotes = world.room(9 * NBYTES)
    assert [d.part for d in drops] == [chains.part(key) for key in reversed(chain)]
    assert not demotes


def test_where_the_named_tier_takes_nothing_room_is_made_nevertheless() -> None:
    world = World(SWAP)
    world.put([1] * 4)
    world.put([2] * 8)
    for _ in range(5):
        world.core.failed(1, "write", 0.0)  # its breaker opens
    drops, demotes = world.room(6 * NBYTES)
    assert len(drops) == 6  # no more than needed: they are lost
    assert not demotes
    world.core.check()


def test_sessions_can_be_evicted_whole() -> None:
    tiers = [TierLimits("host", 12 * NBYTES)]
    core = Decisions(tiers, policy=partial(Ruled, [Rule(Lru, sessions=True)]))
    chains.store(core, 0, chains.items(chains.keys([1] * 6)))
    chains.store(core, 0, chains.items(chains.keys([2] * 6)))
    stored = chains.store(core, 0, chains.items(chains.keys([3])))
    assert len(stored.drops) == 6
    assert core.entries(0) == 7
    core.check()


def test_a_prefetch_swaps_nobody_out_that_is_warmer() -> None:
    world = World(Rule(Largest), SWAP, fast=5)
    cold = world.put([1] * 3)
    world.demote(*world.room(5 * NBYTES))
    world.put([2] * 5)
    taken = world.core.reserve(
        0, chains.items(cold), tenant="t", now=0.0, demand=False, source=1, ahead=True
    )
    assert not chains.reserved(taken)
    assert not taken.drops


def test_tenants_with_limits_have_rules_of_their_own() -> None:
    limits = {"t": TenantLimits(quota={"device": 8 * NBYTES}, reserved={"device": 4 * NBYTES})}
    world = World(Rule(Largest), SWAP, tenants=limits)
    idle = world.put([1] * 4)
    world.put([2] * 4)
    assert world.tiers_of(idle) == [(0,)] * 4
    world.put([3] * 2)
    assert world.tiers_of(idle) == [(1,)] * 4


def test_rules_replay_byte_for_byte_and_stand_in_the_header() -> None:
    log = LineLog()
    world = World(Rule(Largest), SWAP, log=log)
    for path in ([1] * 5, [2] * 5, [3] * 5, [1] * 7, [2, 2, 5]):
        world.put(path)
    assert b"hybrid(lru, lru/session->1)" in log.lines[0]
    again = World(Rule(Largest), SWAP).core
    assert list(replay(log.lines, again)) == log.lines


@pytest.mark.parametrize("call", ["touch", "shift", "score", "expedite", "resize", "resized"])
def test_every_rule_hears_everything(call: str) -> None:
    heard: list[str] = []

    class Ear(Lru):
        def __getattribute__(self, name: str) -> object:
            if name == call:
                heard.append(name)
            return super().__getattribute__(name)

    policy = Ruled([Rule(Ear), Rule(Ear)])
    policy.insert(0, 10, 1, 5)
    arguments = {"expedite": (0,), "resize": (4.0,), "score": (0, 0.5)}.get(call, (0, 7))
    getattr(policy, call)(*arguments)
    assert heard == [call, call]
