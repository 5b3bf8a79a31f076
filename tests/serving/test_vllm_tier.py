"""The tier under vLLM's OffloadingConnector: rows come back as they were, or are misses."""

from __future__ import annotations

import mmap
import sys
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.serving.tier_rig import CHUNKS, ROW, Rig, key, space
from tierkv.blocks import KeyChain, part_id
from tierkv.errors import ConfigError, LayoutError, TierKVError
from tierkv.testing.faults import Corrupting, Failing, Gated, Hanging
from tierkv_adapters.vllm.tier import jobs, side
from tierkv_adapters.vllm.tier.engine import RowsLoaded
from tierkv_adapters.vllm.tier.keys import ROW_TOKENS, KeyMap, row_layout, spell
from tierkv_adapters.vllm.tier.settings import TierSettings

if TYPE_CHECKING:
    from pathlib import Path

MANY = list(range(40))  # more than one wave


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_keys_are_spelled_apart(one: bytes, other: bytes) -> None:
    assert (spell(one) == spell(other)) == (one == other)
    assert len(spell(one)) == ROW_TOKENS


def test_zeros_at_the_end_of_a_key_count() -> None:
    assert len({spell(b"abc" + bytes(zeros)) for zeros in range(5)}) == 5


def test_long_keys_are_spelled_by_their_hash() -> None:
    longs = [bytes([number]) * 61 for number in range(3)] + [bytes(62)]
    assert len({spell(each) for each in longs}) == 4


def test_a_key_is_one_block_under_the_root() -> None:
    chain = KeyChain(space().root(), ROW_TOKENS)
    chain.follow(spell(key(7, group=2)))
    assert KeyMap(space()).part(key(7, group=2)) == part_id(chain.keys[0], 0)
    assert KeyMap(space("other")).part(key(7)) != KeyMap(space()).part(key(7))


@pytest.mark.parametrize("size", [0, 100, 4097])
def test_rows_are_whole_pages(size: int) -> None:
    with pytest.raises(LayoutError, match="rows of"):
        row_layout(size, "x")


@pytest.mark.parametrize("host", [None, "4MiB"])
def test_rows_come_back_to_other_places(tmp_path: Path, host: str | None) -> None:
    with Rig(tmp_path, host=host) as rig:
        assert rig.hits(MANY) == ["miss"] * len(MANY)
        stored = rig.store(MANY)
        assert (stored.success, stored.nbytes) == (True, len(MANY) * ROW)
        assert rig.hits(MANY) == ["hit"] * len(MANY)
        rig.wipe()
        places = [CHUNKS - 1 - number for number in MANY]
        loaded = rig.load(MANY, places)
        assert loaded.success
        assert loaded.keys == tuple(map(key, MANY))
        assert all(rig.holds(place, number) for number, place in zip(MANY, places, strict=True))
        assert not rig.rows[: CHUNKS - len(MANY)].any(), "rows of nobody were written"
        counts = rig.side.counters
        assert (counts.stored_chunks, counts.loaded_chunks) == (len(MANY), len(MANY))
        again = rig.store(MANY)
        assert (again.success, again.nbytes) == (True, 0)
        assert counts.present_chunks == len(MANY)


def test_groups_of_one_hash_are_chunks_of_their_own(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.fill(0, 1)
        rig.side.submit_store(1, [key(1, group=0)], [0])
        rig.results()
        assert rig.side.lookup(key(1, group=0)) == "hit"
        assert rig.side.lookup(key(1, group=1)) == "miss"


def test_another_process_finds_what_was_stored(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.store(MANY)
        rig.settle()
    with Rig(tmp_path, weights="rev2") as rig:
        assert rig.hits(MANY) == ["miss"] * len(MANY), "KV of other weights"
    with Rig(tmp_path) as rig:
        assert rig.hits(MANY) == ["hit"] * len(MANY), "known before the first question"
        assert rig.load(MANY).success
        assert all(rig.holds(number, number) for number in MANY)


def test_damaged_rows_are_misses_and_come_back_when_stored_anew(tmp_path: Path) -> None:
    rot = Corrupting()
    rot.active = False
    with Rig(tmp_path, rot) as rig:
        rig.store([1, 2, 3])
        rig.settle()
        rig.wipe()
        rot.active = True
        result = rig.load([1, 2, 3])
        rot.active = False
        assert not result.success
        assert result.keys == ()
        assert not rig.rows.any(), "nothing unverified is in a row"
        assert rig.side.counters.corrupt_chunks == 3
        assert rig.hits([1, 2, 3]) == ["miss"] * 3
        assert rig.side.counters.blocked_lookups == 3
        assert rig.store([1, 2, 3]).success
        rig.settle()
        assert rig.hits([1, 2, 3]) == ["hit"] * 3, "what failed is not what is there now"
        assert rig.load([1, 2, 3]).success


def test_flipped_bits_on_the_disk_cost_their_own_chunks_alone(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.store([1, 2, 3])
        rig.settle()
        whole = bytes(rig.rows[2])
    for path in (each for each in tmp_path.rglob("*") if each.is_file()):
        raw = bytearray(path.read_bytes())
        at = raw.find(whole)
        if at >= 0:
            raw[at + 100] ^= 1
            path.write_bytes(raw)
            break
    else:
        pytest.fail("the row of chunk 2 is not on the disk as it is")
    with Rig(tmp_path) as rig:
        result = rig.load([1, 2, 3])
        assert (result.success, result.keys) == (False, (key(1), key(3)))
        assert [rig.holds(number, number) for number in (1, 2, 3)] == [True, False, True]
        assert rig.hits([1, 2, 3]) == ["hit", "miss", "hit"]
        assert rig.side.counters.corrupt_chunks == 1


def test_a_tier_that_fails_is_asked_once_not_for_ever(tmp_path: Path) -> None:
    worn = Failing("read")
    worn.active = False
    with Rig(tmp_path, worn, retry_after="60s") as rig:
        rig.store([1, 2])
        rig.settle()
        worn.active = True
        asked = 0
        for _ in range(10):  # vLLM asks in every step, and promotes whatever is a hit
            if rig.hits([1, 2]) == ["hit", "hit"]:
                asked += 1
                assert not rig.load([1, 2]).success
        assert asked == 1
        assert rig.side.counters.failed_chunks == 2
        worn.active = False
        assert rig.store([1, 2]).success
        assert rig.hits([1, 2]) == ["hit", "hit"]
        assert rig.load([1, 2]).success


def test_a_tier_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    stuck = Hanging("read")
    stuck.active = False
    with Rig(tmp_path, stuck, load_deadline="100ms", config={"tier_timeout": 60.0}) as rig:
        rig.store([1, 2])
        rig.settle()
        rig.wipe()
        stuck.active = True
        result = rig.load([1, 2])
        assert (result.success, result.keys) == (False, ())
        assert rig.side.counters.late_chunks == 2
        assert rig.hits([1, 2]) == ["miss", "miss"]
        stuck.active = False
        stuck.release()
        rig.manager.flush()
        assert not rig.rows.any(), "what comes too late goes nowhere"
        rig.clock.ahead += 29
        assert rig.hits([1, 2]) == ["miss", "miss"]
        rig.clock.ahead += 2
        assert rig.hits([1, 2]) == ["hit", "hit"], "it may answer by now"
        assert rig.load([1, 2]).success


def test_a_reset_waits_no_longer_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Hanging("read")
    stuck.active = False
    monkeypatch.setattr(side, "_DRAIN_S", 0.05)
    with Rig(tmp_path, stuck, load_deadline=None, config={"tier_timeout": 60.0}) as rig:
        rig.store([1])
        rig.settle()
        stuck.active = True
        number = rig.begin("load", [1], [5])
        rig.side.drain()
        (result,) = rig.side.finished()
        assert (result.number, result.success, result.keys) == (number, False, ())
        assert not rig.side.busy()
        stuck.active = False
        stuck.release()


@pytest.mark.parametrize("fixed", [False, True])
def test_f006_what_was_stored_before_a_reset_is_not_found_since(
    tmp_path: Path, *, fixed: bool
) -> None:
    """Other weights may be in place, and neither a file nor vLLM's keys tell."""
    settings: dict[str, Any] = {"weights_are_fixed": True} if fixed else {}
    with Rig(tmp_path, **settings) as rig:
        rig.store([1, 2])
        rig.load([1, 2])
        rig.side.drain()
        assert rig.hits([1, 2]) == ["hit" if fixed else "miss"] * 2
        assert rig.load([1]).success == fixed
        rig.clock.ahead += 31
        rig.fill(9, 5)  # what the other weights make of the same tokens
        rig.begin("store", [2], [9])
        assert rig.results()[0].success
        assert rig.load([2], [20]).success
        assert rig.holds(20, 2 if fixed else 5)
        for _ in range(3):
            rig.side.drain()
        assert bool(rig.manager.call(_sessions, rig)) == fixed
        rig.settle()
    with Rig(tmp_path, **settings) as rig:  # with the weights of the files
        assert rig.load([1, 2], [30, 31]).success
        assert rig.holds(30, 1)
        assert rig.holds(31, 2)


async def _sessions(rig: Rig) -> list[object]:
    return list(rig.manager.engine.sessions())


def test_a_copy_that_does_not_end_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "_DRAIN_S", 0.05)
    monkeypatch.setattr(jobs, "_CANCEL_S", 0.05)
    with Rig(tmp_path, load_deadline="50ms") as rig:
        book = rig.side._jobs

        async def stuck(job: object) -> None:
            import asyncio

            while not let:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue

        let: list[bool] = []
        book.begin(1, [key(1)], RowsLoaded(), stuck)
        with pytest.raises(TierKVError, match="has not ended"):
            rig.side.drain()
        let.append(True)
        assert [result.success for result in rig.results()] == [False]


def test_every_job_is_told_once_by_a_drain(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        for number in range(30):
            rig.fill(number, number)
            rig.begin("store", [number], [number])
        rig.side.drain()
        assert sorted(result.number for result in rig.side.finished()) == list(range(1, 31))
        assert rig.side.finished() == []


def test_stores_under_way_leave_half_of_vllms_tier(tmp_path: Path) -> None:
    gate = Gated("write")
    with Rig(tmp_path, gate, config={"tier_timeout": 60.0}) as rig:
        first = rig.begin("store", range(30), range(30))
        shed = rig.begin("store", range(30, 60), range(30, 60))
        told = rig.side.finished()
        assert [(each.number, each.success) for each in told] == [(shed, False)]
        rig.manager.engine.call_soon_threadsafe(gate.open_gate)
        assert [each.number for each in rig.results()] == [first]
        assert rig.side.counters.stores_shed == 1
        assert rig.hits([0, 59]) == ["hit", "miss"]
        assert rig.store(list(range(30, 60))).success, "there is room again"


def test_a_closed_engine_is_a_tier_without_hits(tmp_path: Path) -> None:
    with Rig(tmp_path, load_deadline="50ms") as rig:
        rig.store([1])
        rig.manager.close()
        assert rig.hits([1]) == ["miss"]
        assert not rig.load([1]).success
        assert not rig.store([2]).success
        rig.side.drain()


def test_closing_gives_vllm_its_memory_back(tmp_path: Path) -> None:
    mapped = mmap.mmap(-1, CHUNKS * ROW)
    rig = Rig(tmp_path, host="4MiB", rows=np.frombuffer(mapped, np.int8).reshape(CHUNKS, ROW))
    rig.store(MANY)
    rig.load(MANY)
    rig.side.close()
    rig.side.close()
    del rig.rows, rig.memory
    mapped.close()  # BufferError if anybody still looked at it
    rig.manager.close()


def test_lookups_are_work_in_memory(tmp_path: Path) -> None:
    # pitfall 9 of the interface: a system call per key is paid in every step of every request
    called: set[str] = set()

    def watch(frame: object, event: str, arg: Any) -> None:
        if event == "c_call":
            called.add(str(getattr(arg, "__module__", None)))

    with Rig(tmp_path) as rig:
        rig.store(MANY)
        sys.setprofile(watch)
        try:
            rig.hits(range(200))
        finally:
            sys.setprofile(None)
    assert not called & {"posix", "_io", "io", "select", "_socket", "_thread", "_queue"}


def test_chunks_end_with_their_time(tmp_path: Path) -> None:
    with Rig(tmp_path, ttl="50ms") as rig:
        rig.store([1])
        import time

        ends = time.monotonic() + 60
        while rig.hits([1]) == ["hit"]:
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_disk_is_bounded(tmp_path: Path) -> None:
    # 16 MiB of disk for 2,560 rows of 8 KiB
    with Rig(tmp_path) as rig:
        for first in range(0, 2560, CHUNKS // 2):
            numbers = range(first, first + CHUNKS // 2)
            for row, number in enumerate(numbers):
                rig.fill(row, number)
            rig.begin("store", numbers, range(CHUNKS // 2))
            rig.results()
        rig.settle()
        used = sum(each.stat().st_blocks * 512 for each in tmp_path.rglob("*") if each.is_file())
        assert used <= 16 << 20
        assert 0 < rig.hits(range(2560)).count("hit") < 2560
        assert "hit" in rig.hits(range(2560 - CHUNKS, 2560)), "it goes on taking new ones"


def test_lossy_codecs_are_refused(tmp_path: Path) -> None:
    config = {"compression": "int8"}
    with pytest.raises(ConfigError, match="lossless"):
        Rig(tmp_path, config=config)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"load_dealine": 1}, "did you mean 'load_deadline'"),
        ({"ttl": 0}, "positive"),
        ({"ttl": True}, "a duration"),
        ({"weights": ""}, "not empty"),
        ({"identity": {"kernel": 3}}, "mapping of texts"),
        ({"lora_paths_are_stable": "yes"}, "true or false"),
        ({"locality": "HERE"}, "LOCAL, REMOTE"),
        ({"load_deadline": -1}, "load_deadline"),
    ],
)
def test_settings_are_strict(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TierSettings.parse(values)
