"""Opening, closing, forgetting, forking and interrupting a manager."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.errors import BackendError, ClosedError, ConfigError, RootLockedError, TierKVError
from tierkv.testing.faults import Hanging, inject
from tierkv.workers import Signal
from tierkv_backends.host import HostBackend

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = tierkv.Tier("host", "1MiB")


# ----------------------------------------------------------------- opening


def test_a_locked_root_is_refused_in_the_callers_thread(
    tmp_path: Path, no_thread_leaks: None, no_fd_leaks: None
) -> None:
    tiers = kit.tiers("host+nvme", tmp_path)
    with CacheManager(tiers=tiers) as first:
        second = CacheManager(tiers=tiers)
        for _ in range(2):
            with pytest.raises(RootLockedError):
                second.open()
            second = CacheManager(tiers=tiers)
        assert first.health()["status"] == "open"
    with CacheManager(tiers=tiers) as third:
        assert third.health()["status"] == "open"


def test_a_path_that_cannot_be_used(
    tmp_path: Path, no_thread_leaks: None, no_fd_leaks: None
) -> None:
    (tmp_path / "file").write_text("not a folder")
    manager = CacheManager(tiers=[tierkv.Tier("nvme", "4MiB", path=str(tmp_path / "file" / "x"))])
    with pytest.raises((BackendError, ConfigError)):
        manager.open()
    assert manager.health() == {"status": "closed"}
    assert manager.close() is None
    with pytest.raises(ClosedError, match="opened once"):
        manager.open()


def test_a_tier_that_does_not_exist_yet(no_thread_leaks: None) -> None:
    with pytest.raises(ConfigError, match="device"), CacheManager(tiers=[tierkv.Tier("device", 1)]):
        pytest.fail("there is no such tier")


def test_a_port_that_is_taken(no_thread_leaks: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TierKVError, match=str(port)):
            CacheManager(tiers=[HOST], metrics_port=port).open()


def test_an_interrupt_while_opening_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, no_thread_leaks: None
) -> None:
    manager = CacheManager(tiers=[HOST])

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(manager._loop._ready, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.open()
    monkeypatch.undo()
    manager.close()
    assert manager.health() == {"status": "closed"}


# ----------------------------------------------------------------- closing


def test_close_is_idempotent_from_many_threads(no_thread_leaks: None) -> None:
    manager = CacheManager(tiers=[HOST], space=kit.space()).open()
    reports: list[Any] = []
    threads = [threading.Thread(target=lambda: reports.append(manager.close())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports.append(manager.close())
    assert [report.unwritten for report in reports] == [0] * 9


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path, no_thread_leaks: None) -> None:
    tiers = kit.tiers("host+nvme", tmp_path)
    kv, ids = kit.Memory(kit.LAYOUTS["full"], 64, seed=1), kit.tokens(4)
    with CacheManager(tiers=tiers, space=kit.space()) as manager:
        manager.store(ids, kv.view, session=manager.create_session())
    report = manager.close()
    assert report is not None
    assert report.unwritten == 0
    mine = kit.Memory(kit.LAYOUTS["full"], 64)
    with CacheManager(tiers=tiers, space=kit.space()) as manager:
        loaded = manager.load(ids, mine.view, session=manager.create_session())
    assert loaded.by_tier == {"nvme": 64}
    assert mine.same(kv, 64)


def test_close_ends_the_calls_under_way() -> None:
    manager = CacheManager(tiers=[HOST]).open()
    entered = threading.Event()
    ended: list[BaseException] = []

    async def for_ever() -> None:
        entered.set()
        await anyio.sleep_forever()

    def wait() -> None:
        try:
            manager.call(for_ever)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(60)
    manager.close()
    thread.join(60)
    assert "cancelled: the manager is closed" in str(ended[0])


def test_close_is_bounded_when_a_tier_hangs(no_thread_leaks: None) -> None:
    hang = Hanging("flush", "aclose")
    backend = inject(HostBackend(HOST), hang)
    manager = CacheManager(tiers=[HOST], backends=[backend], close_timeout=0.1).open()
    begin = time.monotonic()
    try:
        manager.close()
        assert hang.entered
        assert time.monotonic() - begin < 60  # the thread is given up, if need be
    finally:
        hang.release()


def test_a_dropped_manager_says_so_and_ends(no_thread_leaks: None) -> None:
    manager = CacheManager(tiers=[HOST], name="dropped").open()
    gone = weakref.ref(manager)
    with pytest.warns(ResourceWarning, match="manager 'dropped' was never closed"):
        del manager  # the only reference: nothing of the engine holds the manager
    assert gone() is None  # and no_thread_leaks sees its thread end


FORGOTTEN = """
import time
import tierkv
from tierkv.blocking import CacheManager
manager = CacheManager(tiers=[tierkv.Tier("host", "4MiB")], name="left")
manager.open()
manager.create_session("a")
print("ready", flush=True)
begin = time.monotonic()
import atexit
atexit.register(lambda: print("ended", time.monotonic() - begin < 60))
"""


def test_f055_a_forgotten_close_ends_and_warns(
    script: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = script(FORGOTTEN)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ready", "ended True"]
    assert "ResourceWarning: manager 'left' was never closed" in done.stderr
    assert done.stderr.count("ResourceWarning:") == 1
    assert "Traceback" not in done.stderr


def test_f055_a_forgotten_close_with_an_idle_disk_tier(
    script: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    text = FORGOTTEN.replace(
        '"4MiB")', f'"4MiB"), tierkv.Tier("nvme", "64MiB", path={str(tmp_path)!r})'
    )
    begin = time.monotonic()
    done = script(text)

    assert done.returncode == 0, done.stderr
    assert "ResourceWarning: manager 'left' was never closed" in done.stderr
    assert time.monotonic() - begin < 90
    with CacheManager(tiers=[tierkv.Tier("nvme", "64MiB", path=str(tmp_path))]) as again:
        assert again.health()["status"] == "open"  # the lock died with the process


# ----------------------------------------------------------------- forking (invariant C5)


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import tierkv
from tierkv.blocking import CacheManager
from tierkv.errors import ClosedError
with CacheManager(tiers=[tierkv.Tier("host", "1MiB")]) as manager:
    manager.create_session("a")
    child = os.fork()
    if child == 0:
        try:
            manager.sessions()
        except ClosedError as error:
            print("child:", error)
        manager.destroy_session("a")
        print("child:", manager.health(), manager.close())
        with CacheManager(tiers=[tierkv.Tier("host", "1MiB")]) as own:
            print("child:", own.health()["status"])
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    print("parent:", status, [i.id for i in manager.sessions()])
"""


def test_a_forked_child_is_told(
    script: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = script(FORKED)

    assert done.stdout.splitlines() == [
        "child: this process was forked after the manager was opened: open a manager of its own "
        "here",
        "child: {'status': 'closed'} None",
        "child: open",
        "parent: 0 ['a']",
    ], done.stderr
    assert not done.stderr, done.stderr


# ----------------------------------------------------------------- interrupting


def _interrupt_main(when: threading.Event) -> threading.Thread:
    def strike() -> None:
        when.wait(60)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread


def test_an_interrupt_cancels_the_call_and_nothing_else(manager: CacheManager) -> None:
    entered = threading.Event()
    ended: list[str] = []

    async def for_ever() -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            await anyio.lowlevel.checkpoint()
            ended.append("cleaned up")

    thread = _interrupt_main(entered)
    with pytest.raises(KeyboardInterrupt):
        manager.call(for_ever)
    assert ended == ["cleaned up"]  # it had ended before the caller went on
    thread.join()
    assert manager.health()["status"] == "open"


def test_the_tests_themselves_run_where_interrupts_are_ignored() -> None:
    """As under ``nohup``, or in the background of a script."""
    wanted = "test_an_interrupt_cancels_the_call_and_nothing_else"
    tests = f"{Path(__file__)}::{wanted}"
    command = f"trap '' INT; exec '{sys.executable}' -m pytest -q -p no:cacheprovider '{tests}'"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_an_interrupted_load_leaves_nothing_behind(no_thread_leaks: None) -> None:
    tier = tierkv.Tier("host", "8MiB")
    kv, ids = kit.Memory(kit.LAYOUTS["full"], 32, seed=1), kit.tokens(2)
    with CacheManager(tiers=[tier], space=kit.space()) as manager:
        for name in "ab":
            manager.create_session(name)
        manager.store(ids, kv.view, session="a")
        inside, leave = threading.Event(), Signal()

        async def hold_the_turn() -> None:
            async with manager.handle("a") as session:
                await session.begin_turn()
                inside.set()
                await leave.wait()
                session.end_turn()

        holder = threading.Thread(target=manager.call, args=(hold_the_turn,))
        holder.start()
        striker = _interrupt_main(inside)
        mine = kit.Memory(kit.LAYOUTS["full"], 32)
        with pytest.raises(KeyboardInterrupt):
            manager.load(ids, mine.view, session="a")  # waits for its turn
        assert mine.untouched()
        assert manager.load(ids, mine.view, session="b").tokens == 32
        manager._loop.soon(leave.set)
        holder.join()
        striker.join()
        assert manager.load(ids, mine.view, session="a").tokens == 32
        assert manager.stats().leases == 0
        assert {i.handles for i in manager.sessions()} == {0}


def test_a_call_that_resists_its_interrupt_is_given_up(
    manager: CacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierkv.blocking.carrying._ABSORB_S", 0.2)
    entered, free = threading.Event(), threading.Event()

    async def stubborn() -> None:
        entered.set()
        while not free.is_set():
            with contextlib.suppress(BaseException):
                await anyio.sleep(0.01)

    thread = _interrupt_main(entered)
    with pytest.raises(KeyboardInterrupt):
        manager.call(stubborn)
    thread.join()
    assert "an interrupted call does not end" in caplog.text
    assert manager.health()["status"] == "open"
    free.set()


def test_a_job_that_raises_what_it_should_not_hurts_only_its_caller(manager: CacheManager) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        manager.call(leave)
    assert manager.health()["status"] == "open"


def test_when_the_loop_itself_dies_callers_are_let_go(
    caplog: pytest.LogCaptureFixture, no_thread_leaks: None
) -> None:
    manager = CacheManager(tiers=[HOST]).open()
    entered = threading.Event()
    ended: list[str] = []

    async def for_ever() -> None:
        entered.set()
        await anyio.sleep_forever()

    def wait() -> None:
        try:
            manager.call(for_ever)
        except ClosedError as error:
            ended.append(str(error))

    def die() -> None:
        raise SystemExit("the loop dies")

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(60)
    manager._loop.soon(die)
    thread.join(60)
    assert len(ended) == 1
    manager.close()  # waits for the thread
    assert manager.health() == {"status": "closed"}
    assert "the loop of the manager ended" in caplog.text
