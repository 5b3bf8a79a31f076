"""A manager whose engine is handed over to one in another process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, ConfigError
from tierkv_adapters.remote import RemoteManager, RemoteServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

IDS = kit.tokens(2)
TIERS = [tierkv.Tier("host", "8MiB")]


def _kv(seed: int = 1) -> kit.Memory:
    return kit.Memory(kit.LAYOUTS["full"], 32, seed=seed)


@pytest.fixture
def there(no_thread_leaks: None) -> Iterator[CacheManager]:
    """The manager of the engine that has the KV."""
    with CacheManager(tiers=TIERS, space=kit.space(), name="there") as manager:
        yield manager


@pytest.fixture
def path(there: CacheManager, tmp_path: Path) -> Iterator[str]:
    """Where it is served."""
    with RemoteServer(there, tmp_path / "s" / "e.sock") as server:
        yield server.path


def _facts(manager: CacheManager) -> dict[str, tuple[str, float | None]]:
    return {info.id: (info.tenant, info.ttl) for info in manager.sessions()}


def test_sessions_that_were_known_are_known_there(there: CacheManager, path: str) -> None:
    with CacheManager(tiers=TIERS, name="mine") as mine:
        mine.create_session("a", tenant="acme", ttl="6h", salt=b"grain")
        mine.create_session("../b")
        mine.create_session("dead")
        mine.destroy_session("dead")
        thread = mine._loop._thread
        mine.hand_over(path)
        assert thread is not None
        assert not thread.is_alive(), "its own engine is closed"

        assert _facts(there) == {"a": ("acme", 21600.0), "../b": ("", None)} == _facts(mine)
        with pytest.raises(ConfigError, match="another tenant, ttl, fidelity or salt"):
            there.create_session("a", tenant="acme", ttl="6h", salt=b"other", adopt=True)
        there.create_session("a", tenant="acme", ttl="6h", salt=b"grain", adopt=True)


def test_everything_but_kv_works_on_unchanged(there: CacheManager, path: str) -> None:
    with CacheManager(tiers=TIERS, name="mine") as mine:
        mine.create_session("a")
        mine.hand_over(path)
        there.store(IDS, _kv().view, session="a")

        with mine.use_session("a"):
            assert mine.current_session() == "a"
            assert [r.tier for r in mine.explain(IDS)] == ["host", "host"]
            mine.hint(stop_reason="tool_use")
            mine.prefetch(IDS)
        assert [(i.id, i.tokens) for i in mine.sessions()] == [("a", 32)]
        assert mine.stats().sessions == 1
        assert mine.stats().used == there.stats().used
        assert mine.health() == {"status": "open", "host": "memory"}
        assert mine.flush() == there.flush()
        mine.clear_session("a")
        assert [(i.id, i.tokens) for i in there.sessions()] == [("a", 0)]

        assert mine.create_session("new", tenant="x") == "new"
        assert there.knows_session("new")
        with pytest.raises(ConfigError, match="session 'new' exists"):
            mine.create_session("new", tenant="x")
        made_up = mine.create_session()
        assert there.knows_session(made_up)
        there.create_session("theirs")
        with mine.use_session("theirs"):
            assert mine.current_session() == "theirs"
        with pytest.raises(ConfigError, match="no session 'ghost': create_session"):
            mine.use_session("ghost")
        with pytest.raises(ConfigError, match="no session 'ghost'"):
            mine.clear_session("ghost")
        for name in ("a", "new", made_up):
            mine.destroy_session(name)
        mine.destroy_session("a")
        assert [i.id for i in mine.sessions()] == ["theirs"]
        assert mine.reset() == 2
        assert mine.explain(IDS)[0].reason is MissReason.REMOVED


def test_kv_says_where_it_is(path: str) -> None:
    with CacheManager(tiers=TIERS, name="mine") as mine:
        mine.create_session("a")
        mine.hand_over(path)

        async def work() -> None:
            raise AssertionError("there is no loop for it")

        uses: list[Callable[[], object]] = [
            lambda: mine.engine,
            lambda: mine.load(IDS, _kv().view, session="a"),
            lambda: mine.store(IDS, _kv().view, session="a"),
            lambda: mine.call(work),
            lambda: mine.submit(work),
            lambda: mine.metrics_port,
        ]
        for use in uses:
            with pytest.raises(ClosedError, match=f"behind {path}, in another process: KV is"):
                use()
        assert f"handed over to {path}" in repr(mine)
        with pytest.raises(ClosedError, match="handed over before"):
            mine.hand_over(path)


def test_closing_ends_the_connection_and_not_that_engine(there: CacheManager, path: str) -> None:
    mine = CacheManager(tiers=TIERS, name="mine").open()
    mine.create_session("a")
    mine.hand_over(path)
    mine.close()
    mine.close()
    assert mine.health() == {"status": "closed"}
    with pytest.raises(ClosedError, match="was closed"):
        mine.create_session("b")
    mine.destroy_session("a")  # never raises
    assert there.health()["status"] == "open"
    assert [i.id for i in there.sessions()] == ["a"]


def test_a_manager_that_was_never_opened_needs_no_engine_of_its_own(
    there: CacheManager, path: str
) -> None:
    mine = CacheManager(tiers=TIERS, name="mine")
    mine.create_session("a")
    mine.hand_over(path)
    with mine:
        assert mine._loop._thread is None
        assert [i.id for i in mine.sessions()] == ["a"]
    assert mine.health() == {"status": "closed"}
    assert there.knows_session("a")


def test_nothing_changes_where_no_engine_answers(tmp_path: Path) -> None:
    with CacheManager(tiers=TIERS, space=kit.space(), name="mine") as mine:
        mine.create_session("a")
        mine.store(IDS, _kv().view, session="a")
        with pytest.raises(ClosedError, match="is gone"):
            mine.hand_over(tmp_path / "nobody.sock")
        into = kit.Memory(kit.LAYOUTS["full"], 32)
        assert mine.load(IDS, into.view, session="a").tokens == 32


def test_nothing_changes_where_a_session_of_the_same_name_is_another(
    there: CacheManager, path: str
) -> None:
    there.create_session("b", tenant="other")
    with CacheManager(tiers=TIERS, space=kit.space(), name="mine") as mine:
        for name in "abc":
            mine.create_session(name)
        with RemoteManager(path) as client:
            with pytest.raises(ConfigError, match="'b' exists with another tenant"):
                mine.hand_over(client)
            assert [i.id for i in client.sessions()] == ["b"], "what was moved is taken back"
        assert mine.stats().sessions == 3
        assert mine.engine is not None


def test_one_name_that_is_there_alike_is_shared(there: CacheManager, path: str) -> None:
    there.create_session("a", tenant="x", ttl=60)
    with CacheManager(tiers=TIERS, name="mine") as mine:
        mine.create_session("a", tenant="x", ttl="1m")
        mine.hand_over(path)
        assert [i.id for i in mine.sessions()] == ["a"]


def test_sessions_created_meanwhile_by_other_threads_are_there_too(
    there: CacheManager, path: str
) -> None:
    with CacheManager(tiers=TIERS, name="mine") as mine:
        go = threading.Event()
        made: list[str] = []

        def make(prefix: str) -> None:
            go.wait(60)
            made.extend([mine.create_session(f"{prefix}{number}") for number in range(40)])

        threads = [threading.Thread(target=make, args=(prefix,)) for prefix in "xy"]
        for thread in threads:
            thread.start()
        go.set()
        mine.hand_over(path)
        for thread in threads:
            thread.join(60)
        assert sorted(i.id for i in there.sessions()) == sorted(made)
        assert len(made) == 80


def test_a_session_that_is_created_at_that_very_moment_is_there_too(
    there: CacheManager, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheManager(tiers=TIERS, name="mine") as mine:
        add = mine._names.add

        def late(*args: Any, **options: Any) -> None:
            monkeypatch.undo()
            mine.hand_over(path)
            add(*args, **options)

        monkeypatch.setattr(mine._names, "add", late)
        mine.create_session("a", tenant="t")
        assert [(i.id, i.tenant) for i in there.sessions()] == [("a", "t")]


def test_it_is_refused_on_the_engines_own_loop_and_after_closing(path: str) -> None:
    with CacheManager(tiers=TIERS, name="mine") as mine:

        async def inside() -> None:
            mine.hand_over(path)

        with pytest.raises(tierkv.errors.TierKVError, match="own loop"):
            mine.call(inside)
    with pytest.raises(ClosedError, match="was closed or handed over"):
        mine.hand_over(path)
