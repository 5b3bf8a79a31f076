"""The tier's work on the engine's loop: rows of vLLM's CPU tier to blocks, and back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tierkv import views
from tierkv.decisions.types import MissReason
from tierkv.session.batches import StoreRequest
from tierkv_adapters.vllm.tier.keys import ROW_TENSOR, ROW_TOKENS, spell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tierkv.blocking import CacheManager
    from tierkv.layout import Space
    from tierkv.session import Session
    from tierkv.views import PagedView

__all__ = ["RowsLoaded", "RowsStored", "TierEngine"]

_WAVE: Final = 64  # rows that are copied together; each needs a session of its own
_WAVES: Final = 4  # of each direction under way at once
_GRACE_S: Final = 1.0  # after its deadline a load that has not ended is cancelled


@dataclass(slots=True)
class RowsLoaded:
    """What a load brought; grows while it goes on.

    Attributes:
        keys: Keys whose rows are in place, verified.
        reasons: Why the others are not, by key.
    """

    keys: list[bytes] = field(default_factory=list)
    reasons: dict[bytes, str] = field(default_factory=dict)


@dataclass(slots=True)
class RowsStored:
    """What a store kept.

    Attributes:
        stored: Keys that are stored anew.
        present: How many were there already.
        skipped: How many were not stored.
    """

    stored: list[bytes] = field(default_factory=list)
    present: int = 0
    skipped: int = 0


class TierEngine:
    """Copies rows. Every coroutine runs on the engine's loop.

    Rows are copied in waves, since all chunks of a job come from one prompt and one backend call
    a wave is enough. Each row of a wave goes through a session of its own, as a session has one
    history; sessions are kept and used again, and own nothing: chunks stay, evictable.

    Args:
        manager: The engine.
        space: Whose blocks.
        rows: vLLM's CPU tier ``[chunks, bytes]``. A row is only touched between the beginning and
            the end of a job that names it.
        ttl: Seconds that a chunk lives after its last use; None: until it is evicted.
        clock: Clock of the deadlines.
    """

    def __init__(
        self,
        manager: CacheManager,
        space: Space,
        rows: memoryview,
        *,
        ttl: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._space = space
        self._ttl = ttl
        self._clock = clock
        whole = torch.from_numpy(np.asarray(rows)).view(torch.uint8)
        self._rows: torch.Tensor | None = whole.view(len(rows), 1, ROW_TOKENS, -1)
        self._loads = asyncio.Semaphore(_WAVES)
        self._stores = asyncio.Semaphore(_WAVES)
        self._numbers = count()
        self._idle: list[list[Session]] = []
        self._opened: list[Session] = []

    def __repr__(self) -> str:
        return f"<TierEngine: {len(self._opened)} sessions>"

    @asynccontextmanager
    async def _wave(self, turns: asyncio.Semaphore) -> AsyncIterator[list[Session]]:
        async with turns:
            sessions = self._idle.pop() if self._idle else await self._open()
            try:
                yield sessions
            finally:
                self._idle.append(sessions)

    async def _open(self) -> list[Session]:
        engine = self._manager.engine
        sessions = []
        for _ in range(_WAVE):
            name = f"vllm-tier-{next(self._numbers)}"
            session = engine.session(name, ttl=self._ttl, space=self._space)
            self._opened.append(await session.__aenter__())
            sessions.append(session)
        return sessions

    async def move(self, space: Space) -> None:
        """Work in another space from now on. After the last job has ended."""
        await self.close()
        self._space = space

    async def close(self) -> None:
        """Leave all sessions. After the last job has ended."""
        opened, self._opened = self._opened, []
        self._idle.clear()
        for session in opened:
            await session.__aexit__(None, None, None)
            session.destroy()

    def let_go(self) -> None:
        """Let go of vLLM's memory; in any thread, after the last job has ended."""
        self._rows = None

    def _view(self, chunk: int) -> PagedView:
        assert self._rows is not None, "a job after close()"
        return views.paged({0: {ROW_TENSOR: self._rows}}, [chunk], page_tokens=ROW_TOKENS)

    async def load(
        self, keys: Sequence[bytes], chunks: Sequence[int], until: float | None, into: RowsLoaded
    ) -> None:
        """Bring rows. What is not named in ``into`` when this ends was not touched.

        Args:
            keys: Which chunks.
            chunks: The row of each.
            until: When to give up; None: when the tiers do.
            into: Gets what came, as it comes, so that a load that is cut short has done so much.

        Raises:
            TierKVError: whatever kept the rest from being tried.

        Cancellation: what is under way is waited for (a slice of a copy), and then nothing
            touches a row any more.
        """
        late = None if until is None else max(until - self._clock(), 0.0) + _GRACE_S
        try:
            async with asyncio.timeout(late) as limit:
                for first in range(0, len(keys), _WAVE):
                    part = slice(first, first + _WAVE)
                    async with self._wave(self._loads) as sessions:
                        await self._load(sessions, keys[part], chunks[part], until, into)
        except TimeoutError:
            if not limit.expired():
                raise
        for key in set(keys).difference(into.keys):
            into.reasons.setdefault(key, MissReason.DEADLINE.value)

    async def _load(
        self,
        sessions: Sequence[Session],
        keys: Sequence[bytes],
        chunks: Sequence[int],
        until: float | None,
        into: RowsLoaded,
    ) -> None:
        engine = self._manager.engine
        asked = [(s, spell(key)) for s, key in zip(sessions, keys, strict=False)]
        async with engine.match_many(asked) as matches:
            wanted = []
            for key, chunk, match in zip(keys, chunks, matches, strict=True):
                if match.tokens:
                    wanted.append((key, match, self._view(chunk)))
                else:
                    into.reasons[key] = (match.reason or MissReason.NEVER_STORED).value
            left = None if until is None else max(until - self._clock(), 0.0)
            pairs = [(match, view) for _, match, view in wanted]
            results = await engine.load_many(pairs, deadline=left)
            for (key, _, _), result in zip(wanted, results, strict=True):
                if result.tokens == ROW_TOKENS:
                    into.keys.append(key)
                else:
                    into.reasons[key] = (result.reason or MissReason.FAILED).value

    async def store(self, keys: Sequence[bytes], chunks: Sequence[int], into: RowsStored) -> None:
        """Keep rows; they may be overwritten when this ends.

        Args:
            keys: Which chunks.
            chunks: The row of each.
            into: Gets what became of them.

        Raises:
            TierKVError: whatever kept the rest from being tried.

        Cancellation: as a store of the engine; nothing reads a row afterwards.
        """
        engine = self._manager.engine
        for first in range(0, len(keys), _WAVE):
            part = slice(first, first + _WAVE)
            async with self._wave(self._stores) as sessions:
                mine = zip(sessions, keys[part], chunks[part], strict=False)
                asked = [StoreRequest(s, spell(k), self._view(chunk)) for s, k, chunk in mine]
                results = await engine.store_many(asked)
            for key, result in zip(keys[part], results, strict=True):
                if result.stored:
                    into.stored.append(key)
                into.present += result.present
                into.skipped += result.skipped
