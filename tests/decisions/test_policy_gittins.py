"""The policy that learns what is worth its place, and what it learns from."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tierkv.decisions.policy.gittins import Gittins
from tierkv.decisions.policy.hazards import BUCKETS, STARTS, Hazards, bucket
from tierkv.decisions.policy.lru import Lru
from tierkv.testing.policies import PolicyTests

if TYPE_CHECKING:
    from tierkv.abc import Policy

SCATTER = 0x9E3779B97F4A7C15
NONE = [[0] * BUCKETS] * 4


class TestGittins(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        return Gittins()


class TestGittinsOfKnownSize(PolicyTests):
    follows_shifts = True

    def make(self) -> Policy:
        policy = Gittins()
        policy.resize(10.0)
        return policy


class TestGittinsThatHasLearned(PolicyTests):
    """What it has seen before does not change what it owes."""

    def make(self) -> Policy:
        policy = Gittins()
        cache = Cache(policy, 64)
        for request in chat(random.Random(3), 400):
            cache.ask(request)
        for row in sorted(cache.rows.values()):
            policy.remove(row)
        assert policy._hazards.worth
        assert policy.victim() is None
        policy._now = 0  # the suite's clocks begin at 0
        return policy

    def test_shifts_move_the_order(self) -> None:
        """A hint's worth is learned like any other class's; the next use takes it back."""
        policy = self._filled(10, 10_000)
        policy.shift(9, -1000.0)
        assert policy.victim() == 9
        policy.touch(9, 10_020)
        assert policy.victim() != 9


class Cache:
    """Chains of names in so many rows; leaves go first, as in the decision object."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.policy = policy
        self.rows: dict[int, int] = {}
        self.names = [0] * capacity
        self.parents = [-1] * capacity
        self.children = [0] * capacity
        self.spare = list(range(capacity))
        self.clock = 0
        policy.resize(float(capacity))

    def ask(self, chain: list[int]) -> int:
        """Serve a request: how many blocks were there."""
        policy, clock = self.policy, self.clock
        self.clock += len(chain)
        hits: list[int] = []
        for name in chain:
            if name not in self.rows:
                break
            row = self.rows[name]
            policy.hold(row)
            policy.touch(row, clock + len(chain) - len(hits))
            hits.append(row)
        last, added = hits[-1] if hits else -1, []
        for number in range(len(hits), len(chain)):
            if not self.spare and not self.evict(hits):
                break
            row = self.spare.pop()
            name = chain[number]
            self.rows[name], self.names[row] = row, name
            self.parents[row], self.children[row] = last, 0
            if last >= 0:
                self.children[last] += 1
            policy.insert(row, 4096, clock + len(chain) - number, name * SCATTER % 2**64)
            added.append(row)
            last = row
        for row in added:
            policy.release(row)
            if self.children[row]:
                policy.hold(row)
        for row in hits:
            if not self.children[row]:
                policy.release(row)
        return len(hits)

    def evict(self, leased: list[int]) -> bool:
        row = self.policy.victim()
        if row is None:
            return False
        name = self.names[row]
        self.policy.remove(row, evicted=True, ident=name * SCATTER % 2**64)
        del self.rows[name]
        self.spare.append(row)
        parent = self.parents[row]
        if parent >= 0:
            self.children[parent] -= 1
            if not self.children[parent] and parent not in leased:
                self.policy.release(parent)
        return True


def chat(rng: random.Random, requests: int) -> list[list[int]]:
    """Long prompts that nobody asks for again, among conversations that go on for ten turns."""
    open_chats: list[list[int]] = []
    asked: list[list[int]] = []
    name = 1
    for _ in range(requests):
        if rng.random() < 0.5:
            chain = list(range(name, name + 12))
            name += 12
        else:
            if len(open_chats) < 12:
                open_chats.append([])
            place = rng.randrange(len(open_chats))
            chain = open_chats[place] = [*open_chats[place], name, name + 1]
            name += 2
            if len(chain) >= 20:
                del open_chats[place]
        asked.append(chain)
    return asked


def hits(policy: Policy, capacity: int, requests: list[list[int]]) -> int:
    cache = Cache(policy, capacity)
    return sum(cache.ask(chain) for chain in requests)


def test_gittins_learns_whom_nobody_asks_for_again() -> None:
    requests = chat(random.Random(1), 2500)
    assert hits(Gittins(), 150, requests) > 1.3 * hits(Lru(), 150, requests)


def test_gittins_is_lru_where_classes_do_not_differ() -> None:
    """Single blocks, asked for at random: no use tells anything of the next one."""
    rng = random.Random(2)
    requests = [[rng.randrange(1, 400)] for _ in range(10_000)]
    ours, theirs = hits(Gittins(), 200, requests), hits(Lru(), 200, requests)
    assert ours == pytest.approx(theirs, rel=0.03)


def test_gittins_is_lru_until_it_has_learned() -> None:
    policy = Gittins()
    ours, theirs = Cache(policy, 150), Cache(Lru(), 150)
    for chain in chat(random.Random(4), 1000):
        found = ours.ask(chain), theirs.ask(chain)
        if policy._hazards.worth:
            break
        assert found[0] == found[1]
        assert ours.rows.keys() == theirs.rows.keys()
    assert policy._hazards.worth, "it never learned"
    assert len(theirs.rows) == 150


def test_gittins_tells_long_requests_from_short_ones() -> None:
    """A request's rows learn its length once it is known, when other accesses come."""
    policy = Gittins()
    for number in range(12):
        policy.insert(number, 1, 100 - number, number + 1)
    early = policy._class[0]
    policy.insert(20, 1, 200, 50)
    assert policy._class[0] != early
    assert policy._class[0] == policy._class[11]
    assert policy._class[20] == early


def test_gittins_tells_tips_by_whether_anything_was_built_on_them() -> None:
    policy = Gittins()
    policy.insert(0, 1, 10, 1)
    policy.insert(1, 1, 9, 2)
    for row in (0, 1):
        policy.release(row)
    policy.hold(0)
    policy.release(0)
    assert policy._class[0] != policy._class[1]


def test_gittins_learns_what_a_hint_is_worth() -> None:
    """Whoever said that he comes late never comes; whoever said soon does, whatever was meant."""
    policy, rng = Gittins(), random.Random(5)
    policy.resize(200.0)
    clock = 0
    rows: dict[int, int] = {}
    for name in range(1, 6000):
        clock += 1
        if len(rows) == 200:
            victim = policy.victim()
            assert victim is not None
            ident = rows.pop(victim) * SCATTER % 2**64
            policy.remove(victim, evicted=True, ident=ident)
        row = next(iter(set(range(200)) - rows.keys())) if rows else 0
        rows[row] = name
        policy.insert(row, 1, clock, name * SCATTER % 2**64)
        policy.release(row)
        policy.shift(row, -2000.0 if name % 2 else -100.0)
        late = [row for row, other in rows.items() if other % 2 == 0]
        if late and rng.random() < 0.5:
            clock += 1
            row = rng.choice(late)
            policy.touch(row, clock)
            policy.shift(row, -100.0)
    kept = [name % 2 for name in rows.values()]
    assert kept.count(0) > 2 * kept.count(1)


def test_gittins_remembers_how_often_an_evicted_part_was_used() -> None:
    policy = Gittins()
    policy.insert(0, 1, 1, 77)
    policy.touch(0, 5)
    policy.remove(0, evicted=True, ident=77)
    policy.insert(1, 1, 9, 77)
    policy.insert(2, 1, 20, 78)
    assert policy._class[1] > policy._class[2]


def test_spans_of_age_cover_all_ages_in_order() -> None:
    assert list(STARTS) == sorted(set(STARTS))
    assert [bucket(start) for start in STARTS] == list(range(BUCKETS))
    assert bucket(0) == bucket(-5) == 0
    assert bucket(1 << 40) == BUCKETS - 1


def learned(uses: dict[int, int], lost: dict[int, int], kind: int = 0) -> Hazards:
    hazards = Hazards(4, 2)
    for age, count in uses.items():
        for _ in range(count):
            hazards.used(kind, age)
    for age, count in lost.items():
        for _ in range(count):
            hazards.lost(kind, age)
    return hazards


def test_worth_looks_ahead_to_the_age_at_which_users_return() -> None:
    """Nobody returns before 64 accesses, everybody by 90: the young are worth waiting for."""
    hazards = learned({80: 4000}, {1000: 400})
    hazards.learn(NONE)
    worth = hazards.worth[0]
    assert worth[0] < worth[bucket(32)] < worth[bucket(64)]
    assert worth[bucket(200)] < 0.1 * worth[0]
    # about ten of eleven return, 64 to 91 accesses from the start
    assert 10 / 11 / 91 < worth[0] < 10 / 11 / 64


def test_lives_that_were_not_watched_to_their_end_count_as_long_as_they_were() -> None:
    """Parts forgotten early say nothing of later ages; parts forgotten late do."""
    early = learned({500: 3000}, {8: 3000})
    late = learned({500: 3000}, {5000: 3000})
    early.learn(NONE)
    late.learn(NONE)
    span = bucket(200)
    assert early.worth[0][span] > 1.5 * late.worth[0][span]
    waiting = [[0] * BUCKETS for _ in range(4)]
    waiting[0][bucket(5000)] = 3000
    still = learned({500: 3000}, {})
    still.learn(waiting)
    assert still.worth[0][span] == pytest.approx(late.worth[0][span], rel=0.1)


def test_classes_of_few_lives_lean_on_their_group() -> None:
    hazards = learned({50: 5000}, {5000: 1000})
    hazards.used(2, 3000)
    for _ in range(5000):
        hazards.lost(3, 5000)
    hazards.learn(NONE)
    unseen, group = hazards.worth[1], hazards.worth[0]
    assert unseen[0] == pytest.approx(group[0], rel=0.1)
    assert hazards.worth[2][0] < 0.5 * group[0], "its own group is another"


def test_what_was_learned_fades() -> None:
    hazards = learned({50: 5000}, {5000: 500})
    hazards.learn(NONE)
    before = hazards.worth[0][0]
    for _ in range(200):
        for _ in range(50):
            hazards.lost(0, 5000)
        hazards.learn(NONE)
    assert hazards.worth[0][0] < 0.3 * before
