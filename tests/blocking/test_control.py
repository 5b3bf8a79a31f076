"""Questions to a manager about the whole, from any thread and on the engine's own loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GUARD = 60.0
IDS = kit.tokens(3)


def _kv() -> kit.Memory:
    return kit.Memory(kit.LAYOUTS["full"], 48, seed=1)


def _tiers_of(manager: CacheManager, session: str) -> list[str | None]:
    return [report.tier for report in manager.explain(IDS, session=session)]


@pytest.mark.parametrize("with_tokens", [True, False])
def test_a_prefetch_brings_a_prefix_into_the_fastest_tier(
    tmp_path: Path, with_tokens: bool, no_thread_leaks: None
) -> None:
    tiers = [tierkv.Tier("host", "8MiB"), *kit.tiers("nvme", tmp_path)]
    with CacheManager(tiers=tiers, space=kit.space(), metrics=False) as manager:
        manager.create_session("a", tenant="t", salt=b"grain")
        manager.store(IDS, _kv().view, session="a")
        manager.flush()

        async def empty_the_ram() -> None:
            manager.engine.resize("host", 0)
            manager.engine.resize("host", "8MiB")

        manager.call(empty_the_ram)
        assert _tiers_of(manager, "a") == ["nvme"] * 3
        manager.prefetch(IDS)  # of another tenant: brings nothing
        with manager.use_session("a"):
            manager.prefetch(IDS if with_tokens else None)
        end = time.monotonic() + GUARD
        while _tiers_of(manager, "a") != ["host"] * 3:
            assert time.monotonic() < end
            time.sleep(0.002)


def test_a_prefetch_needs_something_to_bring(manager: CacheManager) -> None:
    with pytest.raises(ConfigError, match="prefetch needs session= or tokens="):
        manager.prefetch()
    with pytest.raises(ConfigError, match="no session 'ghost'"):
        manager.prefetch(session="ghost")
    manager.bind(kit.space(model="other"))
    with pytest.raises(ConfigError, match="2 spaces are bound"):
        manager.prefetch(IDS)
    manager.create_session("a")
    with pytest.raises(ConfigError, match="2 spaces are bound"):
        manager.hint(session="a", stop_reason="end_turn")
    manager.store(IDS, _kv().view, session="a", space=kit.space())
    manager.hint(session="a", stop_reason="end_turn")  # where it was used
    manager.prefetch(session="a")


def test_a_space_can_be_named_by_its_fingerprint(manager: CacheManager) -> None:
    space = kit.space()
    assert manager.space(space.fingerprint) == space
    with pytest.raises(ConfigError, match=r"no space 0000.* is bound"):
        manager.space(bytes(32))


def test_a_session_that_exists_is_taken_as_it_is_where_that_is_asked_for(
    manager: CacheManager,
) -> None:
    manager.create_session("a", tenant="t", ttl="1m", salt=b"grain")
    assert manager.create_session("a", tenant="t", ttl=60, salt=b"grain", adopt=True) == "a"
    for other in ({"tenant": "u"}, {"ttl": 61}, {"salt": b""}, {"fidelity": "lossy"}):
        facts = {"tenant": "t", "ttl": 60, "salt": b"grain", **other}
        with pytest.raises(ConfigError, match="another tenant, ttl, fidelity or salt"):
            manager.create_session("a", adopt=True, **facts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'a' exists; destroy it first"):
        manager.create_session("a", tenant="t", ttl=60, salt=b"grain")
    assert manager.create_session("new", adopt=True) == "new"
    assert len(manager.sessions()) == 2
    assert manager.knows_session("new")
    manager.destroy_session("new")
    assert not manager.knows_session("new")


def test_tasks_on_the_loop_ask_without_waiting_for_it(manager: CacheManager) -> None:
    manager.create_session("a")
    manager.store(IDS, _kv().view, session="a")
    told = manager.explain(IDS, session="a")

    async def ask() -> None:
        assert [info.id for info in await manager.asessions()] == ["a"]
        assert (await manager.astats()).sessions == 1
        assert await manager.aexplain(IDS, "a", manager.space()) == told
        await manager.ahint("a", None, None, "end_turn")
        await manager.aprefetch(IDS, "a", None)
        await manager.aprefetch(IDS, None, None)
        await manager.aclear_session("a")
        assert await manager.areset() == 3

    manager.call(ask)
    assert [info.tokens for info in manager.sessions()] == [0]
