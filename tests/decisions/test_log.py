"""The decision log: complete, closed to secrets, replayed byte for byte."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv.decisions.core import Decisions
from tierkv.decisions.cost import Run
from tierkv.decisions.log import LineLog, replay, runs
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import EvictReason, GroupRule, TenantLimits, TierLimits
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from tierkv.decisions.types import Demote

TIERS = [TierLimits("host", 400, high=0.9, low=0.6), TierLimits("disk", 900, durable=True)]
TENANTS = {"a": TenantLimits(quota={"host": 300}, reserved={"host": 100}, session_quota=500)}
GROUPS = (GroupRule(GroupKind.FULL), GroupRule(GroupKind.SLIDING, 9))


def fresh(log: LineLog | None = None) -> Decisions:
    return Decisions(TIERS, policy=[Lrfu, Lru], tenants=TENANTS, log=log)


def costs(d: Decisions, rng: random.Random, now: float) -> None:
    """One call that has to do with costs."""
    tier, direction = rng.randrange(2), rng.choice(["read", "write"])
    action = rng.randrange(10)
    if action < 3 and d.admit(tier, direction, now):
        d.sample(tier, direction, rng.randrange(1, 1 << 20), rng.random(), now)
    elif action == 3:
        d.failed(tier, direction, now, hung=rng.random() < 0.1)
    elif action == 4:
        held = d.hold_part(chains.part(chains.keys([rng.randrange(6)], "a")[0]), now)
        if held is not None:
            d.release(held[0], now)
        d.alive(tier, now)
        d.untried(tier, direction, now)
    elif action == 5:
        d.computed(b"\x01space", rng.randrange(1, 5000), rng.random(), now)
    elif action == 6:
        d.coded("planes", rng.randrange(1, 5000), rng.randrange(1, 5000), rng.random() ** 20, now)
        d.choose_chain(tier, "planes", 1, now)
    elif action == 7:
        runs = [Run(3, 48, ((0, rng.randrange(1 << 30)), (1, 7))), Run(1, 5, ())]
        d.plan_load(b"\x01space", runs, rng.choice([None, rng.random()]), now)


def rare(d: Decisions, now: float) -> None:
    """What chance hardly brings about."""
    for _ in range(30):
        d.sample(0, "read", 1 << 20, 1.0, now)
        d.coded("planes", 3 << 30, 1 << 30, 1e-9, now)
    d.choose_chain(0, "planes", 1, now)
    d.coded("planes", 3 << 30, 1 << 30, 1e30, now)
    d.choose_chain(0, "planes", 1, now)
    d.failed(1, "write", now, hung=True)
    d.untried(1, "write", now)


def live(seed: int, steps: int) -> LineLog:
    """A run with faults, cancelled lookups, failed writes, demotions, quotas and TTLs."""
    rng = random.Random(seed)
    log = LineLog()
    d = fresh(log)
    now = 0.1
    leases: list[int] = []
    demotes: list[Demote] = []
    for _ in range(steps):
        now += rng.random()
        tenant = rng.choice("ab")
        chain = chains.keys([rng.randrange(6), *[rng.randrange(2) for _ in range(4)]], tenant)
        wanted = chains.items(
            chain, rng.randrange(5, 30), groups=GROUPS, tenant=tenant, ttl=rng.choice([None, 7.5])
        )
        costs(d, rng, now)
        action = rng.randrange(10)
        if action < 3:
            tier = rng.randrange(2)
            got = d.reserve(tier, wanted, tenant=tenant, now=now, session=rng.choice(["", "s"]))
            taken = chains.reserved(got)
            keep = rng.randrange(len(taken) + 1)
            if keep:
                charges = [wanted[i].nbytes - 1 for i in taken[:keep]]
                d.commit(got.id, taken[:keep], now, charges)
            if taken[keep:]:
                d.rollback(got.id, taken[keep:], now)
        elif action < 5:
            lossy, start = rng.random() < 0.3, rng.choice([0, 0, 2, 5])
            query = chains.query(chain, groups=GROUPS, lossy=lossy, ttl=60.0, start=start)
            look = d.begin_lookup(query, now)
            d.advance(look, now)
            if rng.random() < 0.4:
                d.abandon(look, now)
            else:
                leases.append(d.finish(look, now).lease)
        elif action == 5 and leases:
            d.release(leases.pop(rng.randrange(len(leases))), now)
        elif action == 6:
            demotes += d.make_room(0, rng.randrange(200), tenant=tenant, now=now)[1]
            if rng.random() < 0.5:
                d.cancel_demote(demotes[:2], now)
        elif action == 7:
            demotes += d.tick(now)[1]
            pairs = [(x.part, x.generation) for x in demotes]
            d.dropped(pairs, 0, EvictReason.DEMOTED, now)
            demotes.clear()
        elif action == 8:
            name = wanted[0].part
            generation = d.state(name, now).generation
            d.invalidate(name, 0, generation, EvictReason.DAMAGED, now)
        else:
            d.forget([wanted[-1].part], EvictReason.REMOVED, now)
            d.set_capacity(0, rng.choice([300, 400]), now)
    rare(d, now)
    d.check()
    return log


@pytest.mark.parametrize("seed", range(3))
def test_a_log_replays_byte_for_byte(seed: int) -> None:
    log = live(seed, 400)
    ops = {json.loads(line)["op"] for line in log.lines}
    assert ops >= {"header", "reserve", "commit", "rollback", "advance", "abandon", "invalidate"}
    assert ops >= {"sample", "failed", "admit", "computed", "coded", "choose_chain", "plan_load"}
    assert ops >= {"alive", "untried", "hold_part"}
    again = fresh()
    assert list(replay(log.lines, again)) == log.lines
    again.check()


def test_a_replay_decides_by_itself() -> None:
    """A log whose results were altered does not come out as it went in."""
    log = live(1, 100)
    numbers = [i for i, line in enumerate(log.lines) if b'"op":"reserve"' in line]
    altered = list(log.lines)
    number = numbers[0]
    call = json.loads(altered[number])
    call["result"] = None
    altered[number] = json.dumps(call, separators=(",", ":")).encode() + b"\n"
    assert list(replay(altered, fresh())) == log.lines


def test_another_configuration_is_refused() -> None:
    log = live(1, 5)
    other = Decisions(TIERS, policy=Lru, tenants=TENANTS)
    with pytest.raises(ConfigError, match="another configuration"):
        list(replay(log.lines, other))


@pytest.mark.parametrize("line", [b"not json\n", b"[]\n", b'{"op":"reserve"}\n'])
def test_a_broken_line_is_named(line: bytes) -> None:
    log = live(1, 5)
    with pytest.raises(ConfigError, match="line 2 "):
        list(replay([log.lines[0], line], fresh()))
    unknown = b'{"op":"explode","now":0,"args":[]}\n'
    with pytest.raises(ConfigError, match="unknown operation 'explode'"):
        list(replay([log.lines[0], unknown], fresh()))


def test_runs_that_share_a_file_are_told_apart() -> None:
    first, second = live(1, 40).lines, live(2, 40).lines
    assert list(runs([*first, *second])) == [first, second]
    assert list(runs([])) == []
    with pytest.raises(ConfigError, match=r"line \d+ begins another run"):
        list(replay([*first, *second], fresh()))


def test_the_half_life_is_logged() -> None:
    log = LineLog()
    d = Decisions([TierLimits("host", 1000)], policy=Lrfu, log=log)
    chains.store(d, 0, chains.items(chains.keys([1, 2]), 20))
    resized = [json.loads(x) for x in log.lines if b'"op":"resize"' in x]
    assert [x["args"] for x in resized] == [[0, 50.0]]
    policy = d._at.partitions[0][0][1]
    assert isinstance(policy, Lrfu)
    assert policy.half_life == pytest.approx(1.1 * 50.0), "a tenth more than parts fit"


def test_no_log_costs_nothing_and_can_start_later() -> None:
    d = chains.decisions(100)
    chains.store(d, 0, chains.items(chains.keys([1])))
    log = LineLog()
    d.attach(log)
    assert json.loads(log.lines[0])["op"] == "header"
    chains.look(d, chains.keys([1]))
    d.attach(None)
    chains.look(d, chains.keys([1]))
    assert [json.loads(x)["op"] for x in log.lines] == ["header", "lookup", "release"]


def test_debug_mode_checks_after_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    d = chains.decisions(100)
    chains.store(d, 0, chains.items(chains.keys([1])))
    d._at.ledger.used[0] += 1
    with pytest.raises(AssertionError, match="used bytes"):
        d.tick(1.0)
