"""The tierkv half of :mod:`benchmarks.peers`: engines that do one operation at a time."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

import tierkv
from benchmarks.running import OnLoop
from tierkv.session.nowait import get_nowait

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["BLOCK", "COPIES", "Disk", "Ram", "Timed", "paged", "space_of"]

BLOCK: Final = 16
COPIES: Final = 256
_HEADS, _DIM = 8, 128
_SMALL_BYTES: Final = 64 << 10
_LARGE_BYTES: Final = 32 << 20


class Timed(NamedTuple):
    """What one round took, in seconds, and how many operations (or bytes) it had."""

    wall: float
    cpu: float
    operations: float

    @property
    def us(self) -> float:
        """CPU microseconds of one operation."""
        return self.cpu / self.operations * 1e6

    @property
    def gb_s(self) -> float:
        """Gigabytes a second."""
        return self.operations / self.wall / 1e9


@contextmanager
def _clock(out: list[Timed], operations: float) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    out.append(Timed(time.perf_counter() - wall, time.process_time() - cpu, operations))


def space_of(layers: int, block: int) -> tierkv.Space:
    """Space of a model with 8 heads of 128 dimensions in bfloat16."""
    layout = tierkv.Layout.uniform(layers, _HEADS, _DIM, "bfloat16")
    return tierkv.Space(tierkv.Identity("peers", "1"), layout, block_tokens=block)


def paged(layers: int, blocks: int, block: int) -> Any:
    """Memory that was written, a page for each block, and a view of it."""
    shape = (blocks, _HEADS, block, _DIM)
    pools = [(torch.ones(shape).bfloat16(), torch.ones(shape).bfloat16()) for _ in range(layers)]
    return tierkv.views.paged(pools, list(range(blocks)))


class _Side(OnLoop):
    """An engine on a loop of its own."""

    def __init__(self, space: tierkv.Space, tiers: Sequence[tierkv.Tier], **settings: Any) -> None:
        self.space = space
        self.engine = tierkv.open(tiers=list(tiers), space=space, **settings)
        super().__init__()

    async def _open(self) -> None:
        await self.stack.enter_async_context(self.engine)

    async def session(self, name: str) -> Any:
        """An open session."""
        return await self.stack.enter_async_context(self.engine.session(name))


class Ram(_Side):
    """64 KiB blocks in RAM: one long history, and single blocks beside it."""

    def __init__(self, chunks: int) -> None:
        room = chunks * (_SMALL_BYTES + 4096)  # a frame has a header page
        super().__init__(
            space_of(1, BLOCK),
            [tierkv.Tier("host", room, high=1.0, low=1.0, options={"touch": room})],
        )
        self._chunks = chunks
        self._fresh = 1 << 20

    def fill(self, history: int) -> None:
        """Store a history of so many blocks, lease it, and fill the rest with single blocks."""
        self.run(self._fill(history))

    async def _fill(self, history: int) -> None:
        self._session = await self.session("history")
        self._ids = [n % 50_000 for n in range(history * BLOCK)]
        memory = paged(1, history, BLOCK)
        stored = await self._session.store(self._ids, memory)
        assert stored.stored == history
        self._history = history
        await self.stack.enter_async_context(self._session.match(self._ids))  # leases them
        self._one, self._some = paged(1, 1, BLOCK), paged(1, COPIES, BLOCK)
        self._other = await self.session("others")
        self._reader = await self.session("reader")
        for _ in range(self._chunks - history):
            await self._store(1)

    async def _store(self, blocks: int) -> None:
        """Store blocks that were never seen, each of a history of its own."""
        for _ in range(blocks):
            self._fresh += 1
            stored = await self._other.store([self._fresh] * BLOCK, self._one)
            assert stored.stored == 1

    def get(self) -> Timed:
        """Take each block in place and release it."""

        async def go() -> None:
            session = self._session
            with _clock(out, self._history):
                for block in range(self._history):
                    get_nowait(session, block).release()  # type: ignore[union-attr]

        out: list[Timed] = []
        self.run(go())
        return out[0]

    def get_tensor(self) -> Timed:
        """As :meth:`get`, and look at its memory as a tensor (which checks the header)."""

        async def go() -> None:
            session = self._session
            with _clock(out, self._history):
                for block in range(self._history):
                    with get_nowait(session, block) as held:  # type: ignore[union-attr]
                        held.tensor(0, "k")

        out: list[Timed] = []
        self.run(go())
        return out[0]

    def copy(self, calls: int = 1) -> Timed:
        """Match and load 256 blocks in one call, so many times."""

        async def go() -> None:
            with _clock(out, COPIES * calls):
                for _ in range(calls):
                    async with self._reader.match(self._ids[: COPIES * BLOCK]) as match:
                        loaded = await match.load(self._some)
                    assert loaded.tokens == COPIES * BLOCK

        out: list[Timed] = []
        self.run(go())
        return out[0]

    def put_full(self, count: int, calls: int = 1) -> Timed:
        """Store so many new blocks in one call, so many times; each needs an eviction."""

        async def go() -> None:
            prompts = [[self._fresh + call] * (BLOCK * count) for call in range(1, calls + 1)]
            self._fresh += calls
            with _clock(out, count * calls):
                for ids in prompts:
                    stored = await self._other.store(ids, self._some)
                    assert stored.stored == count

        out: list[Timed] = []
        self.run(go())
        return out[0]


class Disk(_Side):
    """32 MiB blocks on disk: 256 tokens of a model with 32 layers."""

    def __init__(self, directory: Path, chunks: int) -> None:
        room = (3 * chunks + 2) * _LARGE_BYTES
        tier = tierkv.Tier("nvme", room, path=str(directory))
        super().__init__(space_of(32, 256), [tier], staging=chunks * _LARGE_BYTES + (64 << 20))
        self._chunks = chunks
        self._turn = 0

    def begin(self) -> None:
        """Make its memory real, and have segments that were written before."""
        self._memory = paged(32, self._chunks, 256)
        self._session = self.run(self.session("disk"))
        for _ in range(3):
            self.put(sync=False)

    def _ids(self) -> list[int]:
        return [self._turn] * (256 * self._chunks)

    def put(self, *, sync: bool) -> Timed:
        """Store new blocks until they are written; with ``sync``, until they are durable."""

        async def go() -> None:
            self._turn += 1
            with _clock(out, self._chunks * _LARGE_BYTES):
                stored = await self._session.store(self._ids(), self._memory)
                if sync:
                    await self._session.flush()
            assert stored.stored == self._chunks

        out: list[Timed] = []
        self.run(go())
        return out[0]

    def read(self) -> Timed:
        """Load what was stored last, which no cache has, into the caller's memory."""

        async def go() -> None:
            with _clock(out, self._chunks * _LARGE_BYTES):
                async with self._session.match(self._ids()) as match:
                    loaded = await match.load(self._memory)
            assert loaded.by_tier == {"nvme": 256 * self._chunks}

        out: list[Timed] = []
        self.run(go())
        return out[0]
