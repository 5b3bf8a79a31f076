"""Tiers that hang, or take long, while a rank loads from them and stores to them."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import GUARD, KINDS, RankRig, prompt, start_save
from tierkv.testing.faults import Gated, Hanging
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_thread_leaks")


def test_a_hanging_tier_ends_with_the_deadline(tmp_path: Path) -> None:
    """What it brings later goes nowhere: the pages are somebody else's."""
    hang = Hanging("read")
    hang.active = False
    with RankRig(path=tmp_path, tiers="nvme", faults={"nvme": [hang]}) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        hang.active = True
        try:
            pages, loaded = rig.load("b", ids, deadline=0.2)
            assert (loaded.tokens, loaded.reason) == (0, "deadline")
            assert rig.rank.counters.deadline_misses == 1
            rig.rank.begin(rig.step(ended=["b"], taken=array("q", pages[0])))
            rig.pages.spoil(pages[0])
        finally:
            hang.release()
        assert rig.rank.drain(GUARD)
        rig.flush()
        assert rig.rank.poll() == []
        assert rig.pages.spoilt(pages[0])


def test_without_a_deadline_the_engine_gives_a_tier_up(tmp_path: Path) -> None:
    hang = Hanging("read")
    hang.active = False
    faults = {"nvme": [hang]}
    with RankRig(path=tmp_path, tiers="nvme", faults=faults, tier_timeout=0.3) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        hang.active = True
        try:
            _, loaded = rig.load("b", ids)
            assert loaded.tokens == 0
            assert loaded.reason is not None
        finally:
            hang.release()


class Gate:
    """A disk whose reads or writes wait."""

    def __init__(self, operation: str) -> None:
        self.fault = Gated(operation)
        self.fault.active = False

    def shut(self) -> None:
        """Let the calls wait from now on."""
        self.fault.active = True

    def arrived(self, rig: RankRig) -> None:
        """Wait until a call is at the gate."""
        rig.manager.call(self._arrived)

    async def _arrived(self) -> None:
        async with asyncio.timeout(GUARD):
            await self.fault.arrived()

    def open(self, rig: RankRig) -> None:
        """Let them through."""
        rig.manager.call(self._open)

    async def _open(self) -> None:
        self.fault.open_gate()


def test_an_aborted_request_gives_its_load_up_and_is_told_once(tmp_path: Path) -> None:
    gate = Gate("read")
    with RankRig(path=tmp_path, tiers="nvme", faults={"nvme": [gate.fault]}) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        gate.shut()
        pages = rig.begin_load("b", ids, 48)
        gate.arrived(rig)
        assert rig.rank.poll() == []
        assert rig.rank.busy()
        rig.rank.begin(rig.step(ended=["b"]))
        ended = rig.until(("b", "load"))["b", "load"]
        assert (ended.tokens, ended.reason) == (0, "ended")
        assert rig.rank.counters.loads_short == 0  # nobody computes the rest of it
        rig.pages.spoil(pages[0])
        gate.open(rig)
        assert rig.rank.drain(GUARD)
        assert rig.rank.poll() == []
        assert rig.pages.spoilt(pages[0])


def test_a_step_gives_up_stores_that_take_too_long(tmp_path: Path) -> None:
    """A tier that hangs while it writes holds the step up no longer than that."""
    gate = Gate("write")
    faults = {"nvme": [gate.fault]}
    settings = RankSettings(fence_patience=0.0)
    with RankRig(
        path=tmp_path, tiers="nvme", faults=faults, settings=settings, staging="16KiB"
    ) as rig:  # there is no memory to gather all of it before the tier has written some
        ids = prompt(48)
        gate.shut()
        pages = start_save(rig, "a", ids)
        gate.arrived(rig)
        rig.rank.begin(rig.step(ended=["a"], taken=array("q", pages[0])))
        rig.pages.spoil(pages[0])
        assert rig.rank.counters.fence_gave_up == 1
        assert rig.until(("a", "save"))["a", "save"].reason == "pages_taken"
        gate.open(rig)
        assert rig.rank.drain(GUARD)
        rig.flush()
        back, loaded = rig.load("b", ids)
        assert rig.right(ids, back, loaded.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_a_tier_that_writes(kind: str, tmp_path: Path) -> None:
    """What is being written was gathered before: its pages may be anybody's."""
    gate = Gate("write")
    faults = {"nvme": [gate.fault]}
    settings = RankSettings(fence_patience=GUARD)
    with RankRig(kind, path=tmp_path, tiers="nvme", faults=faults, settings=settings) as rig:
        ids = prompt(48)
        gate.shut()
        pages = start_save(rig, "a", ids)
        gate.arrived(rig)
        taken = [page for each in pages for page in each]
        rig.rank.begin(rig.step(ended=["a"], taken=array("q", taken)))
        rig.pages.spoil(taken)
        assert rig.rank.counters.fence_gave_up == 0
        assert rig.rank.poll() == []
        assert rig.rank.saving("a"), "it is not over"
        gate.open(rig)
        ended = rig.until(("a", "save"))["a", "save"]
        assert (ended.tokens, ended.reason) == (48, None)
        back, loaded = rig.load("b", ids)
        assert loaded.tokens == 48
        assert rig.right(ids, back, 48)


def test_closing_waits_until_nothing_touches_the_pages(tmp_path: Path) -> None:
    gate = Gate("read")
    with RankRig(path=tmp_path, tiers="nvme", faults={"nvme": [gate.fault]}) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        gate.shut()
        rig.begin_load("b", ids, 48)
        gate.arrived(rig)
        rig.rank.close()
        assert [(e.id, e.kind, e.reason) for e in rig.rank.poll()] == [("b", "load", "closed")]
        assert not rig.rank.busy()
        gate.open(rig)
