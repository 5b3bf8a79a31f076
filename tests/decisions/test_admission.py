"""What may enter a tier: the rules by themselves, and at work in the decision object."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decisions import chains
from tierkv import registry
from tierkv.decisions.admission.everything import Everything
from tierkv.decisions.admission.second_use import SecondUse
from tierkv.decisions.admission.tinylfu import TinyLfu
from tierkv.decisions.admission.write_budget import WriteBudget
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import LineLog
from tierkv.decisions.log import replay as replay_log
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import EvictReason, MissReason, SkipReason, TierLimits
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Admission

DAY = 86400.0


def make(
    *capacities: int,
    admission: Sequence[Callable[[], Admission] | None],
    log: LineLog | None = None,
) -> Decisions:
    tiers = [TierLimits(f"t{i}", c) for i, c in enumerate(capacities)]
    return Decisions(tiers, policy=Lru, admission=admission, log=log)


# --------------------------------------------------------------------------- by themselves


def test_names_and_options() -> None:
    assert {"all", "second_use", "tinylfu", "write_budget"} <= set(registry.names("admissions"))
    assert isinstance(registry.factory("admissions", "all")(), Everything)
    assert isinstance(registry.factory("admissions", "second_use:when_full")(), SecondUse)
    assert isinstance(registry.factory("admissions", "write_budget:200GiB")(), WriteBudget)
    for wrong in ("all:x", "tinylfu:2", "second_use:maybe", "write_budget", "write_budget:0"):
        with pytest.raises(ConfigError, match="admission"):
            registry.factory("admissions", wrong)
    with pytest.raises(ConfigError, match="did you mean 'tinylfu'"):
        registry.factory("admissions", "tinylfo")


def test_second_use_remembers_for_long_enough_and_forgets() -> None:
    gate = SecondUse()
    gate.resize(1000)
    order = random.Random(1)
    idents = [order.getrandbits(64) for _ in range(20000)]
    for ident in idents:
        gate.seen(ident, 0.0)
    for ident in idents[-3000:]:
        gate.seen(ident, 0.0)
    assert all(gate.admit(i, 1, 0.0, demand=True) for i in idents[-3000:])
    for ident in idents[:1000]:  # forgotten meanwhile: these are first uses again
        gate.seen(ident, 0.0)
    assert sum(gate.admit(i, 1, 0.0, demand=True) for i in idents[:1000]) < 30
    assert sum(gate.admit(i, 1, 0.0, demand=True) for i in idents[10000:16000]) < 120


def test_second_use_when_full_admits_while_there_is_room() -> None:
    gate = SecondUse("when_full")
    assert gate.admit(1, 1, 0.0, demand=True)
    assert not gate.admit(1, 1, 0.0, demand=True, victim=2)


def test_tinylfu_prefers_the_frequent_and_forgets() -> None:
    gate = TinyLfu()
    gate.resize(1000)
    for _ in range(5):
        gate.seen(1, 0.0)
    gate.seen(2, 0.0)
    assert gate.frequency(1) == 5
    assert gate.frequency(2) == 1
    assert gate.admit(1, 1, 0.0, demand=True, victim=2)
    assert not gate.admit(2, 1, 0.0, demand=True, victim=1)
    assert not gate.admit(3, 1, 0.0, demand=True, victim=2)
    assert gate.admit(3, 1, 0.0, demand=True)
    for ident in range(100, 100 + 21 * 1024):
        gate.seen(ident, 0.0)
    assert gate.frequency(1) < 5  # aged


def test_tinylfu_counts_are_rarely_too_high() -> None:
    gate = TinyLfu()
    gate.resize(4096)
    order = random.Random(7)
    truth: dict[int, int] = {}
    for _ in range(8000):
        ident = order.getrandbits(64) if order.random() < 0.5 else order.randrange(500)
        truth[ident] = truth.get(ident, 0) + 1
        gate.seen(ident, 0.0)
    for ident, count in truth.items():
        assert gate.frequency(ident) >= min(count, 15)
    wrong = sum(gate.frequency(i) > c for i, c in truth.items() if c < 15)
    assert wrong < 0.1 * len(truth)


@given(st.lists(st.tuples(st.floats(0, DAY / 2), st.integers(1, 500)), min_size=1, max_size=60))
def test_a_write_budget_bounds_every_window(steps: list[tuple[float, int]]) -> None:
    gate, now = WriteBudget("1000B"), 5.0
    written: list[tuple[float, int]] = []
    for pause, nbytes in steps:
        now += pause
        if gate.admit(1, nbytes, now, demand=False):
            gate.wrote(nbytes, now)
            written.append((now, nbytes))
    for start, _ in written:
        total = sum(n for t, n in written if t >= start)
        assert total <= 1000 * (1 + (now - start) / DAY) + 1e-6


def test_what_is_given_back_may_be_written_again() -> None:
    gate = WriteBudget("100B")
    gate.wrote(100, 0.0)
    assert not gate.admit(1, 1, 0.0, demand=True)
    gate.wrote(-60, 0.0)
    assert gate.left(0.0) == 60
    gate.wrote(-60, 0.0)
    assert gate.left(0.0) == 100  # never more than a day's worth


# --------------------------------------------------------------------------- at work


def test_what_is_used_once_is_refused_and_told() -> None:
    core = make(1000, admission=[SecondUse])
    chain = chains.keys([1, 2])
    assert chains.look(core, chain).reason is MissReason.NEVER_STORED
    assert chains.skips(chains.store(core, 0, chains.items(chain), 1.0)) == [
        SkipReason.REFUSED,
        SkipReason.NO_PARENT,
    ]
    state = core.state(chains.part(chain[0]), 3.0)
    assert (state.reason, state.tier, state.ago) == (MissReason.REFUSED, 0, 2.0)
    assert chains.look(core, chain, 3.0).reason is MissReason.REFUSED  # the second use
    longer = chains.keys([1, 2, 3])
    assert chains.skips(chains.store(core, 0, chains.items(longer), 4.0)) == [
        None,
        None,
        SkipReason.REFUSED,
    ]
    assert chains.look(core, longer, 5.0).blocks == 2
    core.check()


def test_a_probe_is_no_use() -> None:
    core = make(1000, admission=[SecondUse])
    chain = chains.keys([1])
    for _ in range(5):
        chains.look(core, chain, touch=False)
    assert chains.skips(chains.store(core, 0, chains.items(chain))) == [SkipReason.REFUSED]


def test_a_prefetch_and_its_request_are_one_use() -> None:
    core = make(1000, admission=[SecondUse])
    chain = chains.keys([1])
    ahead = replace(chains.query(chain, lease=False), ahead=True)
    core.lookup(ahead, 0.0)
    chains.look(core, chain)
    assert chains.skips(chains.store(core, 0, chains.items(chain))) == [SkipReason.REFUSED]


def test_a_long_prompt_is_heard_of_in_slices() -> None:
    core = make(10**6, admission=[SecondUse])
    chain = chains.keys(range(700))
    for _ in range(2):
        look, calls = core.begin_lookup(chains.query(chain), 0.0), 1
        while not core.advance(look, 0.0):
            calls += 1
        core.finish(look, 0.0)
        assert calls == 3
    stored = chains.store(core, 0, chains.items(chain, nbytes=1))
    assert chains.skips(stored) == [None] * 700


def test_a_better_copy_needs_no_admission() -> None:
    core = make(1000, admission=[SecondUse])
    chain = chains.keys([1])
    chains.look(core, chain)
    chains.look(core, chain)
    chains.store(core, 0, chains.items(chain, exact=False))
    for number in range(9000):  # until it has forgotten the uses
        for _ in range(2):
            core._at.gates[0].seen(number, 0.0)  # type: ignore[union-attr]
    assert chains.skips(chains.store(core, 0, chains.items(chains.keys([2])))) != [None]
    stored = chains.store(core, 0, chains.items(chain))
    assert chains.skips(stored) == [None]
    assert core.state(chains.part(chain[0]), 0.0).exact


def test_f065_what_cannot_fit_evicts_nothing_and_is_too_large() -> None:
    for gate in (Everything, SecondUse, TinyLfu, partial(WriteBudget, "1GiB")):
        core = make(100, admission=[gate])
        small = chains.keys([1, 2])
        for _ in range(3):
            chains.look(core, small)
        chains.store(core, 0, chains.items(small))
        big = chains.store(core, 0, chains.items(chains.keys([7]), nbytes=101))
        assert chains.skips(big) == [SkipReason.TOO_LARGE]
        assert not big.drops
        assert core.entries(0) == 2


def test_tinylfu_keeps_the_frequent_in_a_full_tier() -> None:
    core = make(30, admission=[TinyLfu])
    hot = chains.keys([1, 2, 3])
    for now in range(4):
        chains.look(core, hot, float(now))
    chains.store(core, 0, chains.items(hot))
    for number in range(20):
        cold = chains.keys([100 + number])
        chains.look(core, cold, 10.0)
        stored = chains.store(core, 0, chains.items(cold), 10.0)
        assert chains.skips(stored) == [SkipReason.REFUSED]
        assert not stored.drops
    for _ in range(6):
        chains.look(core, cold, 11.0)
    assert chains.skips(chains.store(core, 0, chains.items(cold), 12.0)) == [None]
    core.check()


def test_a_spent_budget_stops_copies_and_demotions_alike() -> None:
    core = make(40, 1000, admission=[None, partial(WriteBudget, "25B")])
    first, rest = chains.keys([1, 2]), chains.keys([5, 6, 7, 8])
    chains.store(core, 0, chains.items(first))
    assert chains.skips(chains.copy(core, 0, 1, chains.items(first))) == [None, None]
    chains.store(core, 0, chains.items(rest)[:2])
    assert chains.skips(chains.copy(core, 0, 1, chains.items(rest)[:1])) == [SkipReason.REFUSED]
    # dirty parts are not sent where nothing is taken: they go when their place is needed
    chains.store(core, 0, chains.items(rest)[2:])
    drops, demotes = core.make_room(0, 40, tenant="t", now=0.0)
    assert not demotes
    assert {d.reason for d in drops} == {EvictReason.CAPACITY}
    assert core.used(1) == 20
    later = core.reserve(1, chains.items(chains.keys([9])), tenant="t", now=DAY)
    assert chains.skips(later) == [None]
    core.check()


def test_a_budget_is_charged_what_is_really_written() -> None:
    core = make(1000, admission=[partial(WriteBudget, "100B")])
    wanted = chains.items(chains.keys([1, 2, 3]), nbytes=30)
    taken = core.reserve(0, wanted, tenant="t", now=0.0)
    gate = core._at.gates[0]
    assert isinstance(gate, WriteBudget)
    assert gate.left(0.0) == 10
    core.commit(taken.id, [0], 0.0, charges=[10])
    assert gate.left(0.0) == 30
    core.rollback(taken.id, [1, 2], 0.0)
    assert gate.left(0.0) == 90


@pytest.mark.parametrize("name", ["second_use", "tinylfu", "write_budget:150B"])
def test_admission_replays_byte_for_byte(name: str) -> None:
    gate, log, order = registry.factory("admissions", name), LineLog(), random.Random(3)
    core = make(100, 200, admission=[gate, gate], log=log)
    refused = 0
    for step in range(300):
        chain = chains.keys([order.randrange(6), order.randrange(3)])
        now = float(step * 100)
        chains.look(core, chain, now)
        wanted = chains.items(chain)
        stored = chains.store(core, 0, wanted, now)
        copied = chains.copy(core, 0, 1, wanted, now)
        refused += SkipReason.REFUSED in chains.skips(stored) + chains.skips(copied)
        core.tick(now)
    assert refused
    assert list(replay_log(log.lines, make(100, 200, admission=[gate, gate]))) == log.lines
    with pytest.raises(ConfigError, match="another configuration"):
        list(replay_log(log.lines, make(100, 200, admission=[None, gate])))


def test_as_many_admissions_as_tiers() -> None:
    with pytest.raises(ConfigError, match="2 tiers need as many admissions, not 1"):
        make(10, 10, admission=[None])
