"""The decision log of runs with conversions: replayed byte for byte, every invariant kept."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv.decisions.coding_rules import Age, Rule
from tierkv.decisions.log import LineLog, replay
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.decisions.coding_rules import Recode
    from tierkv.decisions.core import Decisions

from tests.decisions.test_compressing import INT8, decisions

B = chains.BLOCK


def _live(seed: int, steps: int) -> tuple[LineLog, int]:
    """A run in which sessions grow, copies are made, leased, evicted and converted."""
    rng = random.Random(seed)
    log = LineLog()
    d = _fresh(log)
    now, converted = 0.0, 0
    open_: list[tuple[Recode, int]] = []
    leases: list[int] = []
    for _ in range(steps):
        now += rng.random()
        chain = chains.keys([rng.randrange(4), *[rng.randrange(2) for _ in range(5)]])
        action = rng.randrange(8)
        if action < 2:
            chains.store(d, 0, chains.items(chain, nbytes=rng.choice([8, 10])), now)
        elif action == 2:
            d.told(chain, 1, B, 0, len(chain) * B + rng.randrange(120), now)
        elif action == 3:
            for recode in d.take_recodes(4, 30, now):
                held = d.hold_part(recode.part, now, True, 1 << recode.tier)
                if held is not None:
                    open_.append((recode, held[0]))
        elif action == 4 and open_:
            recode, held_lease = open_.pop(rng.randrange(len(open_)))
            fate = rng.randrange(4)
            if fate < 2:
                converted += d.recoded(recode, rng.randrange(1, 12), rng.random() < 0.5, now)
            elif fate == 2:
                d.recode_kept(recode, now)
            else:
                d.recode_later(recode, rng.random(), now)
            d.release(held_lease, now)
        elif action == 5:
            found = d.lookup(chains.query(chain, lossy=rng.random() < 0.5), now)
            leases.append(found.lease)
        elif action == 6 and leases:
            d.release(leases.pop(rng.randrange(len(leases))), now)
        else:
            parts = [chains.part(key) for key in chain]
            d.copy_chains(parts, [rng.choice([None, Age(0, 70)]) for _ in parts], 0, 1, now)
            d.recheck(parts, now)
            d.score(parts[:2], rng.random(), now)
            if rng.random() < 0.3:
                chains.copy(d, 0, 1, chains.items(chain, nbytes=10), now)
        d.check()
    return log, converted


def _fresh(log: LineLog | None = None) -> Decisions:
    rules = [
        Rule("int4", steps=90, sinks=B),
        Rule("int8", steps=51),
        Rule("int8", below=0.3),
        Rule("planes", seconds=9),
    ]
    return decisions(rules, [Rule("int8")], capacities=(120, 200), log=log)


@pytest.mark.parametrize("seed", range(4))
def test_the_log_of_a_run_with_conversions_replays_byte_for_byte(seed: int) -> None:
    log, converted = _live(seed, 400)

    assert converted
    assert b'"op":"recoded"' in b"".join(log.lines)
    assert list(replay(log.lines, _fresh())) == log.lines


def test_a_log_of_other_rules_is_refused() -> None:
    log, _ = _live(0, 5)

    with pytest.raises(ConfigError, match="of another configuration"):
        list(replay(log.lines, decisions([INT8], capacities=(120, 200))))
