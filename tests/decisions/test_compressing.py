"""Which copies are due for which chain: by tier, age, position and importance, first rule first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv.decisions.coding_rules import Age, Rule
from tierkv.decisions.core import Decisions
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import EvictReason, TierLimits
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.coding_rules import Recode
    from tierkv.decisions.log import LineLog

B = chains.BLOCK
INT8 = Rule("int8", steps=51)


def decisions(
    *rules: Sequence[Rule],
    places: Sequence[bool] | None = None,
    capacities: Sequence[int] = (1000, 1000),
    log: LineLog | None = None,
) -> Decisions:
    """Two tiers (or as many as there are capacities) with these rules."""
    tiers = [TierLimits(f"t{i}", c) for i, c in enumerate(capacities)]
    d = Decisions(tiers, policy=Lru)
    padded = [*rules, *([()] * (len(tiers) - len(rules)))]
    d.compress(padded, places or [True] * len(tiers))
    d.attach(log)
    return d


def told(
    d: Decisions, chain: Sequence[BlockKey], total: int, now: float = 0.0, first: int = 0
) -> None:
    d.told(chain[first:], 1, B, first, total, now)


def line(d: Decisions, now: float = 0.0) -> list[tuple[PartId, int, str]]:
    """Everything that is due now; it is taken out of line."""
    out: list[tuple[PartId, int, str]] = []
    while d.recodes_wait(now):
        out += [(r.part, r.tier, r.chain) for r in d.take_recodes(3, 1 << 40, now)]
    return out


def stored(d: Decisions, blocks: int, tier: int = 0, now: float = 0.0) -> list[BlockKey]:
    chain = chains.keys(range(blocks))
    chains.store(d, tier, chains.items(chain, nbytes=10), now)
    return chain


def lease(d: Decisions, recode: Recode, now: float = 0.0) -> int:
    held = d.hold_part(recode.part, now, True, 1 << recode.tier)
    assert held is not None
    return held[0]


# --------------------------------------------------------------------------- rules


@pytest.mark.parametrize(("steps", "due"), [(49, []), (50, []), (51, [0]), (52, [0])])
def test_a_block_is_raw_at_50_steps_and_due_at_51(steps: int, due: list[int]) -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    told(d, chain, B + steps)

    assert line(d) == [(chains.part(chain[i]), 0, "int8") for i in due]


def test_age_is_that_of_the_session_that_is_furthest_ahead() -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    told(d, chain, B + 3)  # another session, with less behind the block

    assert len(line(d)) == 1


def test_every_block_of_a_long_prompt_that_is_old_enough_is_due_at_once_in_order() -> None:
    d = decisions([INT8])
    chain = stored(d, 30)
    told(d, chain, 30 * B)

    old = [i for i in range(30) if 30 * B - (i + 1) * B > 50]
    assert old
    assert line(d) == [(chains.part(chain[i]), 0, "int8") for i in old]


def test_the_first_rule_that_applies_counts_and_each_is_tried_once() -> None:
    d = decisions([Rule("int4", steps=101), INT8])
    chain = stored(d, 1)
    for total, chain_name in ((60, ["int8"]), (70, []), (105, ["int4"]), (300, [])):
        told(d, chain, B + total)
        batch = d.take_recodes(8, 1 << 40, 0.0)
        assert [r.chain for r in batch] == chain_name
        for recode in batch:
            d.recode_kept(recode, 0.0)


def test_first_tokens_and_last_tokens_stay_exact() -> None:
    d = decisions([Rule("int8", steps=2 * B, sinks=B + 1)])
    chain = stored(d, 6)
    told(d, chain, 6 * B)

    # blocks 0 and 1 hold one of the first B + 1 tokens; 4 and 5 one of the last 2 * B
    assert [p for p, _, _ in line(d)] == [chains.part(chain[i]) for i in (2, 3)]


def test_a_rule_for_the_first_token_keeps_the_first_block_only() -> None:
    d = decisions([Rule("int8", sinks=1)])
    chain = stored(d, 3)
    told(d, chain, 3 * B)

    assert [p for p, _, _ in line(d)] == [chains.part(key) for key in chain[1:]]


def test_age_in_seconds_comes_by_itself() -> None:
    d = decisions([Rule("int8", seconds=60)])
    chain = stored(d, 2, now=5.0)
    told(d, chain, 2 * B, now=5.0)

    assert line(d, 64.9) == []
    assert not d.recodes_wait(64.9)
    assert d.recodes_wait(65.0)
    assert [p for p, _, _ in line(d, 65.0)] == [chains.part(key) for key in chain]


def test_seconds_and_steps_must_both_be_over() -> None:
    d = decisions([Rule("int8", steps=51, seconds=60)])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    assert line(d, 59.0) == []
    assert len(line(d, 60.0)) == 1

    young = stored(d := decisions([Rule("int8", steps=51, seconds=60)]), 1)
    told(d, young, B + 50)
    assert line(d, 1000.0) == []


def test_only_what_is_known_to_matter_little_is_due() -> None:
    d = decisions([Rule("int8", below=0.5)])
    chain = stored(d, 3)
    parts = [chains.part(key) for key in chain]
    d.score(parts[:2], [0.9, 0.1], 0.0)
    assert line(d) == [(parts[1], 0, "int8")]
    told(d, chain, 3 * B)
    assert line(d) == [(parts[1], 0, "int8")], "nobody has said what came of it"


def test_what_is_said_to_matter_little_is_due_at_once_if_it_is_old_enough() -> None:
    d = decisions([Rule("int8", steps=51, below=0.5)])
    chain = stored(d, 2)
    parts = [chains.part(key) for key in chain]
    told(d, chain, 2 * B + 50)  # 50 steps behind the second one
    d.score(parts, 0.7, 0.0)
    assert line(d) == []
    d.score(parts, 0.2, 0.0)
    assert line(d) == [(parts[0], 0, "int8")]


def test_a_tier_without_rules_and_one_that_cannot_convert_are_left_alone() -> None:
    d = decisions([Rule("int8")], [Rule("int8")], places=[False, False])
    chain = stored(d, 1)
    told(d, chain, B)
    assert line(d) == []

    d = decisions((), [Rule("int8")])
    chain = stored(d, 1)
    told(d, chain, B)
    assert line(d) == []
    assert not d.compresses(0)
    assert d.compresses(1)


def test_as_many_lists_of_rules_as_tiers() -> None:
    d = Decisions([TierLimits("t0", 10)], policy=Lru)

    with pytest.raises(ConfigError, match="1 tiers need as many lists of rules, not 2"):
        d.compress([[], []], [True])
    d.compress([[]], [True])
    assert not d.compressing
    assert d.take_recodes(1, 1, 0.0) == ()
    assert d.copy_chains([], [], 0, 0, 0.0) == ()


# --------------------------------------------------------------------------- copies


def test_a_copy_gets_the_chain_of_the_rule_of_its_target() -> None:
    d = decisions((), [INT8])
    chain = stored(d, 2)
    told(d, chain, B + 60)
    parts = [chains.part(key) for key in chain]

    assert d.copy_chains(parts, [None, None], 0, 1, 0.0) == ("int8", "int8")
    told(d := decisions((), [INT8]), chain := stored(d, 2), B + 52)
    assert d.copy_chains(parts, [None, None], 0, 1, 0.0) == ("int8", None)  # steps 52 and 48


def test_a_copy_made_before_the_session_has_told_goes_by_what_its_store_knows() -> None:
    d = decisions((), [INT8])
    chain = stored(d, 1)
    part = chains.part(chain[0])

    assert d.copy_chains([part], [None], 0, 1, 0.0) == (None,)
    assert d.copy_chains([part], [Age(0, 51)], 0, 1, 0.0) == ("int8",)
    assert d.copy_chains([part], [Age(0, 50)], 0, 1, 0.0) == (None,)


def test_a_rule_for_demotions_is_for_copies_to_slower_tiers_only() -> None:
    rule = Rule("int8", in_place=False)
    d = decisions([rule], [rule])
    chain = stored(d, 1)
    told(d, chain, B)
    part = chains.part(chain[0])

    assert line(d) == []
    assert d.copy_chains([part], [None], 0, 1, 0.0) == ("int8",)
    assert d.copy_chains([part], [None], 1, 0, 0.0) == (None,)


def test_a_private_tail_is_left_alone() -> None:
    d = decisions([Rule("int8")], [Rule("int8")])
    chain = chains.keys([1])
    chains.store(d, 0, chains.items(chain, private=True))
    told(d, chain, B)

    assert line(d) == []
    assert d.copy_chains([chains.part(chain[0])], [None], 0, 1, 0.0) == (None,)


# --------------------------------------------------------------------------- exchanging


def test_an_exchange_frees_bytes_and_says_that_the_copy_is_lossy() -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    (recode,) = d.take_recodes(8, 1 << 40, 0.0)
    held = lease(d, recode)

    assert d.recoded(recode, 6, False, 0.0)
    d.check()
    d.release(held, 0.0)
    d.check()
    state = d.state(recode.part, 0.0)
    assert (d.used(0), state.nbytes, state.lossless) == (6, (6,), (False,))
    assert state.generation == recode.generation
    assert chains.look(d, chain).blocks == 0, "an exact lookup takes a lossy copy"
    assert chains.look(d, chain, lossy=True).blocks == 1
    told(d, chain, B + 61)
    assert line(d) == []


def test_a_lossless_exchange_keeps_the_copy_exact() -> None:
    d = decisions([Rule("planes", steps=51)])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    (recode,) = d.take_recodes(8, 1 << 40, 0.0)
    held = lease(d, recode)

    assert d.recoded(recode, 6, True, 0.0)
    d.release(held, 0.0)
    assert chains.look(d, chain).blocks == 1


def test_f038_what_somebody_reads_is_not_exchanged() -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    (recode,) = d.take_recodes(8, 1 << 40, 0.0)
    mine, reader = lease(d, recode), d.lookup(chains.query(chain), 0.0)

    assert reader.blocks == 1
    assert not d.recoded(recode, 6, False, 0.0)
    assert d.used(0) == 10
    d.release(mine, 0.0)
    d.release(reader.lease, 0.0)
    assert line(d, 0.5) == [], "it is looked at again later"
    assert [p for p, _, _ in line(d, 1.0)] == [recode.part]


def test_what_is_in_use_is_not_taken_out_of_line_in_vain() -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    reader = d.lookup(chains.query(chain), 0.0)
    told(d, chain, B + 60)

    assert line(d) == []
    assert d.due(chains.part(chain[0]), 0.0)
    d.release(reader.lease, 0.0)
    assert len(line(d, 1.0)) == 1


def test_an_exchange_needs_the_copy_of_that_generation_and_fewer_bytes() -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    (recode,) = d.take_recodes(8, 1 << 40, 0.0)
    held = lease(d, recode)

    assert not d.recoded(recode._replace(generation=recode.generation + 1), 6, False, 0.0)
    assert not d.recoded(recode._replace(tier=1), 6, False, 0.0)
    assert not d.recoded(recode, 10, False, 0.0)
    d.release(held, 0.0)
    d.forget([recode.part], EvictReason.REMOVED, 0.0)
    assert not d.recoded(recode, 6, False, 0.0)
    assert d.used(0) == 0
    d.check()


def test_a_copy_that_is_stored_anew_is_due_again() -> None:
    d = decisions([INT8])
    chain = stored(d, 1)
    told(d, chain, B + 60)
    (recode,) = d.take_recodes(8, 1 << 40, 0.0)
    d.recode_kept(recode, 0.0)
    d.forget([recode.part], EvictReason.REMOVED, 0.0)
    stored(d, 1)

    assert not d.due(recode.part, 0.0), "nobody has told of the age of the new one"
    told(d, chain, B + 60)
    assert [p for p, _, _ in line(d)] == [recode.part]


def test_a_batch_is_of_one_tier_and_bounded() -> None:
    rule = Rule("int8")
    d = decisions([rule], [rule])
    chain = stored(d, 4)
    chains.copy(d, 0, 1, chains.items(chain, nbytes=10))
    told(d, chain, 4 * B)

    sizes = []
    while batch := d.take_recodes(8, 25, 0.0):
        assert len({r.tier for r in batch}) == 1
        sizes.append(sum(r.nbytes for r in batch))
    assert sum(sizes) == 80
    assert max(sizes) <= 30  # the last one may pass the limit


def test_what_waits_for_parts_that_are_gone_does_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierkv.decisions.compressing._SPARE", 100)
    d = decisions([Rule("int8", seconds=1e9)], capacities=(1000,))
    rules = d._rules
    assert rules is not None
    for n in range(900):
        chain = chains.keys([n])
        chains.store(d, 0, chains.items(chain, nbytes=10))
        told(d, chain, B)

    assert len(rules._later) <= 2 * len(d.known()) + 100 + 1
    assert len(rules._due) <= len(rules._later)
