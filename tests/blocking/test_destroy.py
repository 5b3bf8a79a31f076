"""``destroy_session``: from ``__del__``, any thread, the collector, after close, at exit."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING

import tierkv
from tests import kit
from tierkv.blocking import CacheManager

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import pytest

IDS = kit.tokens(2)


class Chat:
    """A script's own session object; part of a cycle, so that only the collector frees it."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.name = manager.create_session()
        self.me = self

    def turn(self) -> None:
        """Use the session."""
        self.manager.store(IDS, kit.Memory(kit.LAYOUTS["full"], 32, 1).view, session=self.name)

    def __del__(self) -> None:
        self.manager.destroy_session(self.name)


def _collect(manager: CacheManager) -> None:
    for _ in range(3):
        Chat(manager).turn()
    gc.collect()


def test_a_tombstone_is_honoured_at_once(manager: CacheManager) -> None:
    manager.create_session("kept")
    for _ in range(4):
        _collect(manager)
        assert [i.id for i in manager.sessions()] == ["kept"]
        _collect(manager)
        assert manager.stats().sessions == 1
    assert manager.stats().leases == 0
    assert manager.engine.sessions() == []  # "kept" was never used, and nothing else is left


def test_it_is_idempotent_and_takes_any_name(manager: CacheManager) -> None:
    manager.create_session("a")
    for name in ("a", "a", "never was", ""):
        manager.destroy_session(name)
    manager.create_session("a")
    assert [i.id for i in manager.sessions()] == ["a"]


def test_the_private_tail_goes_with_the_session(manager: CacheManager) -> None:
    ids, kv = kit.tokens(0.5), kit.Memory(kit.LAYOUTS["full"], 8, 1)
    manager.create_session("a")
    manager.store(ids, kv.view, session="a", tail=True)
    assert manager.stats().used["host"] > 0
    manager.destroy_session("a")
    assert manager.stats().used["host"] == 0


def test_in_the_collector_of_the_loop_itself(manager: CacheManager) -> None:
    async def collect_there() -> None:
        _collect_unused(manager)

    for _ in range(5):
        manager.call(collect_there)
    assert manager.sessions() == []


def _collect_unused(manager: CacheManager) -> None:
    for _ in range(3):
        Chat(manager)
    gc.collect()


def test_it_does_not_wait_for_a_loop_that_is_busy(manager: CacheManager) -> None:
    busy, free = threading.Event(), threading.Event()

    async def hog() -> None:
        busy.set()
        free.wait()

    manager.create_session("a")
    thread = threading.Thread(target=manager.call, args=(hog,))
    thread.start()
    assert busy.wait(60)
    begin = time.monotonic()
    for _ in range(100):
        manager.destroy_session("a")
    took = time.monotonic() - begin
    free.set()
    thread.join()
    assert took < 30  # it hangs for ever, or it is quick
    assert manager.sessions() == []


def test_before_open_and_after_close(no_thread_leaks: None) -> None:
    manager = CacheManager(tiers=[tierkv.Tier("host", "1MiB")], space=kit.space())
    manager.destroy_session("a")
    manager.create_session("a")
    manager.destroy_session("a")
    with manager:
        chat = Chat(manager)
        assert [i.id for i in manager.sessions()] == [chat.name]
    manager.destroy_session(chat.name)
    del chat
    gc.collect()
    assert "0 sessions" in repr(manager)


def test_many_threads_create_and_destroy(manager: CacheManager) -> None:
    failures: list[BaseException] = []

    def live(number: int) -> None:
        try:
            for turn in range(20):
                name = manager.create_session(f"s{number}")
                if turn % 5 == number % 5:
                    manager.store(IDS, kit.Memory(kit.LAYOUTS["full"], 32, 1).view, session=name)
                assert name in {i.id for i in manager.sessions()}
                manager.destroy_session(name)
                assert name not in {i.id for i in manager.sessions()}
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=live, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.engine.sessions() == []


AT_EXIT = """
import atexit, sys, time
import tierkv
from tierkv.blocking import CacheManager

class Chat:
    def __init__(self, manager, name):
        self.manager, self.name = manager, name
        self.me = self
        manager.create_session(name)
    def __del__(self):
        begin = time.monotonic()
        self.manager.destroy_session(self.name)
        took = time.monotonic() - begin
        sys.__stdout__.write(f"destroyed {self.name} {took < 30}\\n")
        sys.__stdout__.flush()

closed = CacheManager(tiers=[tierkv.Tier("host", "1MiB")])
with closed:
    first = Chat(closed, "first")
manager = CacheManager(tiers=[tierkv.Tier("host", "1MiB")])
manager.open()
second = Chat(manager, "second")
atexit.register(manager.destroy_session, "second")
sys.modules["keeper"] = Chat(manager, "third")
print("end of script")
"""


def test_while_the_interpreter_exits(
    script: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = script(AT_EXIT)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "end of script"
    assert sorted(lines[1:]) == [f"destroyed {name} True" for name in ("first", "second", "third")]
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr


def test_destroying_right_before_closing_is_no_error_of_the_loop(
    caplog: pytest.LogCaptureFixture, no_thread_leaks: None
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(60.0)

    with CacheManager(tiers=[tierkv.Tier("host", "1MiB")], metrics=False) as manager:
        manager.bind(kit.space())
        name = manager.create_session()
        manager.store(IDS, kit.Memory(kit.LAYOUTS["full"], 32, 1).view, session=name)
        manager._loop.soon(hold)
        assert held.wait(60.0)
        manager.destroy_session(name)
        closing = threading.Thread(target=manager.close)
        closing.start()
        while manager._loop.is_open():
            time.sleep(0.001)
        go_on.set()
        closing.join(60.0)
    assert not [record for record in caplog.records if record.name == "asyncio"]
