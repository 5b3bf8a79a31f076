"""The current session, and names that die at any moment."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

from tierkv.blocking.names import CurrentSession, SessionEntry, SessionNames
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tierkv.blocking import CacheManager


pytestmark = pytest.mark.every_loop


def _entry(name: str) -> SessionEntry:
    return SessionEntry(name, "", None, "exact", b"")


def test_use_session_nests_and_ends(manager: CacheManager) -> None:
    for name in "ab":
        manager.create_session(name)
    assert manager.current_session() is None
    with manager.use_session("a") as outer:
        with manager.use_session("b") as inner:
            assert (outer, inner, manager.current_session()) == ("a", "b", "b")
            with manager.use_session("a"):
                assert manager.current_session() == "a"
        assert manager.current_session() == "a"
        with pytest.raises(KeyError), manager.use_session("b"):
            raise KeyError
        assert manager.current_session() == "a"
    assert manager.current_session() is None


def test_another_thread_does_not_see_it() -> None:
    current = CurrentSession()
    seen: list[str | None] = []
    with current.use("a"):
        thread = threading.Thread(target=lambda: seen.append(current.get()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.anyio
async def test_it_crosses_awaits_and_stays_in_its_task() -> None:
    current = CurrentSession()
    both_in = anyio.Event()
    seen: dict[str, list[str | None]] = {}

    async def turn(name: str) -> None:
        seen[name] = [current.get()]
        with current.use(name):
            if len(seen) == 2:
                both_in.set()
            await both_in.wait()
            await asyncio.sleep(0)
            seen[name].append(current.get())
        seen[name].append(current.get())

    async with anyio.create_task_group() as group:
        group.start_soon(turn, "a")
        group.start_soon(turn, "b")
    assert seen == {"a": [None, "a", None], "b": [None, "b", None]}
    assert current.get() is None


@pytest.mark.anyio
async def test_a_block_left_in_another_context_hurts_nobody() -> None:
    current = CurrentSession()

    async def turns() -> AsyncGenerator[str | None, None]:
        with current.use("a"):
            yield current.get()

    generator = turns()

    async def enter() -> None:
        assert await anext(generator) == "a"

    async with anyio.create_task_group() as group:
        group.start_soon(enter)  # entered in that task
    await generator.aclose()  # left in this one
    assert current.get() is None


def test_a_mark_is_honoured_by_whatever_comes_next() -> None:
    names = SessionNames()
    names.add(_entry("a"))
    names.mark("a")
    names.mark("a")
    names.mark("never was")
    assert len(names) == 0
    names.mark("a")
    with pytest.raises(ConfigError, match="no session 'a'"):
        names.get("a")
    names.add(_entry("a"))
    names.mark("a")
    names.add(_entry("a"))  # the old one is out of the way at once
    assert [entry.name for entry in names.dead()] == ["a", "a"]
    assert names.dead() == []
    assert [entry.name for entry in names.all()] == ["a"]


def test_marks_from_many_threads_never_reach_a_new_session_of_that_name() -> None:
    names = SessionNames()
    failures: list[BaseException] = []

    def live(name: str) -> None:
        try:
            for _ in range(300):
                names.add(_entry(name))
                names.get(name)
                names.mark(name)
        except ConfigError as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(f"s{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(names.dead()) == 8 * 300
