"""A rank stores and brings back the pages of requests, byte for byte, whatever the groups are."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import KINDS, RankRig, prompt
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.faults import Corrupting
from tierkv_adapters.serving.orders import LoadOrder, RequestFacts, SaveOrder

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("no_thread_leaks")


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_comes_back_byte_for_byte(kind: str, block: int) -> None:
    with RankRig(kind, block=block) as rig:
        ids = prompt(48 if kind == "state" else 51)
        _, saved = rig.save("a", ids)
        assert (saved.tokens, saved.reason, saved.start) == (48, None, 0)
        rig.free = {n: free[::-1] for n, free in rig.free.items()}
        pages, loaded = rig.load("b", ids)
        assert (loaded.tokens, loaded.reason) == (48, None)
        assert rig.right(ids, pages, 48)
        counts = rig.rank.counters
        assert (counts.loads, counts.saves, counts.errors) == (1, 1, 0)
        assert counts.load_tokens == counts.save_tokens == 48
        assert counts.save_bytes == counts.save_blocks * rig.space.layout.raw_bytes(block)
        assert not rig.rank.busy()


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_from_disk_in_another_process_life(kind: str, tmp_path: Path) -> None:
    ids = prompt(48)
    with RankRig(kind, path=tmp_path, tiers="nvme") as rig:
        assert rig.save("a", ids)[1].tokens == 48
        rig.flush()
    with RankRig(kind, path=tmp_path, tiers="host+nvme") as rig:
        pages, loaded = rig.load("b", ids)
        assert (loaded.tokens, loaded.reason) == (48, None)
        assert rig.right(ids, pages, 48)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_pages_in_a_device_are_read_and_written_in_order(kind: str, seed: int) -> None:
    """The forward pass is late: saves come behind it, and what follows a load comes behind it."""
    with RankRig(kind, device=SimDevice(f"sim:{seed}")) as rig:
        ids = prompt(48)
        pages, saved = rig.save("a", ids)
        assert saved.tokens == 48
        rig.pages.spoil([p for each in pages for p in each])
        pages, loaded = rig.load("b", ids)
        assert loaded.tokens == 48
        assert rig.right(ids, pages, 48)
        device = rig.pages.device
        assert device is not None
        assert device.counters.hazards == 0


@pytest.mark.parametrize("kind", ["full", "opaque", "latent", "sliding"])
@pytest.mark.parametrize("start", [16, 20])
def test_only_what_is_missing_is_brought(kind: str, start: int) -> None:
    """Pages before the start belong to the engine's own cache; also where a block is halved."""
    with RankRig(kind, block=8) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        pages, loaded = rig.load("b", ids, start=start)
        assert (loaded.start, loaded.tokens) == (start, 48)
        assert rig.right(ids, pages, 48)
        assert rig.rank.counters.load_tokens == 48 - start


def test_pages_before_the_start_are_never_written() -> None:
    with RankRig(block=8) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        pages = rig.begin_load("b", ids, 48, start=20)
        rig.pages.spoil([p for each in pages for p in each[:5]])  # nobody but us may do that
        rig.until(("b", "load"))
        assert rig.pages.wrong(ids, pages, 0, 48) == list(range(20))


def test_a_stop_inside_a_block_is_the_block_before() -> None:
    with RankRig(block=16) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        pages, loaded = rig.load("b", ids, 44)
        assert (loaded.tokens, loaded.reason) == (32, None)
        assert rig.right(ids, pages, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_saves_go_on_as_a_request_grows(kind: str) -> None:
    with RankRig(kind) as rig:
        ids = prompt(64)
        pages = rig.take(64)
        rig.rank.begin(rig.step(fresh=[RequestFacts("a")]))
        for at in range(0, 64, 8):
            mine = [each[at // 4 : at // 4 + 2] for each in pages]
            grown = [rig.grown("a", ids[at : at + 8], mine)]
            rig.rank.begin(rig.step(grown=grown, saves=[SaveOrder("a", at, at + 8)]))
            rig.pages.compute(ids, pages, at, at + 8)
            rig.rank.start_saves()
        assert rig.rank.drain(60)
        ends = rig.rank.poll()
        assert [(e.start, e.tokens, e.reason) for e in ends] == [
            (at, at + 8, None) for at in range(0, 64, 8)
        ]
        assert not rig.rank.saving("a")
        for stop in (24, 64):
            back, loaded = rig.load(f"b{stop}", ids[:stop])
            assert loaded.tokens == stop
            assert rig.right(ids, back, stop)


def test_a_shorter_prefix_than_wanted_is_what_there_is() -> None:
    with RankRig() as rig:
        ids = prompt(64)
        rig.save("a", ids[:32])
        pages, loaded = rig.load("b", ids)
        assert (loaded.tokens, loaded.reason) == (32, "never_stored")
        assert rig.right(ids, pages, 32)
        assert rig.rank.counters.loads_short == 1


@pytest.mark.parametrize("kind", ["sliding", "state"])
def test_a_shorter_prefix_without_pages_for_its_window_is_nothing(kind: str) -> None:
    with RankRig(kind) as rig:
        ids = prompt(64)
        rig.save("a", ids[:32])
        _, loaded = rig.load("b", ids)
        assert loaded.tokens == 0
        assert loaded.reason is not None
        assert rig.rank.counters.errors == 0


def test_pages_that_left_the_window_are_not_stored() -> None:
    """Also if nobody said so: another request has them."""
    with RankRig("sliding", block=8) as rig:
        ids = prompt(64)
        pages = rig.take(64)
        rig.rank.begin(rig.step(fresh=[RequestFacts("a")], grown=[rig.grown("a", ids, pages)]))
        rig.pages.compute(ids, pages, 0, 64)
        slid = pages[0][:6]
        rig.rank.begin(rig.step(taken=array("q", slid), saves=[SaveOrder("a", 0, 64)]))
        rig.pages.spoil(slid)
        rig.rank.start_saves()
        saved = rig.until(("a", "save"))["a", "save"]
        assert (saved.tokens, saved.reason) == (64, None)
        back, loaded = rig.load("b", ids)
        assert loaded.tokens == 64
        assert rig.right(ids, back, 64)
        _, loaded = rig.load("c", ids[:24])  # needs the window that had slid
        assert loaded.tokens == 0


def test_states_are_stored_where_there_is_one() -> None:
    """A step without a state of its end stores nothing; the next one that has one stores both."""
    with RankRig("state", block=8) as rig:
        ids = prompt(32)
        pages = rig.take(32)
        pages[1][3] = -1  # no snapshot behind token 16
        rig.rank.begin(
            rig.step(
                fresh=[RequestFacts("a")],
                grown=[rig.grown("a", ids, pages)],
                saves=[SaveOrder("a", 0, 16), SaveOrder("a", 16, 32)],
            )
        )
        rig.pages.compute(ids, pages, 0, 32)
        rig.rank.start_saves()
        assert rig.rank.drain(60)
        assert [e.tokens for e in rig.rank.poll()] == [0, 32]
        back, loaded = rig.load("b", ids)
        assert loaded.tokens == 32
        assert rig.right(ids, back, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_comes_back_with_other_pages(kind: str) -> None:
    with RankRig(kind) as rig:
        ids = prompt(48)
        pages, _ = rig.save("a", ids[:32])
        rig.rank.begin(rig.step(voided=["a"]))
        rig.pages.spoil([p for each in pages for p in each])
        other = rig.take(48)
        taken = array("q", [p for each in other for p in each])
        rig.rank.begin(
            rig.step(
                grown=[rig.grown("a", ids[32:], other, replace=True)],
                taken=taken,
                loads=[LoadOrder("a", 0, 32)],
            )
        )
        rig.rank.start_loads()
        assert rig.until(("a", "load"))["a", "load"].tokens == 32
        assert rig.right(ids, other, 32)
        rig.pages.compute(ids, other, 32, 48)
        rig.rank.begin(rig.step(saves=[SaveOrder("a", 32, 48)]))
        rig.rank.start_saves()
        assert rig.until(("a", "save"))["a", "save"].tokens == 48
        back, loaded = rig.load("b", ids)
        assert loaded.tokens == 48
        assert rig.right(ids, back, 48)


def test_damaged_bytes_are_never_handed_out(tmp_path: Path) -> None:
    damage = Corrupting(0.55)  # behind the header of 4 KiB, in the payload
    damage.active = False
    with RankRig(path=tmp_path, tiers="nvme", faults={"nvme": [damage]}) as rig:
        ids = prompt(48)
        rig.save("a", ids)
        damage.active = True
        pages, loaded = rig.load("b", ids)
        assert loaded.tokens < 48
        assert loaded.reason == "damaged"
        assert rig.right(ids, pages, loaded.tokens)
        assert (rig.rank.counters.corrupt, rig.rank.counters.errors) == (1, 0)


def test_f020_evicted_between_the_offer_and_the_load() -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids)
        rig.manager.reset()
        _, loaded = rig.load("b", ids)
        assert loaded.tokens == 0
        assert loaded.reason is not None
        assert rig.rank.counters.errors == 0


def test_f051_orders_for_requests_that_nobody_knows() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(16))
        rig.rank.begin(rig.step(ended=["a", "a", "never was"], voided=["a", "never was"]))
        rig.rank.begin(
            rig.step(
                grown=[rig.grown("a", [1], [[0]])],
                loads=[LoadOrder("a", 8, 16)],
                saves=[SaveOrder("a", 0, 16)],
            )
        )
        rig.rank.start_loads()
        rig.rank.start_saves()
        ends = {e.kind: (e.start, e.tokens, e.reason) for e in rig.rank.poll()}
        assert ends == {"load": (8, 8, "unknown"), "save": (0, 0, "unknown")}
        assert rig.rank.counters.errors == 3


@pytest.mark.parametrize("order", [(0, 12), (8, 8), (-8, 8), (0, 80), (4, 8)])
def test_orders_that_make_no_sense_are_refused(order: tuple[int, int]) -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids)
        rig.rank.begin(rig.step(saves=[SaveOrder("a", *order)]))
        rig.rank.start_saves()
        (ended,) = rig.rank.poll()
        assert ended.tokens == order[0]
        assert ended.reason is not None
        assert rig.rank.counters.errors == 1
