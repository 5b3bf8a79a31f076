"""What a manager does for one caller: sessions, KV, and the questions it answers."""

from __future__ import annotations

import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, ConfigError, LayoutError, TierKVError

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.session import LoadResult

HOST = [tierkv.Tier("host", "8MiB")]
IDS = kit.tokens(2)


def _kv(seed: int = 1, length: int = 32) -> kit.Memory:
    return kit.Memory(kit.LAYOUTS["full"], length, seed=seed)


def _load(manager: CacheManager, **where: str) -> tuple[LoadResult, kit.Memory]:
    mine = kit.Memory(kit.LAYOUTS["full"], 32)
    return manager.load(IDS, mine.view, **where), mine  # type: ignore[arg-type]


def test_store_and_load_in_the_current_session(manager: CacheManager) -> None:
    kv = _kv()
    assert manager.create_session("a") == "a"
    with manager.use_session("a"):
        stored = manager.store(IDS, kv.view)
        loaded, mine = _load(manager)

    assert (stored.stored, loaded.tokens, loaded.by_tier) == (2, 32, {"host": 32})
    assert loaded.reason is None
    assert mine.same(kv, 32)
    assert manager.stats().leases == 0


def test_a_load_from_a_block_on(manager: CacheManager) -> None:
    kv, mine = _kv(), kit.Memory(kit.LAYOUTS["full"], 32)
    manager.create_session("a")
    manager.store(IDS, kv.view, session="a")
    loaded = manager.load(IDS, mine.view, start=16, session="a")
    assert (loaded.tokens, loaded.by_tier, loaded.reason) == (32, {"host": 16}, None)
    for index, layer in mine.layers.items():
        for name, tensor in layer.items():
            assert bool((tensor[:, :16] == 77.0).all()), "what is before it is not written"
            assert bool((tensor[:, 16:] == kv.layers[index][name][:, 16:]).all())
    other = manager.load(kit.tokens(2, seed=9), mine.view, start=16, session="a")
    assert (other.tokens, other.reason) == (16, MissReason.NEVER_STORED)
    with pytest.raises(LayoutError, match="start must be"):
        manager.load(IDS, mine.view, start=3, session="a")
    assert manager.stats().leases == 0


def test_a_named_session_needs_no_current_one(manager: CacheManager) -> None:
    manager.create_session("a", tenant="x")
    manager.create_session("b", tenant="y")
    manager.store(IDS, _kv().view, session="a")

    assert _load(manager, session="a")[0].tokens == 32
    loaded, mine = _load(manager, session="b")  # tenants never share
    assert (loaded.tokens, loaded.reason) == (0, MissReason.NEVER_STORED)
    assert mine.untouched()


def test_a_private_tail_can_be_kept(manager: CacheManager) -> None:
    ids, kv = kit.tokens(2.5), _kv(length=40)
    manager.create_session("a")
    manager.store(ids, kv.view, session="a", tail=True)
    mine = kit.Memory(kit.LAYOUTS["full"], 40)

    assert manager.load(ids, mine.view, session="a").tokens == 40
    assert mine.same(kv, 40)
    manager.clear_session("a")
    assert manager.load(ids, mine.view, session="a").tokens == 32  # the tail was private


def test_names_are_made_up_and_unique(manager: CacheManager) -> None:
    one, two = manager.create_session(), manager.create_session()
    assert one != two
    with pytest.raises(ConfigError, match=f"session '{one}' exists"):
        manager.create_session(one)
    assert {i.id for i in manager.sessions()} == {one, two}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"name": ""}, "non-empty string"),
        ({"name": 7}, "non-empty string"),
        ({"name": "a", "fidelity": "roughly"}, "'exact' or 'lossy'"),
        ({"name": "a", "ttl": "soon"}, "soon"),
        ({"name": "a", "tenant": None}, "tenant is a text"),
        ({"name": "a", "tenant": 5}, "tenant is a text"),
        ({"name": "a", "salt": "grain"}, "salt is bytes"),
    ],
)
def test_arguments_of_a_session_are_checked_at_once(
    manager: CacheManager, arguments: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        manager.create_session(**arguments)  # type: ignore[arg-type]
    assert manager.sessions() == []


def test_unknown_and_missing_sessions_are_typed_errors(manager: CacheManager) -> None:
    with pytest.raises(ConfigError, match="no session 'ghost': create_session"):
        manager.use_session("ghost")
    with pytest.raises(ConfigError, match="no session 'ghost'"):
        manager.clear_session("ghost")
    with pytest.raises(ConfigError, match="no session 'ghost'"):
        _load(manager, session="ghost")
    with pytest.raises(ConfigError, match="no session is current"):
        _load(manager)
    manager.create_session("a")
    with manager.use_session("a"):
        manager.destroy_session("a")
        with pytest.raises(ConfigError, match="no session 'a'"):
            _load(manager)


def test_errors_of_the_engine_reach_the_caller(manager: CacheManager) -> None:
    manager.create_session("a")
    with pytest.raises(LayoutError):
        manager.store(IDS, _kv(length=20).view, session="a")
    with pytest.raises(LayoutError):
        manager.store(IDS, _kv().view, 99, session="a")
    assert manager.store(IDS, _kv().view, session="a").stored == 2


def test_spaces_none_one_several(no_thread_leaks: None) -> None:
    first, second = kit.space(), kit.space(model="other")
    with CacheManager(tiers=HOST) as manager:
        manager.create_session("a")
        with pytest.raises(ConfigError, match="no space is bound to this manager: attach a model"):
            _load(manager, session="a")
        with pytest.raises(ConfigError, match="no space is bound"):
            manager.explain(IDS)
        manager.bind(first)
        manager.bind(kit.space())  # an equal one is the same
        assert manager.store(IDS, _kv().view, session="a").stored == 2
        manager.bind(second)
        with pytest.raises(ConfigError, match="2 spaces are bound"):
            _load(manager, session="a")
        mine = kit.Memory(kit.LAYOUTS["full"], 32)
        assert manager.load(IDS, mine.view, session="a", space=first).tokens == 32
        assert manager.load(IDS, mine.view, session="a", space=second).tokens == 0


def test_a_session_in_two_spaces_is_one_session(no_thread_leaks: None) -> None:
    first, second = kit.space(), kit.space(model="other")
    with CacheManager(tiers=HOST, space=first) as manager:
        manager.create_session("a")
        manager.store(IDS, _kv().view, session="a")
        once = manager.sessions()[0].nbytes
        # a space that is only named, never bound, is found again when the session goes
        manager.store(IDS[:16], _kv().view, session="a", space=second)
        (info,) = manager.sessions()
        assert (info.tokens, info.blocks, info.nbytes) == (32, 2, once + once // 2)
        assert manager.stats().sessions == 1
        manager.destroy_session("a")
        assert manager.sessions() == []
        assert manager.engine.sessions() == []


def test_clear_drops_the_history_and_keeps_the_name(manager: CacheManager) -> None:
    manager.create_session("a", ttl="6h")
    assert manager.sessions()[0].ttl == 6 * 3600  # told before it is first used
    manager.clear_session("a")  # nothing to clear yet
    manager.store(IDS, _kv().view, session="a")
    assert manager.sessions()[0].tokens == 32
    manager.clear_session("a")

    (info,) = manager.sessions()
    assert (info.id, info.tokens, info.nbytes, info.handles) == ("a", 0, 0, 0)
    assert _load(manager, session="a")[0].tokens == 32  # shared blocks stay until evicted


def test_a_session_of_the_same_name_starts_afresh(manager: CacheManager) -> None:
    manager.create_session("a", salt=b"one")
    manager.store(IDS, _kv().view, session="a")
    manager.destroy_session("a")
    manager.create_session("a", salt=b"two")

    assert manager.sessions()[0].tokens == 0
    assert _load(manager, session="a")[0].tokens == 0  # another secret shares nothing


def test_a_hint_is_about_the_named_or_the_current_session(manager: CacheManager) -> None:
    def learned() -> dict[str, int]:
        return {found.name: found.returns for found in manager.stats().hints}

    manager.create_session("a")
    manager.store(IDS, _kv().view, session="a")
    manager.hint(stop_reason="tool_use", session="a")
    assert learned() == {"stop:tool_use": 0}
    _load(manager, session="a")
    assert learned() == {"stop:tool_use": 1}

    with manager.use_session("a"):
        manager.hint(next_in="2s")
    assert learned() == {"stop:tool_use": 1, "in:2": 0}
    with pytest.raises(ConfigError, match="stop_reason, or next_in"):
        manager.hint(session="a")
    with pytest.raises(ConfigError, match="no session is current"):
        manager.hint(next_in=1)


def test_explain_sees_what_the_session_sees(manager: CacheManager) -> None:
    manager.create_session("open")
    manager.create_session("salted", salt=b"s", tenant="x")
    manager.store(IDS, _kv().view, session="salted")

    def tiers(session: str | None = None) -> list[str | None]:
        return [b.tier for b in manager.explain(IDS, session=session)]

    assert tiers("salted") == ["host", "host"]
    assert tiers("open") == tiers() == [None, None]
    with manager.use_session("salted"):
        reports = manager.explain([*IDS, 5])
    assert [str(r) for r in reports] == [
        "block 0: host, raw",
        "block 1: host, raw",
        "block 2: never_stored",
    ]
    assert (reports[1].start_token, reports[1].end_token) == (16, 32)


def test_flush_reset_stats_and_health(tmp_path: Path, no_thread_leaks: None) -> None:
    tiers = kit.tiers("host+nvme", tmp_path)
    manager = CacheManager(tiers=tiers, space=kit.space(), name="ops")
    assert manager.health() == {"status": "closed"}
    with manager:
        manager.create_session("a")
        manager.store(IDS, _kv().view, session="a")
        flushed = manager.flush()
        assert flushed.durable == 2
        health = manager.health()
        assert health["status"] == "open"
        assert set(health) == {"status", "host", "nvme"}
        stats = manager.stats()
        assert (stats.sessions, stats.leases, stats.queued_bytes) == (1, 0, 0)
        assert stats.tiers["host"].entries == stats.tiers["nvme"].entries == 2
        assert manager.reset() == 4  # two parts in two tiers
        assert manager.stats().used == {"host": 0, "nvme": 0}
        assert [(i.id, i.tokens) for i in manager.sessions()] == [("a", 0)]
        assert "ops: open, 1 sessions" in repr(manager)
    assert manager.health() == {"status": "closed"}
    assert "ops: closed" in repr(manager)


def test_any_free_port_for_metrics(no_thread_leaks: None) -> None:
    with CacheManager(tiers=HOST) as manager:
        assert manager.metrics_port is None
    with CacheManager(tiers=HOST, metrics_port=0) as manager:
        port = manager.metrics_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            assert b"tierkv_build_info{" in reply.read()
    with pytest.raises(ClosedError):
        assert manager.metrics_port


def test_lossy_compression_in_code_makes_sessions_lossy(no_thread_leaks: None) -> None:
    kv = _kv()
    lossy = CacheManager(
        tiers=HOST, space=kit.space(), compression=tierkv.CompressionPolicy("int8")
    )
    with lossy as manager:
        manager.create_session("a")
        manager.store(IDS, kv.view, session="a")
        loaded, mine = _load(manager, session="a")
        assert loaded.tokens == 32
        assert not mine.same(kv, 32)  # int8 it was
        assert {b.chain for b in manager.explain(IDS)} == {"int8"}
        manager.create_session("strict", fidelity="exact")
        assert _load(manager, session="strict")[0].reason is MissReason.FIDELITY

    lossless = CacheManager(tiers=HOST, space=kit.space(), compression="zstd")
    with lossless as manager:
        manager.create_session("a")
        manager.store(IDS, kv.view, session="a")
        loaded, mine = _load(manager, session="a")
        assert loaded.tokens == 32
        assert mine.same(kv, 32)
        assert manager.call(_is_lossy, manager) is False


async def _is_lossy(manager: CacheManager) -> bool:
    return manager.handle("a").lossy


def test_settings_are_strict(no_thread_leaks: None) -> None:
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        CacheManager(tiers=HOST, polcy="lru")
    with pytest.raises(ConfigError, match="no tier 'hots'; did you mean 'host'"):
        CacheManager(tiers=HOST, compression=tierkv.CompressionPolicy("int8", tier="hots"))


def test_managers_are_isolated(no_thread_leaks: None) -> None:
    one = CacheManager(name="one", tiers=HOST, space=kit.space(), policy="lru")
    two = CacheManager(name="two", tiers=HOST, space=kit.space(), compression="int8")
    with one, two:
        one.create_session("a")
        two.create_session("a")
        before = two.stats().counters()
        with one.use_session("a"):
            assert two.current_session() is None
            one.store(IDS, _kv().view)
            with two.use_session("a"):
                assert (one.current_session(), two.current_session()) == ("a", "a")
                assert _load(two)[0].tokens == 0
        assert two.stats().counters() == before
        one.destroy_session("a")
        assert [i.id for i in two.sessions()] == ["a"]
    one, two = (CacheManager(tiers=HOST, space=kit.space()) for _ in range(2))
    with one:
        pass
    with two:  # closing one leaves the other alone
        assert two.health()["status"] == "open"


def test_handles_and_calls_know_their_thread(manager: CacheManager) -> None:
    manager.create_session("a")
    with pytest.raises(TierKVError, match="belong to the engine's loop"):
        manager.handle("a")

    async def inside() -> str:
        with pytest.raises(TierKVError, match="on that loop"):
            manager.sessions()
        with pytest.raises(TierKVError, match="on that loop"):
            manager.close()
        assert threading.current_thread() is not threading.main_thread()
        return manager.handle().id

    with manager.use_session("a"):  # the caller's context goes along
        assert manager.call(inside) == "a"


def test_before_and_after_its_with_a_manager_says_so(no_thread_leaks: None) -> None:
    manager = CacheManager(tiers=HOST, space=kit.space())
    manager.create_session("early")
    for _ in range(2):
        for act in (manager.stats, manager.sessions, manager.flush, manager.reset):
            with pytest.raises(ClosedError, match="not open: use it inside its 'with'"):
                act()
        with pytest.raises(ClosedError):
            _load(manager, session="early")
        assert manager.health() == {"status": "closed"}
        manager.close()
    fresh = CacheManager(tiers=HOST, space=kit.space())
    fresh.create_session("early")
    with fresh:
        assert [i.id for i in fresh.sessions()] == ["early"]
    with pytest.raises(ClosedError, match="opened once"):
        fresh.open()
