"""Parts of the connector's scheduler side: pace of prefill, fingerprints, events, links."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.serving.contract_rig import Rig, tokens
from tierkv.blocks import AdapterId, BlockKey, part_id
from tierkv.errors import AttachError, ClosedError
from tierkv.testing.serving import Feature, Lora, Mode, Place, Prompt
from tierkv_adapters.vllm.events import Removed, Stored
from tierkv_adapters.vllm.scheduling.announcing import announcer_of
from tierkv_adapters.vllm.scheduling.asking import media_mark, media_of
from tierkv_adapters.vllm.scheduling.fingerprints import Fingerprints
from tierkv_adapters.vllm.scheduling.links import RankLink
from tierkv_adapters.vllm.scheduling.pacing import Pacing

if TYPE_CHECKING:
    from collections.abc import Callable

GUARD = 60.0


class Asks(NamedTuple):
    """A request, as far as its adapter is concerned."""

    request_id: str
    lora_request: Lora | None


def _until(there: Callable[[], bool]) -> bool:
    end = time.monotonic() + GUARD
    while not there() and time.monotonic() < end:
        time.sleep(0.001)
    return there()


# ---------------------------------------------------------------------- pace


def test_a_step_of_prefill_tells_its_pace() -> None:
    pacing = Pacing()
    assert pacing.step(512, 520, 10.0) is None
    pacing.done(10.5)
    assert pacing.step(0, 8, 11.0) == (512, 0.5)
    pacing.done(11.1)
    assert pacing.step(512, 512, 90.0) is None  # told once; the time without work is in none
    pacing.done(91.0)
    assert pacing.step(0, 0, 92.0) == (512, 1.0)


@pytest.mark.parametrize(("prefill", "total"), [(255, 255), (300, 500), (0, 8)])
def test_small_or_mixed_steps_tell_nothing(prefill: int, total: int) -> None:
    pacing = Pacing()
    pacing.step(prefill, total, 0.0)
    pacing.done(1.0)
    assert pacing.step(0, 0, 2.0) is None


def test_overlapping_steps_last_from_the_end_of_the_one_before() -> None:
    pacing = Pacing(depth=2)
    pacing.step(0, 8, 0.0)
    pacing.step(512, 512, 0.1)  # handed out while the first is computed
    pacing.done(1.0)
    assert pacing.step(0, 8, 1.1) is None
    pacing.done(4.0)
    assert pacing.step(0, 8, 4.1) == (512, 3.0)


def test_ends_that_nobody_told_of_are_caught_up_with() -> None:
    pacing = Pacing()
    pacing.step(512, 512, 0.0)
    pacing.step(300, 300, 5.0)
    pacing.done(6.0)
    assert pacing.step(0, 0, 7.0) == (300, 1.0)


def test_the_pace_reaches_the_ranks() -> None:
    with Rig(Mode(chunk=512, pages=512)) as rig:
        rig.replay.add("first", Prompt(tokens(400)))
        rank, begin = rig.ranks[0], rig.ranks[0].handle_preemptions

        def slow(orders: Any) -> None:
            rig.clock.now += 2.0  # so long does each step take
            begin(orders)

        rank.handle_preemptions = slow
        rig.replay.drain()
        told = [orders.prefill for orders in rig.ranks[0].orders if orders.prefill is not None]
        assert told == [(400, 2.0)]


def test_hooks_of_the_scheduler_do_no_input_or_output() -> None:
    """Not for one key, and not for any: neither files, sockets, locks nor waits."""
    with Rig(Mode(chunk=512, pages=512)) as rig:
        first = Prompt(tokens(400))
        rig.replay.run(("first", first))
        rig.replay.reset(connector=False)
        rig.replay.add("second", first)
        request, called = rig.replay.scheduler.requests["second"], set[str]()

        def profile(frame: object, event: str, arg: Any) -> None:
            if event == "c_call":
                called.add(str(getattr(arg, "__module__", None)))

        sys.setprofile(profile)
        try:
            offer = rig.side.get_num_new_matched_tokens(request, 0)
            again = rig.side.get_num_new_matched_tokens(request, 0)
        finally:
            sys.setprofile(None)
        assert offer == again == (400, True)
        assert called.isdisjoint({"posix", "_io", "io", "_socket", "select", "time", "_thread"})
        assert called  # it was watched


# ---------------------------------------------------------------------- fingerprints


def test_fingerprints_answer_at_once_and_learn_meanwhile() -> None:
    gate, main = threading.Event(), threading.get_ident()
    seen: list[int] = []

    def digest(lora: Any) -> AdapterId:
        seen.append(threading.get_ident())
        assert gate.wait(GUARD)
        return AdapterId(lora.lora_name, "v")

    prints, lora = Fingerprints(digest), Lora("one")
    try:
        prints.ask(lora)
        prints.ask(lora)  # asked once
        assert prints.known(lora) is None
        gate.set()
        assert _until(lambda: prints.known(lora) == AdapterId("one", "v"))
        assert len(seen) == 1
        assert seen[0] != main
    finally:
        prints.close()


def test_f006_an_adapter_that_changed_while_it_is_loaded_is_cached_no_more() -> None:
    """The engine has the old bytes, or has read the new ones by now: nothing tells which."""
    version = ["1"]
    prints, lora = Fingerprints(lambda one: AdapterId(one.lora_name, version[0])), Lora("one")
    try:
        prints.ask(lora)
        assert _until(lambda: prints.known(lora) == AdapterId("one", "1"))
        version[0] = "2"

        def asked_again() -> bool:
            prints.ask(lora)
            return prints.known(lora) is None

        assert _until(asked_again)
        version[0] = "1"  # what was computed meanwhile may be of the others
        prints.ask(lora)
        assert _until(lambda: not prints._asked)
        assert prints.known(lora) is None
        assert not prints.waits(Asks("r1", lora), 0.0)
        version[0] = "2"
        prints.ask(Lora("one", load_inplace=True))
        assert _until(lambda: prints.known(lora) == AdapterId("one", "2"))
        prints.ask(Lora("one", 2))  # another number is another load
        assert _until(lambda: prints.known(Lora("one", 2)) is not None)
    finally:
        prints.close()


def test_f006_requests_under_way_end_their_saves_when_their_adapter_is_another() -> None:
    version, gate = ["1"], threading.Event()

    def digest(lora: Any) -> AdapterId:
        assert gate.wait(GUARD)
        return AdapterId(lora.lora_name, version[0])

    prints, lora = Fingerprints(digest, patience=2.0), Lora("one")
    runs = Asks("r1", lora)
    try:
        prints.ask(lora)
        assert prints.waits(runs, 10.0)
        assert prints.waits(runs, 11.9)
        assert not prints.waits(runs, 12.0), "it waits for a while, not for ever"
        gate.set()
        assert _until(lambda: prints.known(lora) is not None)
        prints.take(runs, prints.known(lora))
        assert prints.fits(runs)
        assert prints.fits(Asks("plain", None))
        gate.clear()
        prints.ask(Lora("one", load_inplace=True))
        assert not prints.fits(runs)
        gate.set()  # the same bytes
        assert _until(lambda: prints.fits(runs))
        for version[0] in "21":
            prints.ask(Lora("one", load_inplace=True))
            assert _until(lambda: prints.known(lora) == AdapterId("one", version[0]))
            assert not prints.fits(runs), "some of it was computed with the others"
        prints.over("r1")
        assert not prints._taken
        assert not prints._since
    finally:
        prints.close()


def test_f006_what_was_read_before_a_load_in_place_does_not_count() -> None:
    gate, reading, version = threading.Event(), threading.Event(), ["1", "2"]

    def digest(lora: Any) -> AdapterId:
        found = AdapterId(lora.lora_name, version.pop(0))
        reading.set()
        assert gate.wait(GUARD)
        return found

    prints, lora = Fingerprints(digest), Lora("one")
    try:
        prints.ask(lora)
        assert reading.wait(GUARD)
        prints.ask(Lora("one", load_inplace=True))
        gate.set()
        assert _until(lambda: prints.known(lora) is not None)
        assert prints.known(lora) == AdapterId("one", "2")
    finally:
        prints.close()


def test_an_adapter_whose_files_cannot_be_read_stays_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def digest(lora: Any) -> AdapterId:
        if lora.lora_name == "bad":
            raise AttachError("no such folder")
        if lora.lora_name == "worse":
            raise RuntimeError("symlink loop")  # of no kind that was foreseen
        return AdapterId(lora.lora_name, "v")

    prints = Fingerprints(digest)
    try:
        prints.ask(Lora("bad"))
        prints.ask(Lora("worse", 3))
        prints.ask(Lora("good", 2))
        assert _until(lambda: prints.known(Lora("good", 2)) is not None)
        assert prints.known(Lora("bad")) is None
        assert prints.known(Lora("worse", 3)) is None
        assert "no such folder" in caplog.text
        assert "symlink loop" in caplog.text
    finally:
        prints.close()


def test_media_that_are_only_numbered_are_no_other_process_s() -> None:
    """Without any cache of its own, vLLM names the first image of every process alike."""

    def config(prefixes: bool, cache: float, images: bool = True) -> Any:
        media = SimpleNamespace(mm_processor_cache_gb=cache) if images else None
        return SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=media),
            cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        )

    assert media_mark(config(True, 0)) == b""
    assert media_mark(config(False, 4)) == b""
    assert media_mark(config(False, 0, images=False)) == b""
    assert media_mark(SimpleNamespace()) == b""
    first = [Feature("renderer0-mm-1-image-0", Place(3, 2))]
    before, after = (media_of(first, media_mark(config(False, 0))) for _ in range(2))
    assert before is not None
    assert after is not None
    assert before[0].digest != after[0].digest


def test_media_are_named_by_content() -> None:
    cat, dog = (media_of([Feature(name, Place(3, 2))]) for name in ("cat", "dog"))
    assert cat is not None
    assert dog is not None
    assert cat[0].position == 3
    assert cat[0].digest != dog[0].digest
    assert (
        len({m[0].digest for n in range(1000) if (m := media_of([Feature(str(n), Place(0, 1))]))})
        == 1000
    )
    assert media_of([]) == media_of(None) == ()
    assert media_of([SimpleNamespace(identifier=None, mm_position=Place(0, 1))]) is None
    assert media_of([SimpleNamespace(identifier="x", mm_position=None)]) is None


# ---------------------------------------------------------------------- events


def test_events_name_blocks_by_vllm_s_hashes() -> None:
    config = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        cache_config=SimpleNamespace(block_size=4),
    )
    announcer = announcer_of(config, 1, ["host", "nvme"])
    assert announcer is not None
    index = announcer.index(2)
    keys = [BlockKey(bytes([n]) * 32) for n in range(2)]
    request = SimpleNamespace(
        block_hashes=[b"h%d" % n for n in range(6)], all_token_ids=list(range(24))
    )
    announcer.saved(request, keys, 8, 24)
    index.apply(1, [(part_id(keys[0], 0), 1)])  # rank 0 stands for all
    assert announcer.take() == []
    index.apply(0, [(part_id(keys[0], 0), 1), (part_id(keys[0], 0), 3)])
    index.apply(0, [(part_id(keys[0], 0), 2)])
    first = (b"h2", b"h3")
    assert announcer.take() == [
        Stored(first, b"h1", tuple(range(8, 16)), 4, "CPU", 0, None),
        Stored(first, b"h1", tuple(range(8, 16)), 4, "STORAGE", 0, None),
        Removed(first, "CPU", 0),
    ]
    assert index.tiers(0, part_id(keys[0], 0)) == 2


def test_no_events_where_vllm_publishes_none() -> None:
    assert announcer_of(SimpleNamespace(), 1, []) is None
    off = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
    assert announcer_of(off, 1, []) is None


# ---------------------------------------------------------------------- the line to a rank


def test_a_rank_that_cannot_be_reset_says_so(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    def fail() -> int:
        raise ClosedError("gone")

    feed = SimpleNamespace(close=lambda: closed.append("feed"))
    broken = SimpleNamespace(reset=fail, close=lambda: closed.append("engine"))
    assert not RankLink(3, feed, broken, owned=True).reset()
    assert "rank 3 was not reset: gone" in caplog.text
    RankLink(3, feed, broken, owned=True).close()
    RankLink(3, feed, broken, owned=False).close()
    assert closed == ["feed", "engine", "feed"]
