"""Hints that a rank follows: pins that keep KV for a while, and what they never cost."""

from __future__ import annotations

import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.rank_rig import GUARD, RankRig, prompt
from tierkv.errors import CapacityError
from tierkv.workers import Signal
from tierkv_adapters.serving.orders import HintOrder, RequestFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("no_thread_leaks")

FACTS = RequestFacts("a", salt=b"very-secret-salt")
LONG_S = 3600.0


def _pin(ids: Sequence[int] | None, seconds: float = LONG_S, name: str = "a") -> HintOrder:
    facts = RequestFacts(name, salt=FACTS.salt)
    return HintOrder(facts, "pin", None if ids is None else array("I", ids), seconds=seconds)


def _hint(rig: RankRig, hint: HintOrder) -> None:
    counters = rig.rank.counters
    before = counters.hints + counters.hints_refused
    rig.rank.begin(rig.step(hints=[hint]))
    _until(lambda: counters.hints + counters.hints_refused > before)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def _holds(rig: RankRig) -> list[int]:
    """Blocks of the standing holds of the rig's engine."""

    async def ask() -> list[int]:
        holder = rig.manager.engine._holder
        return [] if holder is None else sorted(hold.blocks for hold in holder._holds)

    return rig.manager.call(ask)


def test_a_pin_holds_what_is_stored_and_grows_with_saves() -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids[:16], FACTS)
        _hint(rig, _pin(ids))
        assert _holds(rig) == [2]
        rig.rank.begin(rig.step(ended=["a"]))
        rig.save("a", ids, FACTS)
        _until(lambda: _holds(rig) == [6])
        assert (rig.rank.counters.hints, rig.rank.counters.hints_refused) == (1, 0)


def test_a_pin_ends_with_its_time() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(16), FACTS)
        _hint(rig, _pin(prompt(16), 0.05))
        _until(lambda: _holds(rig) == [])


def test_a_pin_of_another_salt_holds_nothing() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(16))
        _hint(rig, _pin(prompt(16)))
        assert _holds(rig) in ([], [0])


def test_pins_leave_half_of_the_memory_to_others() -> None:
    with RankRig() as rig:
        layout = rig.space.layout
        most = (8 << 20) // 2 // layout.raw_bytes(rig.block)
        rig.save("a", prompt(16), FACTS)
        _hint(rig, _pin(prompt((most + 1) * rig.block)))
        assert rig.rank.counters.hints_refused == 1
        assert _holds(rig) == [2]  # what is there is kept all the same


def test_pins_go_with_their_rank() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(16), FACTS)
        _hint(rig, _pin(prompt(16)))
        assert _holds(rig) == [2]
        rig.rank.close()
        _until(lambda: _holds(rig) == [])  # a manager that was lent lives on


def test_a_save_does_not_wait_for_its_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reads the pages any more while blocks are verified: nobody may wait for that."""
    go = Signal()
    with RankRig() as rig:
        engine = rig.manager.engine

        async def slow(*_: Any, **__: Any) -> Any:
            await go.wait()
            raise CapacityError("planted")

        async def let_go() -> None:
            go.set()

        monkeypatch.setattr(engine, "hold", slow)
        try:
            _hint(rig, _pin(None))
            _, ended = rig.save("a", prompt(16), FACTS)
            assert (ended.tokens, ended.reason) == (16, None)
        finally:
            rig.manager.call(let_go)
        _until(lambda: rig.rank.counters.hints_refused == 1)


def test_a_hint_that_fails_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RankRig() as rig:

        async def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(rig.manager.engine, "prefetch", broken)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                _hint(rig, HintOrder(FACTS, "prefetch", array("I", prompt(16))))
        assert rig.rank.counters.hints_refused == 3
        assert len([r for r in caplog.records if "hint" in r.getMessage()]) == 1
        assert "very-secret" not in caplog.text


def test_a_prefetch_brings_a_prompt_early() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(16), FACTS)
        _hint(rig, HintOrder(FACTS, "prefetch", array("I", prompt(16))))
        assert rig.rank.counters.hints == 1
