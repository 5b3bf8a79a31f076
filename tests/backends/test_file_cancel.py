"""The ``file`` tier under cancellation, of which aiofiles itself takes no care."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.backends.file_bench import File
from tests.backends.test_file_root import everything, frames
from tierkv.abc import OK, IoStatus, ReadRequest
from tierkv.errors import ClosedError
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.file.files import Files
from tierkv_backends.file.strand import Pool, Strand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Future
    from pathlib import Path

    from tierkv.testing.bench import Bench
    from tierkv.workers import Workers

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


@pytest.fixture(scope="module", autouse=True)
async def _loop_has_run(anyio_backend: object) -> None:
    """A loop opens descriptors of its own when it first runs: not to be taken for a leak."""
    await asyncio.sleep(0)


async def natively(work: Callable[[], Awaitable[object]], delay: float) -> bool:
    """Run ``work`` in this task and cancel the task after ``delay``; whether that hit it."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(delay, task.cancel)
    try:
        await work()
    except asyncio.CancelledError:
        task.uncancel()
        return True
    finally:
        timer.cancel()
    return False


async def by_scope(work: Callable[[], Awaitable[object]], delay: float) -> bool:
    with anyio.move_on_after(delay) as scope:
        await work()
    return scope.cancelled_caught


async def check_books(bench: Bench, root: Path) -> None:
    """Index, account and directory agree, and nothing unfinished is left."""
    stats = bench.backend.stats()
    assert stats.disk_bytes == disk_usage(root / "kv")
    assert stats.entries == len(frames(root))
    assert not [path for path in everything(root) if ".unfinished" in path.name]


class _Rounds:
    """Batches at random, each cut short at a random moment."""

    def __init__(self, bench: Bench, root: Path, kind: Any, seed: int) -> None:
        self.bench, self.root, self.kind = bench, root, kind
        self.rng = random.Random(seed)
        self.hits = 0
        self.generation = 0
        self.lasts: dict[str, float] = {}

    async def cut(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Cancel a call somewhere on its way: as long as the last whole one took, at most."""
        longest = 0.0 if self.generation % 4 == 1 else self.lasts.get(name, 0.0)
        began = time.perf_counter()
        if not longest:
            await work()
        elif await self.kind(work, self.rng.random() * longest):
            self.hits += 1
            return
        self.lasts[name] = time.perf_counter() - began

    async def round(self) -> None:
        self.generation += 1
        numbers = self.rng.sample(range(12), 2)
        parts = [part(number, 60_000, self.generation) for number in numbers]
        backend = self.bench.backend
        items = [self.bench.item(stored) for stored in parts]
        await self.cut("write", lambda: backend.write(items))
        for item in items:  # its memory is the caller's again
            item.buffer.memory[:] = b"\xee" * 60_000
            item.buffer.release()
        await check_books(self.bench, self.root)
        target = memoryview(bytearray(60_000))
        request = ReadRequest(parts[0].part, parts[0].generation, 0, 60_000)
        await self.cut("read", lambda: backend.read([request], [target]))
        target[:] = b"\x11" * 60_000
        if self.generation % 3 == 0:
            doomed = [(p.part, p.generation) for p in parts]
            await self.cut("delete", lambda: backend.delete(doomed))
        if self.generation % 10 == 0:
            await self.cut("flush", backend.flush)
        assert bytes(target) == b"\x11" * 60_000, "written after the call had ended"


@pytest.mark.usefixtures("no_fd_leaks", "no_thread_leaks")
@pytest.mark.parametrize("kind", [natively, by_scope])
async def test_f042_f043_f044_random_cancels(kind: Any, tmp_path: Path) -> None:
    """Each key is stored or has no file; no descriptor, warning or late writer is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        async with File(threads=3).opened(tmp_path) as bench:
            rounds = _Rounds(bench, tmp_path, kind, seed=5)
            for _ in range(40):
                await rounds.round()
            await check_books(bench, tmp_path)
        async with File().opened(tmp_path) as bench:
            assert len(bench.found) == len(frames(tmp_path)) > 0
            assert await bench.read(*bench.found) == [contents(p) for p in bench.found]
        gc.collect()
    assert rounds.hits > 10, "the cancellations came too late to show anything"


@pytest.mark.stress
@pytest.mark.usefixtures("no_fd_leaks", "no_thread_leaks")
@pytest.mark.parametrize("kind", [natively, by_scope])
async def test_f042_f043_f044_many_cancels(kind: Any, tmp_path: Path) -> None:
    count = max(50, round(3000 * float(os.environ.get("TIERKV_SCALE", "1"))))
    async with File(threads=3).opened(tmp_path) as bench:
        rounds = _Rounds(bench, tmp_path, kind, seed=6)
        for _ in range(count):
            await rounds.round()
        await check_books(bench, tmp_path)


class _Gate:
    """Stops a blocking function of :class:`Files`, or of a file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        self.entered, self.go = threading.Event(), threading.Event()

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.entered.set()
            assert self.go.wait(30)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, gated)

    async def reached(self) -> None:
        while not self.entered.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)

    async def cut(self, workers: Workers, work: Callable[[], Awaitable[object]]) -> bool:
        """Cancel it natively while its thread is at the gate; whether that hit it."""
        tasks: list[asyncio.Task[Any]] = []

        async def caller() -> bool:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            try:
                await work()
            except asyncio.CancelledError:
                task.uncancel()
                return True
            return False

        job = workers.spawn(caller)
        await self.reached()
        tasks[0].cancel()
        for _ in range(10):  # it learns of that before the thread goes on
            await asyncio.sleep(0)
        self.go.set()
        return await job.wait()


STEPS = ["open_writer", "publish", "open_reader", "erase_all", "sync"]


@pytest.mark.usefixtures("no_fd_leaks", "no_thread_leaks")
@pytest.mark.parametrize("kind", ["native", "native twice", "scope"])
@pytest.mark.parametrize("step", STEPS)
async def test_c1_a_blocked_thread_is_outlasted(
    step: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is cancelled, a call ends after its thread, and the books are right."""
    stored, fresh = part(0, 5000, 1), part(1, 5000, 1)
    target = memoryview(bytearray(5000))
    async with File().opened(tmp_path) as bench:
        await bench.write(stored)
        backend = bench.backend
        item = bench.item(fresh)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "open_writer": lambda: backend.write([item]),
            "publish": lambda: backend.write([item]),
            "open_reader": lambda: backend.read([ReadRequest(stored.part, 1, 0, 5000)], [target]),
            "erase_all": lambda: backend.delete([(stored.part, 1)]),
            "sync": backend.flush,
        }
        gate = _Gate(monkeypatch, Files, step)
        scope, raised = anyio.CancelScope(), []
        tasks: list[asyncio.Task[Any]] = []

        async def caller() -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            try:
                with scope:
                    await calls[step]()
            except asyncio.CancelledError as error:
                raised.append(error)
                tasks[0].uncancel()

        job = bench.workers.spawn(caller)
        await gate.reached()
        for _ in range(2 if kind == "native twice" else 1):
            if kind == "scope":
                scope.cancel()
            else:
                tasks[0].cancel()
            await asyncio.sleep(0.005)
        assert not job.done(), "it did not wait for its thread"
        gate.go.set()
        await job.wait()
        assert scope.cancelled_caught if kind == "scope" else raised
        monkeypatch.undo()
        await check_books(bench, tmp_path)
        there = [stored] if step != "erase_all" else []
        assert await bench.read(*there) == [contents(p) for p in there]
        if step == "publish":  # past the point of no return: it is there
            assert await bench.read(fresh) == [contents(fresh)]
        else:
            assert await bench.read(fresh) == [IoStatus.MISSING]
        await backend.flush()
        assert await bench.write(part(2, 5000)) == [OK]


async def test_a_cancelled_flush_has_promised_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one syncs everything, what the cancelled one did included."""
    synced: list[str] = []
    sync = Files.sync

    def noted(files: Files, paths: list[str]) -> None:
        synced.extend(paths)
        sync(files, paths)

    async with File(threads=1).opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        (path,) = frames(tmp_path)
        gate = _Gate(monkeypatch, Files, "sync")
        assert await gate.cut(bench.workers, bench.backend.flush)
        monkeypatch.setattr(Files, "sync", noted)
        await bench.backend.flush()
        assert str(path.relative_to(tmp_path / "kv")) in synced


@pytest.mark.usefixtures("no_fd_leaks", "no_thread_leaks")
async def test_c8_closing_gives_a_hanging_medium_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits gets ClosedError; when the medium comes back nothing is published."""
    monkeypatch.setattr("tierkv_backends.file.backend._CLOSE_S", 0.05)
    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        gate = _Gate(monkeypatch, Files, "open_writer")
        writing = bench.workers.spawn(bench.write, part(1, 5000), part(2, 5000))
        await gate.reached()
        await bench.backend.aclose()
        with pytest.raises(ClosedError):
            await writing.wait()
        assert "given up" in caplog.text
        gate.go.set()
        while any(t.name.startswith("file-file") for t in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    async with File().opened(tmp_path) as bench:
        assert list(bench.found) == [part(0, 5000)]
        await check_books(bench, tmp_path)


async def test_a_strand_forgets_nothing() -> None:
    """An operation that is cancelled before its thread took it up runs all the same."""
    last: list[str] = []
    pool = Pool(1, "test")
    gate = threading.Event()
    strand = Strand(pool)
    blocked: Future[bool] = pool.submit(gate.wait)

    async def cut() -> None:
        asyncio.get_running_loop().call_later(0.01, gate.set)
        await natively(lambda: strand.call(last.append, "ran"), 0.001)

    await cut()
    assert blocked.done()
    assert last == ["ran"]
    hanging = threading.Event()
    work = pool.submit(hanging.wait)
    pool.close(lambda: last.append("left"))
    pool.close(lambda: last.append("twice"))
    with pytest.raises(ClosedError):
        work.result()
    with pytest.raises(ClosedError):
        await strand.call(last.append, "too late")
    assert last == ["ran"]
    hanging.set()
    while len(last) < 2:  # noqa: ASYNC110 - a thread appends
        await asyncio.sleep(0.001)
    assert last == ["ran", "left"]


async def test_a_cancelled_batch_stops_at_the_file_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in its place is in the index; the rest has no file and no room set aside."""
    async with File(threads=1).opened(tmp_path) as bench:
        items = [bench.item(part(number, 5000)) for number in range(6)]
        gate = _Gate(monkeypatch, Files, "publish")
        assert await gate.cut(bench.workers, lambda: bench.backend.write(items))
        await check_books(bench, tmp_path)
        assert bench.backend.stats().entries == 1
        store = bench.backend._store  # type: ignore[attr-defined]
        assert (store.catalog._reserved_charge, store.catalog._reserved_disk) == (0, 0)
        entries = bench.backend.stats().entries
        assert await bench.backend.write(items[1:]) == [OK] * 5
        assert bench.backend.stats().entries == entries + 5


async def test_a_system_without_threads_is_outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one thread runs it does the work of all; where none does the caller is told."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = Pool(3, "test")
    gate = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(gate.wait)
    first = pool.submit(gate.wait)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        second = pool.submit(int)
    gate.set()
    assert await asyncio.wrap_future(first)
    assert await asyncio.wrap_future(second) == 0
    left: list[str] = []
    pool.close(lambda: left.append("left"))
    assert left == ["left"]
