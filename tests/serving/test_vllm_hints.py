"""Hints, from a request to what a rank keeps in memory; and what came of a request's prompt."""

from __future__ import annotations

import itertools
import time
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.errors import ConfigError
from tierkv_adapters.serving.counters import RankCounters
from tierkv_adapters.serving.hinted import HintSide
from tierkv_adapters.serving.orders import HintOrder, RequestFacts
from tierkv_adapters.vllm.scheduling.accounts import Account
from tierkv_adapters.vllm.scheduling.asking import Asked
from tierkv_adapters.vllm.scheduling.hints import Hinted, Hinting, Prefetch, parse_prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

GUARD = 60.0
IDS = kit.tokens(4)


def action(kind: str, payload: object, version: str = "1") -> Any:
    """vLLM's ``KvHintAction``."""
    return SimpleNamespace(action_type=kind, action_version=version, payload=payload)


def request(*actions: Any) -> Any:
    return SimpleNamespace(kv_hints=SimpleNamespace(actions=list(actions)))


# ---------------------------------------------------------------------- reading


def test_both_channels_say_the_same() -> None:
    hinting = Hinting()
    asked = Asked.parse({"tierkv": {"pin": "10m", "ttl": "6h", "prefetch": {"session": "chat-42"}}})
    own = hinting.read(SimpleNamespace(), asked.pin, asked.prefetch)
    envelope = hinting.read(
        request(
            action("pin", {"ttl": "10m"}),
            action("ttl", {"ttl": 21600}, "1.2"),
            action("prefetch", {"session": "chat-42"}),
        ),
        None,
        None,
    )
    wanted = (Prefetch(session="chat-42"),)
    assert own == Hinted(600.0, None, wanted)
    assert envelope == Hinted(600.0, 21600.0, wanted)
    assert asked.ttl == 21600.0
    assert (hinting.unknown, hinting.unreadable) == (0, 0)
    assert hinting.read(SimpleNamespace(kv_hints=None), None, None) is None


def test_unknown_actions_are_counted_and_ignored() -> None:
    hinting = Hinting()
    hinted = hinting.read(
        request(
            action("evict", {}),
            action("pin", {"ttl": "1m"}, "2"),
            SimpleNamespace(),
            action("pin", {"ttl": "1m"}),
        ),
        None,
        None,
    )
    assert hinted == Hinted(60.0)
    assert (hinting.unknown, hinting.unreadable) == (3, 0)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("pin", {}),
        ("pin", None),
        ("pin", {"ttl": -1}),
        ("ttl", {"ttl": True}),
        ("ttl", {"ttl": "soon"}),
        ("prefetch", {"session": ""}),
        ("prefetch", {"token_ids": [-1]}),
        ("prefetch", {"token_ids": ["a"]}),
        ("prefetch", {"token_ids": "abc"}),
        ("prefetch", {"session": "a", "token_ids": [1]}),
    ],
)
def test_what_makes_no_sense_is_counted_and_ignored(kind: str, payload: object) -> None:
    hinting = Hinting()
    assert hinting.read(request(action(kind, payload)), None, None) is None
    assert (hinting.unknown, hinting.unreadable) == (0, 1)


@pytest.mark.parametrize(
    "values",
    [{"pin": 0}, {"pin": "x"}, {"prefetch": []}, {"report": 1}, {"salt": "xyz"}, {"salt": 5}],
)
def test_malformed_wishes_are_refused_without_their_secrets(values: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError) as told:
        Asked.parse({"tierkv": values})
    assert "xyz" not in str(told.value)


def test_orders_are_given_once() -> None:
    hinting, facts = Hinting(), RequestFacts("r", tenant="acme")
    hinted = Hinted(5.0, None, (parse_prefetch({"token_ids": [1, 2]}),))
    hinting.came(hinted, facts, [7, 8, 9])
    prefetch, pin = hinting.take()
    assert prefetch == HintOrder(facts, "prefetch", array("I", [1, 2]))
    assert pin == HintOrder(facts, "pin", array("I", [7, 8, 9]), seconds=5.0)
    assert hinting.take() == []


# ---------------------------------------------------------------------- following


@pytest.fixture
def tiered(tmp_path: Any, no_thread_leaks: None) -> Iterator[CacheManager]:
    """A host tier for eight blocks or so, and a disk behind it."""
    tiers = [tierkv.Tier("host", "256KiB"), tierkv.Tier("nvme", "64MiB", path=str(tmp_path / "n"))]
    with CacheManager(tiers=tiers, space=kit.space(), metrics=False, policy="lru") as manager:
        manager.create_session("a", tenant="acme")
        yield manager


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def store(manager: CacheManager, ids: list[int]) -> None:
    memory = kit.Memory(kit.LAYOUTS["full"], len(ids), seed=1)
    manager.store(ids, memory.view, session="a")
    manager.flush()


def pin(seconds: float = 3600.0, name: str = "r", ids: list[int] | None = None) -> HintOrder:
    facts = RequestFacts(name, tenant="acme")
    return HintOrder(facts, "pin", array("I", IDS if ids is None else ids), seconds=seconds)


def told(manager: CacheManager, hints: HintSide, name: str) -> None:
    """All of the request is stored, says the engine's loop."""

    async def stored() -> None:
        hints.stored(name, array("I", IDS), len(IDS))

    manager.call(stored)


def side(manager: CacheManager) -> tuple[HintSide, RankCounters]:
    counters = RankCounters()
    return HintSide(manager, "exact", counters), counters


def test_a_pin_holds_what_is_stored_and_what_is_stored_later(tiered: CacheManager) -> None:
    hints, counters = side(tiered)
    store(tiered, IDS[:32])
    hints.take(pin(), lambda _: kit.space())
    until(lambda: counters.hints == 1)
    assert hints._pins["r"].blocks == 2
    assert tiered.stats().leases > 0
    store(tiered, IDS)
    told(tiered, hints, "nobody")
    told(tiered, hints, "r")
    until(lambda: hints._pins["r"].blocks == 4)
    hints.take(pin(0.05), lambda _: kit.space())  # the last word of a request counts
    until(lambda: counters.hints == 2)
    until(lambda: tiered.stats().leases == 0)
    assert counters.hints_refused == 0


def test_pins_leave_room_for_others(tiered: CacheManager) -> None:
    hints, counters = side(tiered)
    block = kit.space().layout.raw_bytes(kit.space().block_tokens)
    most = (256 << 10) // 2 // block
    ids = kit.tokens(most + 8)
    store(tiered, ids)
    hints.take(pin(ids=ids), lambda _: kit.space())
    until(lambda: counters.hints + counters.hints_refused == 1)
    assert counters.hints_refused == 1, "not all of it has room"
    assert 0 < tiered.stats().leases <= most * len(kit.space().layout.groups)
    hints.take(pin(name="second", ids=ids), lambda _: kit.space())
    until(lambda: counters.hints_refused == 2)


def test_a_pin_without_memory_to_hold_it_is_refused(tmp_path: Any) -> None:
    tiers = [tierkv.Tier("nvme", "64MiB", path=str(tmp_path / "n"))]
    with CacheManager(tiers=tiers, space=kit.space(), metrics=False) as manager:
        hints, counters = side(manager)
        hints.take(pin(), lambda _: kit.space())
        until(lambda: counters.hints_refused == 1)
        assert counters.hints == 0


def test_a_prefetch_brings_a_session_or_a_prompt_of_the_same_tenant(tiered: CacheManager) -> None:
    hints, counters = side(tiered)
    store(tiered, IDS)

    def in_host() -> int:
        return sum(report.tier == "host" for report in tiered.explain(IDS, session="a"))

    seeds = itertools.count(100)

    def push_out() -> None:
        for _ in range(3):
            store(tiered, kit.tokens(40, seed=next(seeds)))

    for order in (
        HintOrder(RequestFacts("r", tenant="acme"), "prefetch", array("I", IDS)),
        HintOrder(RequestFacts("r", tenant="acme"), "prefetch", None, "kept"),
    ):
        tiered.create_session("kept", tenant="acme", adopt=True)
        memory = kit.Memory(kit.LAYOUTS["full"], len(IDS), seed=1)
        tiered.store(IDS, memory.view, session="kept")
        tiered.flush()
        push_out()
        assert in_host() < 4
        foreign = order._replace(facts=RequestFacts("r", tenant="other"))
        before = counters.hints
        hints.take(foreign, lambda _: kit.space())
        until(lambda before=before: counters.hints == before + 1)  # type: ignore[misc]
        assert in_host() < 4, "another tenant's hint moved it"
        hints.take(order, lambda _: kit.space())
        until(lambda: in_host() == 4)


def test_pins_end_with_the_engine(tmp_path: Any) -> None:
    with CacheManager(tiers=[tierkv.Tier("host", "1MiB")], space=kit.space()) as manager:
        manager.create_session("a", tenant="acme")
        hints, counters = side(manager)
        store(manager, IDS)
        hints.take(pin(), lambda _: kit.space())
        until(lambda: counters.hints == 1)
        assert manager.stats().leases > 0
    assert manager.health() == {"status": "closed"}


# ---------------------------------------------------------------------- accounts


def test_an_account_tells_what_really_came() -> None:
    new, preempted = SimpleNamespace(num_preemptions=0), SimpleNamespace(num_preemptions=1)
    account = Account()
    account.asked(new, 128)
    account.accepted(new, 256, 0b10)
    assert account.told(("host", "nvme")) == {"own": 128, "loaded": 256, "tier": "nvme"}
    account.asked(preempted, 0)
    account.accepted(preempted, 64, 0b1)
    account.short(256)
    account.short(0)  # of a load behind the first admission
    assert account.told(("host", "nvme")) == {"own": 128, "loaded": 128, "tier": "nvme"}
    anew = Account()
    anew.asked(new, 128)
    anew.accepted(new, 256, 0b1)
    anew.short(0)
    assert anew.told(("host",)) == {"own": 0, "loaded": 0, "tier": None}
    assert Account().told(()) == {"own": 0, "loaded": 0, "tier": None}


@pytest.mark.parametrize(
    "value",
    [
        {"token_ids": [73119, "x"]},
        {"token_ids": [73119], "session": "chat"},
        {"token_ids": [-73119]},
        [73119],
        "73119",
    ],
)
def test_a_prefetch_that_makes_no_sense_is_told_without_its_tokens(value: object) -> None:
    with pytest.raises(ConfigError, match="what to prefetch is") as caught:
        parse_prefetch(value)
    assert "73119" not in str(caught.value), "this line goes to the log"
