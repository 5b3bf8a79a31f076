"""Decision logs come out byte for byte, from their own header; what differs is found."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.decisions import chains
from tierkv.decisions.coding_rules import Rule
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import LineLog
from tierkv.decisions.types import TenantLimits, TierLimits
from tierkv.errors import ConfigError
from tierkv.registry import factory
from tierkv.replay import replay_log

TIERS = [TierLimits("host", 60, high=0.9, low=0.6), TierLimits("disk", 900, durable=True)]


def live(seed: int = 0, policies: tuple[str, str] = ("lru", "lrfu")) -> list[bytes]:
    """The log of an object that uses everything that a header tells of."""
    log = LineLog()
    d = Decisions(
        TIERS,
        policy=[factory("policies", name) for name in policies],
        tenants={"a": TenantLimits(quota={"host": 30}, reserved={"host": 10}, session_quota=500)},
        default_limits=TenantLimits(quota={"disk": 800}),
        admission=[None, factory("admissions", "write_budget:1GiB")],
        touch_order="root_first",
        history=100,
    )
    d.compress([[], [Rule("int8", steps=10)]], [True, False])
    d.attach(log)
    for number in range(30):
        tenant = "ab"[number % 2]
        chain = chains.keys([seed, number % 7, number % 3], tenant)
        chains.store(d, number % 2, chains.items(chain, tenant=tenant), float(number), tenant)
        d.release(d.lookup(chains.query(chain), float(number)).lease, float(number))
        d.tick(number + 0.5)
    return log.lines


def test_a_log_tells_its_own_configuration() -> None:
    lines = live()
    report = replay_log(lines)
    assert (report.same, report.runs, report.lines, report.line) == (True, 1, len(lines), 0)
    report = replay_log([*lines, *live(1)])
    assert (report.same, report.runs) == (True, 2)


@pytest.mark.parametrize("where", [3, 20, -1])
def test_the_first_line_that_differs_is_told(where: int) -> None:
    lines = [*live(), *live(1)]
    call = json.loads(lines[where])
    call["result"] = "another"
    number = where % len(lines)
    altered = [*lines[:number], json.dumps(call).encode() + b"\n", *lines[number + 1 :]]
    report = replay_log(altered)
    assert (report.same, report.line, report.lines) == (False, number + 1, number)
    assert report.got == lines[number]
    assert report.expected == altered[number]


def test_lines_too_few_and_too_many_are_told() -> None:
    lines = live()
    derived = next(i for i, line in enumerate(lines) if b'"op":"resize"' in line)
    cut = lines[:derived]
    report = replay_log(cut)
    assert (report.same, report.line, report.got) == (False, derived + 1, lines[derived])
    assert report.expected == b""
    twice = [*lines[: derived + 1], *lines[derived:]]
    assert not replay_log(twice).same


def test_another_configuration_and_damage_are_refused() -> None:
    lines = live()
    with pytest.raises(ConfigError, match="another configuration"):
        replay_log(lines, lambda header: chains.decisions(100))
    with pytest.raises(ConfigError, match="the decision log is empty"):
        replay_log([])
    for bad in (b"{}\n", b"nonsense\n", b'{"args": [{"tiers": 3}]}\n', b"[]\n"):
        with pytest.raises(ConfigError, match="no header of this version"):
            replay_log([bad])
    with pytest.raises(ConfigError, match="unknown name 'secret'"):
        replay_log([lines[0].replace(b'"lru"', b'"secret"')])
    with pytest.raises(ConfigError, match="unknown operation"):
        replay_log([lines[0], b'{"op":null,"now":0,"args":[]}\n'])
    make = partial(replay_log, [*lines[:5], b"torn"])
    with pytest.raises(ConfigError, match="line 6 is not one of a decision log"):
        make()
