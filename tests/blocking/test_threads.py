"""Many threads on one manager: right bytes, and nobody waits for another's I/O."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.errors import SessionBusyError
from tierkv.testing.faults import Gated, inject
from tierkv.workers import Signal
from tierkv_backends.host import HostBackend
from tierkv_backends.nvme import NvmeBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkv.layout import Space

THREADS = 32
TURNS = 6


def _run(work: Callable[[int], None], count: int = THREADS) -> None:
    """Run ``work(i)`` in ``count`` threads at once; raises what any of them raised."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(begin, number) for number in range(count)]:
            done.result()


def test_32_threads_on_32_sessions(tmp_path: Path, no_thread_leaks: None) -> None:
    space, shared = kit.space(), kit.tokens(1, seed=999)
    tiers = kit.tiers("host+nvme", tmp_path, capacity="1MiB")  # too small for all of them
    with CacheManager(tiers=tiers, space=space) as manager:

        def chat(number: int) -> None:
            name = manager.create_session(f"s{number}", tenant="ab"[number % 2])
            ids = list(shared)
            with manager.use_session(name):
                for turn in range(TURNS):
                    ids += kit.tokens(1, seed=100 * number + turn)
                    kv = _memory(space, len(ids), number)
                    mine = kit.Memory(space.layout, len(ids))
                    loaded = manager.load(ids, mine.view)
                    assert mine.same(kv, loaded.tokens)
                    assert mine.untouched(loaded.tokens)
                    hits[number] += loaded.tokens > kit.BLOCK
                    manager.store(ids, kv.view)
                    assert manager.current_session() == name

        hits = [0] * THREADS
        _run(chat)
        assert sum(hits) > THREADS  # most turns found more than the shared block
        stats = manager.stats()
        assert (stats.leases, stats.sessions, stats.staging_used) == (0, THREADS, 0)
        assert {i.handles for i in manager.sessions()} == {0}


def _memory(space: Space, length: int, number: int) -> kit.Memory:
    """KV of a session: growing it keeps what was there; the first block is common to all."""
    kv = kit.Memory(space.layout, kit.BLOCK * (TURNS + 1), seed=number)
    for layer in kv.layers.values():
        for name, tensor in layer.items():
            tensor[:, : kit.BLOCK] = 0.5
            layer[name] = tensor[:, :length]
    return kv


def test_threads_on_one_session_take_turns(manager: CacheManager) -> None:
    space = manager.space()
    name = manager.create_session()

    def turn(number: int) -> None:
        ids, kv = kit.tokens(2, seed=number), kit.Memory(space.layout, 32, seed=number)
        manager.store(ids, kv.view, session=name)
        mine = kit.Memory(space.layout, 32)
        assert manager.load(ids, mine.view, session=name).tokens == 32
        assert mine.same(kv, 32)

    _run(turn, 16)
    assert manager.stats().leases == 0


def test_every_question_while_others_work(manager: CacheManager) -> None:
    space, ids = manager.space(), kit.tokens(2)
    kv = kit.Memory(space.layout, 32, seed=1)

    def work(number: int) -> None:
        for _ in range(10):
            name = manager.create_session(f"s{number}")
            manager.store(ids, kv.view, session=name)
            assert name in {i.id for i in manager.sessions()}
            manager.clear_session(name)
            assert len(manager.explain(ids, session=name)) == 2
            assert manager.health()["status"] == "open"
            assert manager.stats().sessions >= 1
            manager.flush()
            if number == 0:
                manager.reset()
            manager.destroy_session(name)

    _run(work, 8)
    stats = manager.stats()
    assert (stats.leases, stats.sessions) == (0, 0)


class _Gate:
    """A host tier over a disk tier whose reads wait at a gate."""

    def __init__(self, path: Path, space: Space) -> None:
        tiers = [
            tierkv.Tier("host", "1MiB", write_through=True),
            tierkv.Tier("nvme", "64MiB", path=str(path)),
        ]
        self.gate = Gated("read")
        self.manager = CacheManager(
            tiers=tiers,
            space=space,
            backends=[HostBackend(tiers[0]), inject(NvmeBackend(tiers[1]), self.gate)],
        )

    def arrived(self) -> None:
        """Wait until a read is at the gate."""
        self.manager.call(self._arrived)

    async def _arrived(self) -> None:
        async with asyncio.timeout(60):
            await self.gate.arrived()

    def open(self) -> None:
        """Let the reads through."""
        self.manager.call(self._open)

    async def _open(self) -> None:
        self.gate.open_gate()


def test_no_lock_is_held_across_io(tmp_path: Path, no_thread_leaks: None) -> None:
    space = kit.space()
    cold_ids, warm_ids = kit.tokens(2, seed=1), kit.tokens(2, seed=2)
    cold_kv, warm_kv = (kit.Memory(space.layout, 32, seed=s) for s in (1, 2))
    tiers = [tierkv.Tier("nvme", "64MiB", path=str(tmp_path))]
    with CacheManager(tiers=tiers, space=space) as before:
        before.store(cold_ids, cold_kv.view, session=before.create_session())

    gated = _Gate(tmp_path, space)
    with gated.manager as manager:
        for name in ("cold", "warm"):
            manager.create_session(name)
        mine = kit.Memory(space.layout, 32)
        with ThreadPoolExecutor(1) as pool:
            hangs = pool.submit(manager.load, cold_ids, mine.view, session="cold")
            gated.arrived()
            # one session's load hangs; everything else goes on, from this thread and from others
            manager.store(warm_ids, warm_kv.view, session="warm")

            def others(number: int) -> None:
                name = manager.create_session(f"s{number}")
                for _ in range(5):
                    ours = kit.Memory(space.layout, 32)
                    assert manager.load(warm_ids, ours.view, session=name).by_tier == {"host": 32}
                    assert ours.same(warm_kv, 32)
                    assert manager.health()["status"] == "open"

            _run(others, 8)
            assert {b.tier for b in manager.explain(cold_ids)} == {"nvme"}
            # a bounded load of the very same blocks gives up by itself
            impatient = kit.Memory(space.layout, 32)
            late = manager.load(cold_ids, impatient.view, session="warm", deadline="50ms")
            assert late.tokens == 0
            assert impatient.untouched()
            assert manager.sessions()
            assert not hangs.done()
            assert mine.untouched()
            gated.open()
            assert hangs.result(20).by_tier == {"nvme": 32}
        assert mine.same(cold_kv, 32)
        assert manager.stats().leases == 0


def test_closing_while_a_load_hangs_lets_it_go(tmp_path: Path, no_thread_leaks: None) -> None:
    space, ids = kit.space(), kit.tokens(2, seed=1)
    kv = kit.Memory(space.layout, 32, seed=1)
    tiers = [tierkv.Tier("nvme", "64MiB", path=str(tmp_path))]
    with CacheManager(tiers=tiers, space=space) as before:
        before.store(ids, kv.view, session=before.create_session())

    gated = _Gate(tmp_path, space)
    mine = kit.Memory(space.layout, 32)
    with ThreadPoolExecutor(1) as pool:
        with gated.manager as manager:
            name = manager.create_session()
            hangs = pool.submit(manager.load, ids, mine.view, session=name)
            gated.arrived()
        error = hangs.exception(20)
    assert isinstance(error, tierkv.errors.ClosedError) or hangs.result().tokens == 0
    assert mine.untouched()


class _Turn:
    """A turn that another thread holds on a session, until :meth:`end`."""

    def __init__(self, manager: CacheManager, name: str) -> None:
        self._manager, self._name = manager, name
        self._inside, self._leave = threading.Event(), Signal()
        self._thread = threading.Thread(target=manager.call, args=(self._hold,))
        self._thread.start()
        assert self._inside.wait(60)

    async def _hold(self) -> None:
        async with self._manager.handle(self._name) as session:
            await session.begin_turn()
            self._inside.set()
            await self._leave.wait()
            session.end_turn()

    def end(self) -> None:
        """Let it go."""
        self._manager.call(self._end)
        self._thread.join()

    async def _end(self) -> None:
        self._leave.set()


def test_clearing_waits_for_the_turn_under_way(manager: CacheManager) -> None:
    ids, kv = kit.tokens(2), kit.Memory(manager.space().layout, 32, seed=1)
    name = manager.create_session()
    manager.store(ids, kv.view, session=name)
    turn = _Turn(manager, name)
    with ThreadPoolExecutor(1) as pool:
        clearing = pool.submit(manager.clear_session, name)
        for _ in range(5):
            assert manager.sessions()[0].tokens == 32
        assert not clearing.done()
        turn.end()
        clearing.result(20)
    assert manager.sessions()[0].tokens == 0


def test_a_busy_session_can_refuse(no_thread_leaks: None) -> None:
    space, tiers = kit.space(), [tierkv.Tier("host", "1MiB")]
    with CacheManager(tiers=tiers, space=space, busy="refuse") as manager:
        ids, kv = kit.tokens(2), kit.Memory(space.layout, 32, seed=1)
        name = manager.create_session()
        turn = _Turn(manager, name)
        for act in (
            lambda: manager.clear_session(name),
            lambda: manager.store(ids, kv.view, session=name),
            lambda: manager.load(ids, kv.view, session=name),
        ):
            with pytest.raises(SessionBusyError):
                act()
        turn.end()
        assert manager.store(ids, kv.view, session=name).stored == 2


def test_destroying_a_session_does_not_wait_for_its_turn(manager: CacheManager) -> None:
    name = manager.create_session()
    turn = _Turn(manager, name)
    manager.destroy_session(name)
    assert manager.sessions() == []
    assert manager.create_session(name) == name  # another session, free at once
    kv = kit.Memory(manager.space().layout, 32, seed=1)
    assert manager.store(kit.tokens(2), kv.view, session=name).stored == 2
    turn.end()
    assert manager.sessions()[0].tokens == 32
    assert manager.stats().leases == 0
