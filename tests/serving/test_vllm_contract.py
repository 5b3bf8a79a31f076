"""The connector's scheduler side under vLLM's order of calls: every mode, storms, failures."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tests.serving.contract_rig import Rig, digest, handshakes, tokens
from tests.serving.dict_rank import Faults
from tierkv.errors import ConfigError
from tierkv.testing.serving import (
    MUTANTS,
    GroupSpec,
    Lora,
    Mode,
    Mutant,
    Prompt,
    Replay,
    ServingTests,
    Storm,
    make_reference,
    scarce,
)
from tierkv_adapters.serving.settings import ServingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import AdapterId
    from tierkv.testing.serving import Memory

SCALE = float(os.environ.get("TIERKV_SCALE", "1"))
HYBRID = (GroupSpec(), GroupSpec(window=9))


class _OverRig(ServingTests):
    """The suite over a rig's connector."""

    real: ClassVar[bool] = False
    faults: ClassVar[Faults] = Faults()

    def _replay(self, mode: Mode) -> Replay:
        self.rig = Rig(mode, block=self.block, faults=self.faults, real=self.real)
        return self.rig.replay

    def settle(self, replay: Replay) -> None:
        self.rig.settle()

    def close(self, replay: Replay) -> None:
        self.rig.close()


class TestOverDictionaries(_OverRig):
    """Ranks that copy at once."""


class TestOverSlowRanks(_OverRig):
    """Ranks whose copies take steps."""

    faults = Faults(lag=3)


class TestBlocksOfSeveralPages(_OverRig):
    """Blocks of four pages."""

    block = 16
    storms = 2


class TestRealRanks(_OverRig):
    """Engines with a host tier, on their own loops."""

    real = True
    storms = 1
    modes: ClassVar[tuple[Mode, ...]] = (
        Mode(),
        Mode(ranks=2, chunk=12, overlap=True),
        Mode(groups=HYBRID, drafts=2),
    )


class TestReference(ServingTests):
    """The suite holds for the reference."""

    def make(self, mode: Mode, memories: Sequence[Memory]) -> tuple[Any, Sequence[Any]]:
        return make_reference(mode, memories)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_caught_and_its_reference_is_not(mutant: Mutant) -> None:
    caught = mutant.hunt()
    assert caught is not None
    assert caught.kind in mutant.kinds, str(caught)
    assert mutant.hunt(seeds=2, mended=True) is None


# ---------------------------------------------------------------------- storms with faults

MODES = (
    Mode(),
    Mode(ranks=2, overlap=True),
    Mode(chunk=12, drafts=2),
    Mode(groups=HYBRID, overlap=True),
    Mode(groups=(GroupSpec(window=5), GroupSpec(), GroupSpec(window=33)), ranks=2, drafts=1),
)


def _faulty(mode: Mode, seed: int, block: int, requests: int) -> dict[str, int]:
    """A storm over ranks that fail loads, lose blocks and take their time; what was counted."""
    faults = Faults(lag=seed % 4, load_fails=0.5 * (seed % 2), evicts=0.1, seed=seed)
    with Rig(scarce(mode, 4), block=block, faults=faults) as rig:
        Storm(rig.replay, seed, secrets=not seed % 2, resets=0.05).run(requests)
        assert (rig.side._live, rig.side._places, rig.side._anew) == ({}, {}, set())
        planner = rig.side._planner
        assert planner is not None
        assert planner._plans == planner._leaving == {}
        for rank in rig.ranks:  # and the ranks have forgotten as much
            rank.handle_preemptions(planner.step())
            assert rank._requests == {}
        return rig.side.stats()


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("mode", MODES, ids=range(len(MODES)))
def test_storms_over_failing_ranks(mode: Mode, block: int) -> None:
    counted = [_faulty(mode, seed, block, 25) for seed in (1, 2)]
    assert sum(counts["failed_loads"] for counts in counted) > 0
    for counts in counted:
        # the rest was given up by its client
        assert counts["accepted_tokens"] >= counts["loaded_tokens"] + counts["failed_tokens"]


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES, ids=range(len(MODES)))
def test_many_storms(mode: Mode) -> None:
    for seed in range(max(2, int(100 * SCALE))):
        for block in (4, 8, 16):
            _faulty(mode, seed, block, 40)


# ---------------------------------------------------------------------- one thing at a time


def test_the_order_of_calls_is_vllm_s() -> None:
    """Asked, allocated, built, carried out, reported: as traced in the real engine."""
    with Rig() as rig:
        prompt = Prompt(tokens(16), max_tokens=1)
        rig.replay.run(("first", prompt))
        rig.replay.reset(connector=False)
        rig.replay.calls.clear()
        rig.replay.run(("second", prompt))
        begin = ["handle_preemptions", "bind_connector_metadata", "start_load_kv"]
        end = [
            "wait_for_save",
            "get_transfer_results",
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ]
        assert rig.replay.calls == [
            "on_new_request",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "hit_sources",
            "build_connector_meta",
            *begin,
            *end,
            "update_connector_output",
            "update_state_after_alloc",
            "build_connector_meta",
            *begin,
            *end,
            "request_finished",
            "update_connector_output",
            "build_connector_meta",
            *begin,
            *end,
            "update_connector_output",
        ]


def test_a_tier_that_always_fails_costs_one_try() -> None:
    """It says that it has the blocks, for ever: the request is computed after one load."""
    for groups in ((GroupSpec(),), HYBRID):
        with Rig(Mode(groups=groups), faults=Faults(always_fails=True)) as rig:
            prompt = Prompt(tokens(43))
            rig.replay.run(("first", prompt))
            for name in ("second", "third"):
                rig.replay.reset(connector=False)
                rig.replay.run((name, prompt))
                assert rig.replay.recomputed[name] >= 43
            counts = rig.side.stats()
            assert (counts["loads"], counts["failed_loads"]) == (1, 1)
            rig.clock.now += 31.0  # a while later it gets another chance
            rig.replay.reset(connector=False)
            rig.replay.run(("fourth", prompt))
            assert rig.side.stats()["loads"] == 2
            assert rig.replay.outputs["fourth"] == rig.replay.outputs["first"]


def test_a_whole_prompt_is_offered_whole_and_its_last_token_computed_alone() -> None:
    with Rig() as rig:
        prompt = Prompt(tokens(40), max_tokens=2)
        rig.replay.run(("first", prompt))
        rig.replay.reset(connector=False)
        rig.replay.run(("second", prompt))
        assert rig.replay.offered["second"] == 40
        assert rig.replay.recomputed["second"] == 2  # it, and the first decoded one


@pytest.mark.parametrize("length", [12, 16, 40])
def test_a_whole_prompt_is_not_offered_where_a_window_s_page_would_be_missing(length: int) -> None:
    """The last token sees one token more than the one behind it, for which vLLM keeps pages."""
    with Rig(Mode(groups=(GroupSpec(), GroupSpec(window=9)))) as rig:
        prompt = Prompt(tokens(length), max_tokens=2)
        rig.replay.run(("first", prompt))
        rig.replay.reset(connector=False)
        rig.replay.run(("second", prompt))
        assert rig.replay.offered["second"] == length - 4


def test_an_adapter_is_cached_from_when_its_fingerprint_is_known() -> None:
    """Files are read elsewhere; what takes longer than a request waits is not lost afterwards."""
    known = threading.Event()

    def slow(lora: Any) -> AdapterId:
        assert known.wait(60)
        return digest(lora)

    with Rig(digest=slow) as rig:
        rig.side._fingerprints._patience = 0.0
        prompt = Prompt(tokens(32), lora=Lora("one"), max_tokens=12)
        rig.replay.add("first", prompt)
        for _ in range(4):
            rig.replay.step()
        assert rig.side.stats()["requests"] == 0
        known.set()
        assert rig.until(lambda: rig.side._fingerprints.known(Lora("one")) is not None)
        rig.replay.drain()  # the pages that it got meanwhile are saved, too
        rig.replay.reset(connector=False)
        rig.replay.run(("second", prompt))
        assert rig.replay.offered["second"] == 32


def test_a_request_waits_a_little_for_the_fingerprint_of_its_adapter() -> None:
    """So that the first request of an engine finds what an earlier engine stored."""
    known = threading.Event()

    def slow(lora: Any) -> AdapterId:
        assert known.wait(60)
        return digest(lora)

    with Rig(digest=slow) as rig:
        prompt = Prompt(tokens(32), lora=Lora("one"), max_tokens=12)
        rig.replay.add("first", prompt)
        rig.replay.add("plain", Prompt(tokens(16)))
        for _ in range(4):
            rig.replay.step()
        assert rig.side.stats()["requests"] == 1, "others do not wait for it"
        known.set()
        assert rig.until(lambda: rig.side._fingerprints.known(Lora("one")) is not None)
        rig.replay.drain()
        rig.replay.reset(connector=False)
        rig.replay.run(("second", prompt))
        assert rig.replay.offered["second"] == 32


def test_f006_an_adapter_that_is_loaded_in_place_is_read_again() -> None:
    with Rig() as rig:
        first = Prompt(tokens(32), lora=Lora("one"))
        rig.replay.run(("warm", first))
        assert rig.until(lambda: rig.side._fingerprints.known(Lora("one")) is not None)
        rig.replay.reset()
        rig.replay.run(("first", first))
        rig.replay.reset(connector=False)
        newer = Lora("one", version="2", load_inplace=True)
        rig.replay.run(("second", Prompt(tokens(32), lora=newer)))
        assert rig.replay.offered["second"] == 0


@pytest.mark.parametrize(
    "params",
    [
        {"tierkv": {"sesion": "x"}},
        {"tierkv": "x"},
        {"tierkv": {"ttl": "soon"}},
        {"tierkv": {"ttl": -1}},
        {"tierkv": {"tenant": None}},
        {"tierkv": {"tenant": 3, "session": ""}},
        {"tierkv": {"max_load_tokens": True}},
        {"tierkv": {"load_deadline": [1]}},
    ],
)
def test_malformed_settings_are_counted_and_the_request_shares_nothing(params: Any) -> None:
    with Rig() as rig:
        rig.replay.run(("first", Prompt(tokens(32))))
        rig.replay.reset(connector=False)
        rig.replay.run(("second", Prompt(tokens(32), params=params)))
        assert rig.replay.offered["second"] == 0
        assert rig.side.stats()["malformed"] == 1
        rig.replay.run(("third", Prompt(tokens(32), params={"other": {"a": 1}})))
        assert rig.side.stats()["malformed"] == 1


def test_settings_of_a_request_reach_the_ranks() -> None:
    asked = {"session": "s", "tenant": "t", "ttl": "6h", "load_deadline": "150ms"}
    with Rig() as rig:
        first = Prompt(tokens(32), params={"tierkv": asked}, salt="x")
        rig.replay.run(("first", first))
        facts = next(o.fresh[0] for o in rig.ranks[0].orders if o.fresh)
        assert (facts.session, facts.tenant, facts.ttl, facts.salt) == ("s", "t", 21600.0, b"x")
        rig.replay.reset(connector=False)
        rig.replay.run(("second", first))
        (load,) = [load for orders in rig.ranks[0].orders for load in orders.loads]
        assert load.deadline == pytest.approx(0.15)
        limited = {"tierkv": {**asked, "max_load_tokens": 10, "max_save_tokens": 0}}
        rig.replay.reset(connector=False)
        rig.replay.run(("third", replace(first, params=limited)))
        assert rig.replay.offered["third"] == 8


def test_decoded_tokens_are_saved_only_if_wanted() -> None:
    for wanted in (True, False):
        with Rig(settings=ServingSettings(save_decoded=wanted)) as rig:
            rig.replay.run(("first", Prompt(tokens(10), max_tokens=12)))
            saved = [save.stop for o in rig.ranks[0].orders for save in o.saves]
            assert max(saved) == (20 if wanted else 8)


def test_guessed_tokens_are_never_saved() -> None:
    """Draft tokens are computed, and often wrong: what is saved is what was known."""
    with Rig(Mode(drafts=3)) as rig:
        rig.replay.run(("first", Prompt(tokens(10), max_tokens=30)))
        known = [*tokens(10), *rig.replay.outputs["first"]]
        told = [t for o in rig.ranks[0].orders for g in o.grown for t in g.tokens]
        assert told == known[: len(told)]
        assert len(told) >= 36


def test_reset_empties_every_rank() -> None:
    with Rig(Mode(ranks=2)) as rig:
        rig.replay.run(("first", Prompt(tokens(32))))
        assert rig.replay.reset()
        rig.replay.run(("second", Prompt(tokens(32))))
        assert rig.replay.offered["second"] == 0


def test_f006_what_is_computed_since_a_reset_is_found_by_this_run_alone() -> None:
    """Other weights may be in place, and no file tells: a restart must not take it for the old."""
    with Rig() as rig:
        rig.replay.reset()
        rig.replay.run(("first", Prompt(tokens(32))))
        rig.replay.reset(connector=False)
        rig.replay.run(("again", Prompt(tokens(32))))
        assert rig.replay.offered["again"] > 0
        rig.replay.reset(connector=False)
        rig.side._era = b""  # as a scheduler of the next run begins
        rig.replay.run(("restarted", Prompt(tokens(32))))
        assert rig.replay.offered["restarted"] == 0


def test_before_ranks_are_known_nothing_is_offered_or_said() -> None:
    with Rig() as rig:
        rig.side._planner = None
        rig.replay.run(("first", Prompt(tokens(32))))
        assert rig.replay.offered["first"] == 0
        assert all(orders == type(orders)() for orders in rig.ranks[0].orders)
        assert not any(rig.side.stats().values())


def test_ranks_that_do_not_agree_are_refused() -> None:
    with Rig(Mode(ranks=2)) as rig:
        facts = handshakes(rig.mode, 4)
        facts[1]["block_tokens"] = 8
        with pytest.raises(ConfigError, match="do not agree"):
            rig.side.started(facts)
