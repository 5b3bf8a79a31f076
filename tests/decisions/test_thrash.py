"""A working set a little larger than the fast tier: promotions cost no more than they save."""

from __future__ import annotations

import random
from itertools import cycle
from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv.decisions.core import Decisions
from tierkv.decisions.guarding import Guard
from tierkv.decisions.log import LineLog, replay
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import TierLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BLOCKS = 4  # of one session
NBYTES = 10


class World:
    """A fast tier, a slow one that holds all sessions, and an engine that promotes on a hit."""

    def __init__(self, fast: int, sessions: int, *, log: LineLog | None = None) -> None:
        self.tiers = [
            TierLimits("fast", fast * BLOCKS * NBYTES),
            TierLimits("slow", 10 * sessions * BLOCKS * NBYTES),
        ]
        self.core = Decisions(self.tiers, policy=Lru, log=log)
        self.chains = [chains.keys([session] * BLOCKS) for session in range(sessions)]
        self.moved = self.useful = self.hits = 0
        self.now = 0.0
        for chain in self.chains:
            wanted = chains.items(chain, nbytes=NBYTES)
            chains.store(self.core, 0, wanted, self.now)
            chains.copy(self.core, 0, 1, wanted, self.now)  # write-through: everything is clean

    def use(self, session: int) -> None:
        """Load a session: read it where it is, and promote what was slow."""
        core, chain = self.core, self.chains[session]
        self.now += 1.0
        found = core.lookup(chains.query(chain), self.now)
        assert found.blocks == BLOCKS
        cold = [part for part in found.parts if part.tier == 1]
        self.useful += sum(part.nbytes for part in found.parts)
        self.moved += sum(part.nbytes for part in cold)
        self.hits += len(found.parts) - len(cold)
        if cold:
            wanted = [
                i for i in chains.items(chain, nbytes=NBYTES) if i.part in {p.part for p in cold}
            ]
            taken = core.reserve(0, wanted, tenant="t", now=self.now, demand=False, source=1)
            done = chains.reserved(taken)
            if done:
                core.commit(taken.id, done, self.now)
            self.moved += sum(wanted[n].nbytes for n in done)
        core.release(found.lease, self.now)

    def run(self, uses: Iterable[int], count: int) -> World:
        order: Iterator[int] = iter(uses)
        for _ in range(count // 4):
            self.use(next(order))  # until it has settled
        self.moved = self.useful = self.hits = 0
        for _ in range(count):
            self.use(next(order))
        self.core.check()
        return self

    @property
    def cost(self) -> float:
        """Bytes moved for each byte that somebody wanted."""
        return self.moved / self.useful


def skewed(sessions: int, seed: int) -> Iterator[int]:
    order = random.Random(seed)
    while True:
        yield min(sessions - 1, int(order.paretovariate(0.7)) - 1)


def uniform(sessions: int, seed: int) -> Iterator[int]:
    order = random.Random(seed)
    while True:
        yield order.randrange(sessions)


PATTERNS: dict[str, Callable[[int], Iterator[int]]] = {
    "cycle": lambda n: cycle(range(n)),
    "uniform": lambda n: uniform(n, 1),
    "skewed": lambda n: skewed(n, 2),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_working_set_of_120_percent_moves_no_more_than_lru(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = World(50, 60).run(PATTERNS[pattern](60), 2000)
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "refuses", lambda self: False)
        plain = World(50, 60).run(PATTERNS[pattern](60), 2000)
    assert guarded.cost <= min(2.0, 1.1 * plain.cost)
    assert guarded.hits >= 0.99 * plain.hits


def test_what_goes_round_in_circles_stays_where_it_is() -> None:
    world = World(50, 60).run(cycle(range(60)), 2000)
    assert world.hits > 0.75 * 2000 * BLOCKS  # recency alone has none at all
    figures = world.core.promotions(0)
    assert figures.refused > 100
    assert figures.used + figures.wasted <= figures.made


def test_blocks_demoted_again_before_use_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "refuses", lambda self: False)
    world = World(50, 60).run(cycle(range(60)), 600)
    figures = world.core.promotions(0)
    assert figures.made == 750 * BLOCKS
    assert figures.used == 0
    assert figures.wasted == figures.made - world.core.entries(0)


def test_a_new_working_set_gets_in_after_thrashing() -> None:
    world = World(50, 200)
    world.run(cycle(range(60)), 1000)
    world.run(cycle(range(100, 130)), 400)
    world.run(cycle(range(100, 130)), 100)
    assert world.hits >= 0.95 * 100 * BLOCKS


def test_a_prefetch_is_not_refused() -> None:
    world = World(50, 60).run(cycle(range(60)), 1000)
    core = world.core
    cold = next(c for c in world.chains if core.state(chains.part(c[0]), 0.0).tiers == (1,))
    wanted = chains.items(cold, nbytes=NBYTES)
    world.core.lookup(chains.query(cold, lease=False), world.now)
    for _ in range(3):
        taken = core.reserve(
            0, wanted, tenant="t", now=world.now, demand=False, source=1, ahead=True
        )
        assert len(chains.reserved(taken)) == BLOCKS
        core.rollback(taken.id, chains.reserved(taken), world.now)


def test_a_race_that_ends_leaves_the_other_tiers_races_alone() -> None:
    watching: dict[int, int] = {}
    first, second = Guard(watching), Guard(watching)
    for race in range(100):
        row = 10 * race
        first.begin([row], [row + 1])
        second.begin([row], [row + 2])
        second.begin([row + 3], [row + 1])
        first.left(row)  # that race is void; the other tier still wants to know
        assert watching == {row: 1, row + 1: 1, row + 2: 1, row + 3: 1}
        for asked in (row + 2, row + 1):
            for guard in (first, second):
                guard.asked(asked)
        assert watching == {}
    assert not first.closed
    assert second.closed


def test_the_guard_replays() -> None:
    log = LineLog()
    world = World(10, 12, log=log).run(cycle(range(12)), 400)
    assert world.core.promotions(0).refused
    again = Decisions(world.tiers, policy=Lru)
    assert list(replay(log.lines, again)) == log.lines
    assert again.promotions(0) == world.core.promotions(0)
