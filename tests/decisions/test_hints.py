"""Hints of a next turn, and importance: what callers tell, and what comes of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv import registry
from tierkv.decisions import hinting
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import LineLog, replay
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import EvictReason, TierLimits
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


BLOCKS = 4
NBYTES = 10


class Chats:
    """Sessions of four blocks, their turns in order of time; a turn finds its session or not."""

    def __init__(self, room: int, *, hints: bool, log: LineLog | None = None) -> None:
        self.tiers = [TierLimits("t0", room * BLOCKS * NBYTES)]
        self.core = Decisions(self.tiers, policy=Lru, log=log)
        self.hints = hints
        self.hits = self.turns = 0

    def turn(self, session: int, now: float, **hint: str | float) -> None:
        chain = chains.keys([session] * BLOCKS)
        self.turns += 1
        self.hits += chains.look(self.core, chain, now).blocks == BLOCKS
        chains.store(self.core, 0, chains.items(chain, nbytes=NBYTES), now)
        if self.hints:
            self.core.hint(chain, 1, now, **hint)  # type: ignore[arg-type]

    def run(self, gap: Callable[[str, random.Random], float], count: int = 3000) -> Chats:
        """Sessions come back after a gap that depends (or not) on how their last turn ended."""
        order = random.Random(5)
        due = [(float(n), n) for n in range(60)]
        for _ in range(count):
            due.sort()
            now, session = due.pop(0)
            reason = "tool_use" if order.random() < 0.7 else "end_turn"
            self.turn(session, now, stop_reason=reason)
            due.append((now + gap(reason, order), session))
        self.core.check()
        return self

    def heeded(self) -> dict[str, bool]:
        return {found.name: found.heeded for found in self.core.hint_classes()}


def telling(reason: str, order: random.Random) -> float:
    return order.expovariate(1 / 25 if reason == "tool_use" else 1 / 400)


def silent(reason: str, order: random.Random) -> float:
    del reason
    return order.expovariate(1 / 100)


def test_what_returns_soon_outlives_what_returns_late() -> None:
    plain = Chats(10, hints=False).run(telling)
    hinted = Chats(10, hints=True).run(telling)
    assert hinted.heeded()["stop:end_turn"]
    medians = {c.name: c.median for c in hinted.core.hint_classes()}
    assert medians["stop:end_turn"] > 5 * medians["stop:tool_use"]
    missed, before = hinted.turns - hinted.hits, plain.turns - plain.hits
    assert missed < 0.95 * before


def test_what_tells_nothing_is_not_heeded() -> None:
    chats = Chats(10, hints=True).run(silent)
    assert not any(chats.heeded().values())
    plain = Chats(10, hints=False).run(silent)
    assert chats.hits >= 0.97 * plain.hits


def learned(log: LineLog | None = None) -> Chats:
    """A tier for four sessions that knows of tool_use (at once) and end_turn (much later)."""
    chats = Chats(4, hints=True, log=log)
    now = 0.0
    for _ in range(40):
        chats.turn(1, now, stop_reason="end_turn")
        for _ in range(30):
            chats.turn(100, now, stop_reason="tool_use")
            now += 1.0
    return chats


def there(chats: Chats, session: int) -> bool:
    last = chains.part(chains.keys([session] * BLOCKS)[-1])
    return bool(chats.core.state(last, 0.0).tiers)


def test_a_hint_moves_a_session_in_the_order_of_eviction() -> None:
    chats = learned()
    now = chats.core._at.clock * 1.0
    chats.turn(7, now, stop_reason="tool_use")
    for session in (8, 9):
        chats.turn(session, now, stop_reason="end_turn")
    chats.turn(100, now, stop_reason="tool_use")
    assert there(chats, 7)
    chats.hints = False
    chats.turn(10, now)  # by recency alone it is 7 that would go
    assert there(chats, 7)
    assert not there(chats, 8)


def test_the_next_use_undoes_a_hint() -> None:
    chats = learned()
    chats.turn(8, 1e4, stop_reason="end_turn")
    chats.turn(9, 1e4, stop_reason="end_turn")
    rank = _rank(chats, 9)
    chains.look(chats.core, chains.keys([9] * BLOCKS), 1e4)
    assert _rank(chats, 9) > rank + 100  # the shift is gone


def _rank(chats: Chats, session: int) -> float:
    at = chats.core._at
    row = at.index.rows[chains.part(chains.keys([session] * BLOCKS)[-1])]
    return at.partitions[0][0][1].rank(row)


def test_a_second_hint_replaces_the_first() -> None:
    chats = learned()
    chats.turn(9, 1e4, stop_reason="end_turn")
    late = _rank(chats, 9)
    chain = chains.keys([9] * BLOCKS)
    chats.core.hint(chain, 1, 1e4, stop_reason="end_turn")
    assert abs(_rank(chats, 9) - late) < 5
    chats.core.hint(chain, 1, 1e4, stop_reason="unheard_of")
    assert _rank(chats, 9) > late + 100


def test_a_favour_ends_when_the_session_stays_away() -> None:
    chats = learned()
    chats.turn(7, 1e4, stop_reason="tool_use")
    favoured = _rank(chats, 7)
    plain = chats.core._at.index.touched[
        chats.core._at.index.rows[chains.part(chains.keys([7] * BLOCKS)[-1])]
    ]
    assert favoured >= plain
    for number in range(200):
        chats.core.lookup(chains.query(chains.keys([5000 + number] * 8)), 1e4)
        chats.core.tick(1e4)
    assert _rank(chats, 7) <= favoured
    chats.core.check()


def test_next_in_is_believed_until_more_is_known() -> None:
    chats = Chats(1000, hints=True)
    for number in range(400):
        session = 1 if number % 10 == 0 else 100
        chats.turn(session, float(number), next_in=10.0 if session == 1 else 1.0)
    names = {found.name for found in chats.core.hint_classes()}
    assert names == {"in:8", "in:1"}
    chats.turn(3, 400.0, stop_reason="unknown")
    neutral = _rank(chats, 3)
    chats.core.hint(chains.keys([3] * BLOCKS), 1, 400.0, next_in=3600.0)
    assert _rank(chats, 3) < neutral


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hinting, "_PENDING", 50)
    core = Decisions([TierLimits("t0", 10**6)], policy=Lru)
    for number in range(300):
        core.hint(chains.keys([number]), 1, float(number), stop_reason=f"reason {number}")
    assert len(core.hint_classes()) == 64
    assert len(core._hints._awaited) <= 50


def test_a_long_session_is_handled_in_slices() -> None:
    chats = learned()
    core = chats.core
    core.set_capacity(0, 10**6, 1e4)
    chain = chains.keys(range(1000))
    chains.store(core, 0, chains.items(chain), 1e4)
    before = core._hints.shifted
    core.hint(chain, 1, 1e4, stop_reason="end_turn")
    assert core._hints.shifted - before <= 512  # at once, and in the call's own settling
    for _ in range(4):
        core.tick(1e4)
    assert core._hints.shifted - before == 1000


def test_hints_and_scores_replay_byte_for_byte() -> None:
    log = LineLog()
    chats = learned(log)
    parts = [chains.part(key) for key in chains.keys([100] * BLOCKS)]
    chats.core.score(parts, 0.25, 2e4)
    chats.core.score(parts, [0.0, 0.5, 0.75, 1.0], 2e4)
    chats.core.hint(chains.keys([100] * BLOCKS), 1, 2e4, next_in=3.5)
    chats.core.tick(2e4)
    again = Decisions(chats.tiers, policy=Lru)
    assert list(replay(log.lines, again)) == log.lines
    assert again.hint_classes() == chats.core.hint_classes()
    assert again.importance(parts[2]) == 0.75


@pytest.mark.parametrize(
    "hint",
    [{}, {"stop_reason": ""}, {"stop_reason": "x" * 65}, {"next_in": -1.0}, {"next_in": 1e999}],
)
def test_a_hint_that_makes_no_sense_is_refused(hint: dict[str, str | float]) -> None:
    core = Decisions([TierLimits("t0", 100)], policy=Lru)
    with pytest.raises(ConfigError, match=r"hint|stop_reason|next_in"):
        core.hint(chains.keys([1]), 1, 0.0, **hint)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- importance


class Scored(Lru):
    """Remembers what it was told."""

    told: list[tuple[int, float]]

    def __init__(self) -> None:
        super().__init__()
        self.told = []

    def score(self, row: int, value: float) -> None:
        self.told.append((row, value))


def scoring(*capacities: int) -> tuple[Decisions, list[Scored]]:
    core = chains.decisions(*capacities, policy=Scored)
    policies = [partitions[0][1] for partitions in core._at.partitions]
    assert all(isinstance(policy, Scored) for policy in policies)
    return core, policies  # type: ignore[return-value]


def test_importance_follows_a_part_from_tier_to_tier() -> None:
    core, policies = scoring(100, 100)
    chain = chains.keys([1, 2])
    wanted, parts = chains.items(chain), [chains.part(key) for key in chain]
    chains.store(core, 0, wanted)
    core.score(parts, [0.2, 0.9], 0.0)
    assert [value for _, value in policies[0].told] == [0.2, 0.9]
    chains.copy(core, 0, 1, wanted)
    assert [value for _, value in policies[1].told] == [0.2, 0.9]
    assert core.importance(parts[1]) == 0.9


def test_importance_is_forgotten_with_the_part() -> None:
    core, policies = scoring(100)
    chain = chains.keys([1])
    name = chains.part(chain[0])
    core.score([name], 0.5, 0.0)  # unknown: passed over
    assert core.importance(name) is None
    chains.store(core, 0, chains.items(chain))
    core.score([name], 0.5, 0.0)
    assert core.importance(name) == 0.5
    core.forget([name], EvictReason.REMOVED, 0.0)
    assert core.importance(name) is None
    chains.store(core, 0, chains.items(chains.keys([2])))  # in the same row
    assert policies[0].told == [(0, 0.5)]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), [0.5], [0.5, 2.0], [0.1, 0.2, 0.3]])
def test_importance_out_of_range_changes_nothing(value: float | list[float]) -> None:
    core, policies = scoring(100)
    chain = chains.keys([1, 2])
    chains.store(core, 0, chains.items(chain))
    with pytest.raises(ConfigError, match=r"importance|scores"):
        core.score([chains.part(key) for key in chain], value, 0.0)
    assert not policies[0].told


@pytest.mark.parametrize("name", registry.names("policies"))
def test_hints_of_a_return_in_ages_do_no_harm(name: str) -> None:
    """What a caller expects may be beyond all measure: it then counts as very late."""
    log, make = LineLog(), registry.factory("policies", name)
    tiers = [TierLimits("t0", 40 * NBYTES), TierLimits("t1", 90 * NBYTES)]
    core, order = Decisions(tiers, policy=make, log=log), random.Random(3)
    for step in range(300):
        chain = chains.keys([order.randrange(12)] * BLOCKS)
        now = 0.7 * step
        chains.look(core, chain, now)
        chains.store(core, step % 2, chains.items(chain, nbytes=NBYTES), now)
        said = {"stop_reason": "a"} if step < 150 else {"next_in": order.choice((1e308, 1e30, 0.0))}
        core.hint(chain, 1, now, **said)
    core.check()
    assert any(found.name == f"in:{2**30}" for found in core.hint_classes())
    assert list(replay(log.lines, Decisions(tiers, policy=make))) == log.lines


def test_callers_who_never_say_the_same_twice_silence_nobody() -> None:
    core = Decisions([TierLimits("t0", 4000)], policy=Lru)
    for number in range(200):
        chain = chains.keys([number] * 2)
        core.hint(chain, 1, float(number), stop_reason=f"noise-{number}")
    for turn in range(20):
        now = 300.0 + turn
        chain = chains.keys([1000] * BLOCKS)
        chains.look(core, chain, now)
        core.hint(chain, 1, now, stop_reason="tool_use")
        core.hint(chains.keys([2000 + turn]), 1, now, stop_reason=f"more-{turn}")
    known = {found.name: found.returns for found in core.hint_classes()}
    assert len(known) <= 64
    assert known["stop:tool_use"] == 19
    for wrong in (b"tool_use", 5, ["a"]):
        with pytest.raises(ConfigError, match="stop_reason is a text"):
            core.hint(chain, 1, 400.0, stop_reason=wrong)  # type: ignore[arg-type]
