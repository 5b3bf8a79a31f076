"""Work that is started on the engine's loop without waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager, Pending
from tierkv.errors import ClosedError, TierKVError
from tierkv.workers import Signal

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

GUARD = 60.0


async def _give(value: object) -> object:
    return value


async def _fail(error: BaseException) -> None:
    raise error


def test_submitted_work_returns_what_it_returns(manager: CacheManager) -> None:
    pending = manager.submit(_give, 7)
    assert pending.wait(GUARD)
    assert pending.done()
    assert [pending.result(), pending.result(), repr(pending)] == [7, 7, "<Pending: done>"]
    assert pending.wait(0)
    pending.cancel()  # too late: it stays as it is
    manager.call(_give, None)
    assert pending.result() == 7


def test_submitted_work_raises_what_it_raises_at_every_call(manager: CacheManager) -> None:
    error = KeyError("planted")
    pending = manager.submit(_fail, error)
    assert pending.wait(GUARD)
    for _ in range(3):
        with pytest.raises(KeyError, match="planted") as caught:
            pending.result()
        assert caught.value is error
    frames, trace = 0, error.__traceback__
    while trace is not None:
        frames, trace = frames + 1, trace.tb_next
    assert frames <= 4  # readers before this one left no frames behind
    assert "failed" in repr(pending)


def test_what_has_not_ended_has_no_result_and_can_be_cancelled(manager: CacheManager) -> None:
    gate = Signal()
    ended: list[Pending[bool]] = []
    pending = manager.submit(gate.wait, done=ended.append)
    assert not pending.wait(0.01)
    assert not pending.done()
    with pytest.raises(ClosedError, match="not ended"):
        pending.result()
    pending.cancel()
    assert pending.wait(GUARD)
    with pytest.raises(ClosedError, match="cancelled"):
        pending.result()
    assert ended == [pending]
    assert manager.call(_give, 1) == 1  # nobody else was taken along


def test_done_is_told_once_on_the_loops_thread(manager: CacheManager) -> None:
    told: list[tuple[Pending[object], str, bool]] = []
    came = threading.Event()

    def done(pending: Pending[object]) -> None:
        told.append((pending, threading.current_thread().name, pending.done()))
        came.set()

    pending = manager.submit(_give, 3, done=done)
    assert came.wait(GUARD)
    assert told == [(pending, f"{manager.config.name}-loop", True)]


def test_what_done_raises_is_logged_and_harms_nobody(
    manager: CacheManager, caplog: pytest.LogCaptureFixture
) -> None:
    def done(_: Pending[object]) -> None:
        raise ValueError("planted")

    pending = manager.submit(_give, 3, done=done)
    assert pending.wait(GUARD)
    assert manager.call(_give, 4) == 4
    assert pending.result() == 3
    assert "planted" in caplog.text


def test_work_begins_in_the_order_of_its_submission(manager: CacheManager) -> None:
    order: list[int] = []

    async def note(number: int) -> None:
        order.append(number)

    all_of_it = [manager.submit(note, number) for number in range(200)]
    assert all(pending.wait(GUARD) for pending in all_of_it)
    assert order == list(range(200))


def test_submit_never_waits_even_when_the_loop_is_busy(manager: CacheManager) -> None:
    began, free = threading.Event(), threading.Event()

    async def block() -> None:
        began.set()
        free.wait(GUARD)

    blocking = manager.submit(block)
    assert began.wait(GUARD)
    pending = [manager.submit(_give, number) for number in range(100)]  # the loop cannot run now
    assert not any(p.done() for p in pending)
    free.set()
    assert blocking.wait(GUARD)
    assert all(p.wait(GUARD) for p in pending)
    assert [p.result() for p in pending] == list(range(100))


def test_work_sees_the_session_of_whoever_submitted_it(manager: CacheManager) -> None:
    name = manager.create_session("chat")

    async def current() -> str | None:
        return manager.current_session()

    with manager.use_session(name):
        inside = manager.submit(current)
    outside = manager.submit(current)
    assert inside.wait(GUARD)
    assert outside.wait(GUARD)
    assert [inside.result(), outside.result()] == ["chat", None]


def test_many_threads_may_wait_for_the_same_work(manager: CacheManager) -> None:
    gate = Signal()
    pending = manager.submit(gate.wait)
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(pending.wait(GUARD))) for _ in range(8)]
    for thread in threads:
        thread.start()
    manager.submit(_switch, gate)
    for thread in threads:
        thread.join(GUARD)
    assert seen == [True] * 8


async def _switch(gate: Signal) -> None:
    gate.set()


def test_on_the_loop_itself_work_may_be_submitted_but_not_waited_for(
    manager: CacheManager,
) -> None:
    async def inside() -> Pending[object]:
        ended = Signal()
        pending = manager.submit(_give, 5, done=lambda _: ended.set())
        with pytest.raises(TierKVError, match="on that loop"):
            pending.wait()
        assert await ended.wait(GUARD)
        assert pending.wait()  # it has ended: nothing is waited for
        return pending

    assert manager.call(inside).result() == 5


def test_closing_ends_what_is_under_way_and_says_so(no_thread_leaks: None) -> None:
    told: list[Pending[Any]] = []
    manager = CacheManager(tiers=[tierkv.Tier("host", "8MiB")], space=kit.space()).open()
    gate = Signal()
    pending = [manager.submit(gate.wait, done=told.append) for _ in range(3)]
    manager.close()
    assert set(told) == set(pending)
    assert len(told) == 3
    for each in pending:
        assert each.wait(0)
        with pytest.raises(ClosedError):
            each.result()
        each.cancel()  # the loop is gone: nothing happens
    with pytest.raises(ClosedError, match="not open"):
        manager.submit(_give, 1, done=told.append)
    assert len(told) == 3


def test_before_it_is_open_nothing_can_be_submitted() -> None:
    manager = CacheManager(tiers=[tierkv.Tier("host", "8MiB")])
    with pytest.raises(ClosedError, match="not open"):
        manager.submit(_give, 1)


def test_work_that_ended_keeps_nothing_of_its_arguments_alive(manager: CacheManager) -> None:
    class Large:
        pass

    async def use(_: Large) -> int:
        return 1

    large = Large()
    alive = weakref.ref(large)
    pending = manager.submit(use, large)
    assert pending.wait(GUARD)
    del large
    until = time.monotonic() + GUARD
    while alive() is not None and time.monotonic() < until:  # the task itself ends a turn later
        gc.collect()
        time.sleep(0.01)
    assert alive() is None
    assert pending.result() == 1
    assert not manager._loop._pending  # nor is it kept by the loop


def test_a_storm_of_submissions_and_cancels(manager: CacheManager) -> None:
    told: list[Pending[Any]] = []
    mine: list[list[Pending[Any]]] = [[] for _ in range(6)]

    async def some(number: int) -> int:
        for _ in range(number % 3):
            await asyncio.sleep(0)
        return number

    def work(which: int) -> None:
        for number in range(150):
            mine[which].append(manager.submit(some, number, done=told.append))
            if number % 4 == which % 4:
                mine[which][-1].cancel()

    threads = [threading.Thread(target=work, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    for pendings in mine:
        for number, pending in enumerate(pendings):
            assert pending.wait(GUARD)
            with contextlib.suppress(ClosedError):  # it was cancelled in time
                assert pending.result() == number
    manager.call(_give, None)
    assert sorted(map(id, told)) == sorted(id(p) for pendings in mine for p in pendings)
    assert not manager._loop._pending


def test_an_interrupted_submission_leaves_the_loop_usable(
    manager: CacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Pending[Any]] = []
    loop = manager._loop._loop
    assert loop is not None

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):  # before the loop was woken for it
        manager.submit(_give, 1, done=told.append)
    assert manager.call(_give, 2) == 2  # those that come later are begun
    [pending] = told
    with pytest.raises(ClosedError, match="before it began"):
        pending.result()


def test_an_open_manager_with_work_under_way_can_be_forgotten(
    script: Callable[[str], subprocess.CompletedProcess[str]],
) -> None:
    done = script(
        "import asyncio, tierkv\n"
        "from tierkv.blocking import CacheManager\n"
        "m = CacheManager(tiers=[tierkv.Tier('host', '8MiB')]).open()\n"
        "async def long(): await asyncio.sleep(3600)\n"
        "p = m.submit(long)\n"
        "print(p.wait(0.01))\n"
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
