"""Large copies in RAM: one hop for all of it, and yet a cancelled caller waits for one block."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running
from tierkv.layout import Layout, Space
from tierkv.mover.blockcopies import Blocks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from tests.engine.rig import Rig

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
BLOCKS = 8
SPACE = Space(tierkv.Identity("big", "rev1"), Layout.uniform(8, 8, 64, "float32"), block_tokens=32)
"""A block takes 1 MiB."""
GUARD_S = 60


class Gate:
    """Holds the thread that copies, before the block of some number."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._go = threading.Event()
        self.reached = threading.Event()
        self.calls = 0

    def before(self) -> None:
        """Called by the thread before each block."""
        self.calls += 1
        if self.calls == self._at:
            self.reached.set()
            assert self._go.wait(GUARD_S)

    def open(self) -> None:
        """Let the thread go on."""
        self._go.set()


def gated(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> Gate:
    """Put a gate before each call of a method of Blocks."""
    gate, method = Gate(at), getattr(Blocks, name)

    def wrapped(self: Blocks, *args: int) -> Any:
        gate.before()
        return method(self, *args)

    monkeypatch.setattr(Blocks, name, wrapped)
    return gate


@asynccontextmanager
async def host(tmp_path: Path) -> AsyncIterator[Rig]:
    """An engine with RAM for everything here, several times."""
    async with running("host", tmp_path, space=SPACE, capacity="128MiB", tick=60) as rig:
        yield rig


async def cancel_inside(
    gate: Gate, what: Callable[[], Coroutine[Any, Any, object]], kind: str
) -> None:
    """Cancel it while a thread copies, then let the thread go on; it must end as cancelled."""
    scope = anyio.CancelScope()
    ended: list[str] = []
    tasks: list[asyncio.Task[Any]] = []

    async def inner() -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            with scope:
                await what()
                ended.append("completed")
        except asyncio.CancelledError:
            ended.append("natively")  # it ends here: nobody else was cancelled
        if scope.cancelled_caught:
            ended.append("by the scope")

    async with asyncio.timeout(GUARD_S), anyio.create_task_group() as group:
        group.start_soon(inner)
        reached = False
        while not reached:
            await asyncio.sleep(0.001)
            reached = gate.reached.is_set()
        if kind == "native":
            tasks[0].cancel()
        else:
            scope.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ended, "it went on without the thread that is at its memory"
        gate.open()
    assert ended == ["natively" if kind == "native" else "by the scope"]


@pytest.mark.parametrize("kind", ["native", "scope"])
async def test_c_a_cancelled_load_waits_for_one_block(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = kit.tokens(BLOCKS, block=32)
    kv = kit.Memory(SPACE.layout, len(ids), seed=1)
    back = kit.Memory(SPACE.layout, len(ids))
    async with host(tmp_path) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            gate = gated(monkeypatch, "scatter", 3)

            async def read() -> None:
                async with session.match(ids) as match:
                    await match.load(into=back.view)

            await cancel_inside(gate, read, kind)
            assert gate.calls == 3, "it copied on for nobody"
            assert back.untouched(3 * 32)
            monkeypatch.undo()
            tokens, again = await load(session, ids)
            assert tokens == len(ids)
            assert again.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.parametrize("kind", ["native", "scope"])
async def test_c_a_cancelled_store_waits_for_one_block(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = kit.tokens(BLOCKS, block=32)
    kv = kit.Memory(SPACE.layout, len(ids), seed=1)
    async with host(tmp_path) as rig:
        async with rig.engine.session("a") as session:
            gate = gated(monkeypatch, "gather", 3)

            async def write() -> None:
                await session.store(ids, kv.view)

            await cancel_inside(gate, write, kind)
            assert gate.calls == 3, "it copied on for nobody"
            assert (await load(session, ids))[0] == 0
            monkeypatch.undo()
            assert (await session.store(ids, kv.view)).stored == BLOCKS
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


async def test_copies_of_more_than_a_slice_take_one_hop(tmp_path: Path) -> None:
    """40 MiB are no 32 MiB and 8 MiB: filling and draining a hop costs as much as copying 2 MiB."""
    blocks = 40
    ids = kit.tokens(blocks, block=32)
    kv = kit.Memory(SPACE.layout, len(ids), seed=1)
    async with running("host", tmp_path, space=SPACE, capacity="512MiB", tick=60) as rig:
        async with rig.engine.session("a") as session:
            before = rig.engine.stats().thread_hops
            assert (await session.store(ids, kv.view)).stored == blocks
            assert rig.engine.stats().thread_hops - before == 1
            tokens, back = await load(session, ids)
            assert rig.engine.stats().thread_hops - before == 2
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


async def test_a_deadline_is_looked_at_between_slices(tmp_path: Path) -> None:
    """A load with a deadline takes its 40 MiB in slices; without one, in one go."""
    blocks = 40
    ids = kit.tokens(blocks, block=32)
    kv, back = kit.Memory(SPACE.layout, len(ids), seed=1), kit.Memory(SPACE.layout, len(ids))
    async with running("host", tmp_path, space=SPACE, capacity="512MiB", tick=60) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            async with session.match(ids) as match:
                before = rig.engine.stats().thread_hops
                loaded = await match.load(into=back.view, deadline="1h")
                assert rig.engine.stats().thread_hops - before == 2
            assert loaded.tokens == len(ids)
            assert back.same(kv, loaded.tokens)
        await rig.at_rest()


async def test_a_store_never_takes_all_of_a_small_tier_at_once(tmp_path: Path) -> None:
    """What one batch brings it cannot evict: of a tier of 48 MiB a batch takes 32 MiB, not more."""
    blocks = 40
    ids = kit.tokens(blocks, block=32)
    kv = kit.Memory(SPACE.layout, len(ids), seed=1)
    async with running("host", tmp_path, space=SPACE, capacity="48MiB", tick=60) as rig:
        async with rig.engine.session("a") as session:
            before = rig.engine.stats().thread_hops
            assert (await session.store(ids, kv.view)).stored == blocks
            assert rig.engine.stats().thread_hops - before == 2
        await rig.at_rest()
