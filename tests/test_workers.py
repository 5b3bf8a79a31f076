"""The only door to threads and tasks: what is started ends, and nobody is cut in half."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time

import anyio
import pytest

from tierkv.errors import ClosedError
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.workers import Job, Signal, Workers

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.every_loop,
    pytest.mark.usefixtures("no_thread_leaks", "no_task_leaks"),
]


async def test_a_signal_wakes_all_and_forgets_the_cancelled() -> None:
    signal, woken = Signal(), []

    async def wait(name: str) -> None:
        woken.append((name, await signal.wait()))

    async with anyio.create_task_group() as group:
        for name in "ab":
            group.start_soon(wait, name)
        assert not await signal.wait(within=0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await signal.wait()
        signal.set()
        signal.set()
    assert sorted(woken) == [("a", True), ("b", True)]
    assert await signal.wait()
    assert signal.is_set()


async def test_outlast_waits_on_and_then_lets_the_cancellation_through() -> None:
    signal = Signal()
    asyncio.get_running_loop().call_later(0.05, signal.set)
    with anyio.move_on_after(0.01) as scope:
        await signal.outlast()
        pytest.fail("the cancellation was lost")
    assert scope.cancelled_caught
    assert signal.is_set()

    late = Signal()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await late.outlast(within=0.1)
    assert time.monotonic() - began > 0.08
    assert not await late.outlast(within=0.01)


async def test_jobs_go_on_without_their_waiters() -> None:
    workers = Workers()
    await workers.start()
    go = Signal()

    async def work(value: int) -> int:
        await go.wait()
        return value

    job = workers.spawn(work, 7)
    with anyio.move_on_after(0.01) as scope:
        await job.wait()
    assert scope.cancelled_caught
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(job.wait(), 0.01)
    assert not job.done()
    go.set()
    assert await job.wait() == 7
    assert job.done()
    assert "done" in repr(job)
    await workers.aclose()


async def test_a_job_that_fails_tells_its_waiter_only() -> None:
    workers = Workers()
    await workers.start()

    async def work() -> None:
        raise ValueError("mine")

    job = workers.spawn(work)
    with pytest.raises(ValueError, match="mine"):
        await job.wait()
    assert "failed" in repr(job)
    assert await workers.run(lambda: 1) == 1  # the others live on
    await workers.aclose()


async def test_a_job_is_started_out_of_a_plain_callback() -> None:
    """Where sniffio is installed, anyio alone could not: sniffio knows no loop outside of tasks."""
    workers, loop = Workers(), asyncio.get_running_loop()
    await workers.start()
    started: asyncio.Future[Job[int]] = loop.create_future()

    def called() -> None:
        try:
            started.set_result(workers.spawn(workers.run, abs, -3))
        except Exception as error:  # noqa: BLE001 - the test tells it
            started.set_exception(error)

    threading.Thread(target=loop.call_soon_threadsafe, args=(called,)).start()
    assert await (await started).wait() == 3
    await workers.aclose()


async def test_a_thread_is_waited_for_however_it_is_cancelled() -> None:
    workers = Workers()
    await workers.start()
    ended = 0
    go = threading.Event()

    def work() -> None:
        nonlocal ended
        go.wait(60)
        ended += 1

    for kind in ("scope", "native"):
        before = ended
        go.clear()
        asyncio.get_running_loop().call_later(0.03, go.set)  # after the cancellation, always
        if kind == "scope":
            with anyio.move_on_after(0.005) as scope:
                await workers.run(work)
            assert scope.cancelled_caught
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await workers.run(work)
        assert ended == before + 1  # it is over by the time we hear of the cancellation
    await workers.aclose()


async def test_a_call_that_no_thread_took_up_is_never_run() -> None:
    workers = Workers(threads=1)
    await workers.start()
    gate = threading.Event()
    ran: list[int] = []
    busy = workers.spawn(workers.run, gate.wait)
    await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await workers.run(ran.append, 1)
    gate.set()
    await busy.wait()
    await workers.run(lambda: None)
    assert ran == []
    await workers.aclose()


async def test_a_cancelled_scope_does_not_spin_while_a_thread_runs() -> None:
    workers = Workers()
    await workers.start()
    cpu = time.thread_time()
    with anyio.move_on_after(0.01):
        await workers.run(time.sleep, 0.3)
    assert time.thread_time() - cpu < 0.25  # spinning takes 0.3
    await workers.aclose()


async def test_context_variables_reach_the_thread() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    workers = Workers()
    await workers.start()
    variable.set("mine")
    assert await workers.run(variable.get) == "mine"
    assert await workers.run_long(variable.get) == "mine"
    await workers.aclose()


async def test_supervision_restarts_and_backs_off(caplog: pytest.LogCaptureFixture) -> None:
    restarted: list[str] = []
    workers = Workers(on_restart=restarted.append)
    await workers.start()
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RuntimeError("broken")

    await workers.supervise("mine", loop).wait()
    assert runs == 3
    assert restarted == ["mine", "mine"]
    assert "broken" in caplog.text
    await workers.aclose()


async def test_a_loop_that_meets_the_end_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    """Closing as a loop is about to start a job: the job is refused, and nothing is logged."""
    restarted: list[str] = []
    workers = Workers(on_restart=restarted.append)
    await workers.start()

    async def loop() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            workers.spawn(asyncio.sleep, 0)

    job = workers.supervise("mine", loop)
    await asyncio.sleep(0.01)
    await workers.quiesce()
    with pytest.raises(ClosedError):
        await job.wait()
    assert restarted == []
    assert "failed and is restarted" not in caplog.text
    await workers.aclose()


async def test_closing_cancels_jobs_but_not_what_closes_things() -> None:
    workers = Workers()
    await workers.start()
    job = workers.spawn(asyncio.sleep, 60)
    closing = workers.spawn(asyncio.sleep, 0.05, closing=True)
    await workers.quiesce()
    assert not closing.done()
    with pytest.raises(ClosedError):
        await job.wait()
    with pytest.raises(ClosedError):
        workers.spawn(asyncio.sleep, 0)
    assert await workers.outlast(workers.run, lambda: 5) == 5
    await closing.wait()
    await workers.aclose()
    await workers.aclose()
    for call in (workers.run(int), workers.run_long(int), workers.outlast(asyncio.sleep, 0)):
        with pytest.raises(ClosedError):
            await call
    with pytest.raises(ClosedError, match="twice"):
        await workers.start()


async def test_a_thread_that_hangs_is_given_up() -> None:
    workers = Workers(threads=1)
    await workers.start()
    gate = threading.Event()
    hanging = workers.spawn(workers.run, gate.wait)
    queued = workers.spawn(workers.run, gate.wait)
    await asyncio.sleep(0.01)
    began = time.monotonic()
    await workers.quiesce(grace=0.1)
    assert time.monotonic() - began < 60
    for job in (hanging, queued):
        with pytest.raises(ClosedError):
            await job.wait()
    # a fresh pool serves what closes the rest
    assert await workers.outlast(workers.run, lambda: 6) == 6
    await workers.aclose(grace=0.1)
    gate.set()


async def test_closing_is_finished_even_if_it_is_cancelled() -> None:
    async def life() -> None:
        workers = Workers()
        try:
            await workers.start()
            workers.spawn(asyncio.sleep, 60)
        finally:
            await workers.aclose()

    async for run in cancel_at_each_step(life):
        assert run.outcome in ("cancelled", "completed")


async def test_a_stray_cancellation_ends_its_job_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Code run as a job may cancel itself, or await something that was cancelled."""
    restarted: list[str] = []
    workers = Workers(on_restart=restarted.append)
    await workers.start()
    other = workers.spawn(asyncio.sleep, 0.1, name="other")
    loops = 0

    async def await_what_is_cancelled() -> None:
        nonlocal loops
        loops += 1
        if loops < 3:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone

    with pytest.raises(ClosedError, match="cancelled"):
        await workers.spawn(await_what_is_cancelled).wait()
    await workers.supervise("loop", await_what_is_cancelled).wait()
    assert loops == 3
    assert restarted == ["loop"]
    assert not workers.stopping
    assert await workers.spawn(workers.run, str, 5).wait() == "5"
    await other.wait()
    await workers.aclose()
    assert workers.stopping


async def test_what_closes_things_may_hang_too() -> None:
    workers = Workers(threads=1)
    await workers.start()
    gate = threading.Event()
    hanging = workers.spawn(workers.run, gate.wait, closing=True)
    await asyncio.sleep(0.01)
    began = time.monotonic()
    await workers.aclose(grace=0.1)
    assert time.monotonic() - began < 60
    with pytest.raises(ClosedError):
        await hanging.wait()
    assert not workers.running  # nothing is left that would hold up the loop's own end
    gate.set()


async def test_a_signal_resolves_futures_that_were_attached() -> None:
    signal, loop = Signal(), asyncio.get_running_loop()
    first, second, late = (loop.create_future() for _ in range(3))
    signal.attach(first)
    signal.attach(second)
    signal.detach(second)
    signal.detach(second)
    signal.set()
    signal.attach(late)
    assert (first.done(), second.done(), late.done()) == (True, False, True)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_c8_a_task_cancelled_from_outside_before_it_began_leaves_nobody_waiting() -> None:
    """The whole group ends with it; whoever waits, or comes later, is told so."""
    workers = Workers()
    await workers.start()

    async def work() -> None:
        pytest.fail("it never began")

    job = workers.spawn(work, name="victim")
    for task in asyncio.all_tasks():
        if task.get_name() == "victim":
            task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(ClosedError):
            await job.wait()
        with pytest.raises(ClosedError):
            workers.spawn(work)
        await workers.aclose()
    gc.collect()  # what never began goes while its warning is expected
