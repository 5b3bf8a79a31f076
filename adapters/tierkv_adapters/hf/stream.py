"""Token streams: a turn whose tokens are taken one by one; it ends when nobody takes them."""

from __future__ import annotations

import asyncio
import contextlib
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tierkv.errors import ClosedError
from tierkv_adapters.chat.prompts import Deltas
from tierkv_adapters.chat.result import Token
from tierkv_adapters.hf.turn import absorb

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocking import CacheManager
    from tierkv.workers import Job
    from tierkv_adapters.chat.result import GenerateResult
    from tierkv_adapters.hf.turn import Turn

__all__ = ["Begin", "Started", "SyncTokenStream", "TokenStream"]


class Started(NamedTuple):
    """A turn under way."""

    turn: Turn
    job: Job[GenerateResult]

    async def end(self) -> None:
        """Stop the turn unless it is over, and wait until it is.

        A turn that was stopped ends with an error by design; one that failed has raised before.
        """
        if not self.job.done():
            self.turn.stop()
        with contextlib.suppress(Exception):
            await absorb(self.job, self.turn.stop)


if TYPE_CHECKING:
    Begin = Callable[[Callable[[int], None], Callable[[], None]], Started]
    """Starts the turn, on the engine's loop. Takes what to call per token (in the model's thread)
    and at the end of the turn (on the loop)."""


class TokenStream:
    """``async with kv.stream(...) as tokens``, then ``async for token in tokens``.

    Attributes:
        result: The whole reply, once the iteration is over.
    """

    def __init__(self, begin: Begin, tokenizer: Any) -> None:
        self.result: GenerateResult | None = None
        self._begin = begin
        self._text = Deltas(tokenizer)
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._started: Started | None = None

    async def __aenter__(self) -> Self:
        loop, queue = asyncio.get_running_loop(), self._queue

        def emit(token: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: so is whoever listened
                loop.call_soon_threadsafe(queue.put_nowait, token)

        self._started = self._begin(emit, lambda: queue.put_nowait(None))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._started is not None
        await self._started.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if self._started is None:
            raise ClosedError("use a token stream inside its 'async with'")
        token = await self._queue.get()
        if token is None:
            self._queue.put_nowait(None)  # a further call ends at once, too
            self.result = await self._started.job.wait()
            raise StopAsyncIteration
        return Token(token, self._text.push(token))


class SyncTokenStream:
    """``with kv.stream(...) as tokens``, then ``for token in tokens``; for managers.

    Attributes:
        result: The whole reply, once the iteration is over.
    """

    def __init__(self, manager: CacheManager, begin: Begin, tokenizer: Any) -> None:
        self.result: GenerateResult | None = None
        self._manager = manager
        self._begin = begin
        self._text = Deltas(tokenizer)
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._started: Started | None = None

    def __enter__(self) -> Self:
        self._started = self._manager.call(self._start)
        return self

    async def _start(self) -> Started:
        return self._begin(self._queue.put, lambda: self._queue.put(None))

    def __exit__(self, *_: object) -> None:
        self._manager.call(self._stop)

    async def _stop(self) -> None:
        assert self._started is not None
        await self._started.end()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        if self._started is None:
            raise ClosedError("use a token stream inside its 'with'")
        token = self._queue.get()
        if token is None:
            self._queue.put(None)
            self.result = self._manager.call(self._started.job.wait)
            raise StopIteration
        return Token(token, self._text.push(token))
