"""One turn: match, restore layer by layer while the model computes, generate, store.

The model runs in a worker thread; the engine's loop feeds it. Everything that belongs to a turn
(cache, futures, lease) belongs to an engine-owned job, so a caller may go away at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import torch

from tierkv.errors import (
    AttachError,
    BackendError,
    CapacityError,
    ClosedError,
    LoadIncomplete,
    TierKVError,
)
from tierkv_adapters.chat.prompts import encode_prompt
from tierkv_adapters.chat.result import GenerateResult
from tierkv_adapters.hf.arguments import expected_new_tokens, with_our_cache
from tierkv_adapters.hf.cache import TierCache
from tierkv_adapters.hf.compat import base_model, cache_keyword, input_device, vocabulary_size
from tierkv_adapters.hf.view import CapturedView, RestoreView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.layout import Space
    from tierkv.mover.layers import LayerLoad
    from tierkv.session import Match, Session
    from tierkv.workers import Job, Workers
    from tierkv_adapters.hf.buffer import LayerKV

__all__ = ["Bound", "Counters", "Request", "Turn", "absorb"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.hf")
_TELLING = 256  # prompts shorter than this say little of how fast the model prefills
_RESTORES = 2  # a damaged block is found once: the second try gets the shorter prefix before it


@dataclass(slots=True)
class Counters:
    """What :class:`~tierkv_adapters.hf.result.Status` reports."""

    requests: int = 0
    stored: int = 0
    reused: int = 0
    restores_failed: int = 0
    stores_failed: int = 0
    why_not_reused: str | None = None
    why_not_stored: str | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """A model as it is now: its space, and the shape of its KV."""

    space: Space
    layers: tuple[LayerKV, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of ``generate``."""

    prompt: Any
    arguments: dict[str, Any]
    chat: bool = False
    append: bool | None = None
    started: float = field(default_factory=time.perf_counter)


class _Ended(Exception):
    """The caller is gone: the forward pass under way ends at its next layer."""


class _Relay:
    """Takes tokens from ``generate`` (Transformers' streamer protocol), passes on the new ones."""

    def __init__(self, emit: Callable[[int], None], started: float) -> None:
        self._emit = emit
        self._started = started
        self._prompt = True
        self._began = started
        self.first: float | None = None

    def begin(self) -> None:
        """Note that the model starts now."""
        self._began = time.perf_counter()

    @property
    def prefill(self) -> float:
        """Seconds from the model's start to the first token; 0 if there was none."""
        return self._started + self.first - self._began if self.first is not None else 0.0

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt once, then one token per step."""
        if self._prompt:
            self._prompt = False
            return
        if self.first is None:
            self.first = time.perf_counter() - self._started
        for token in value.reshape(-1).tolist():
            self._emit(int(token))

    def end(self) -> None:
        """Receive the end of the reply; the job's result says the same."""


async def absorb(job: Job[_T], stop: Callable[[], None]) -> _T:
    """Wait for ``job``; a cancellation calls ``stop`` and is re-raised once the job has ended.

    Raises:
        BaseException: what the job raised, unless the caller was cancelled.
    """
    try:
        return await job.wait()
    except asyncio.CancelledError:
        stop()
        # shielded, because a cancelled scope would wake us at every step of the loop; a native
        # cancel passes the shield and is absorbed: the first one is raised in the end
        with anyio.CancelScope(shield=True):
            while not job.done():
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await job.wait()
        raise


class Turn:
    """One request on one session; run it once, as an engine-owned job."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        workers: Workers,
        tiers: Sequence[str],
        counters: Counters,
        emit: Callable[[int], None],
        unchanged: Callable[[Bound], bool],
    ) -> None:
        self._unchanged = unchanged
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self._tiers = tiers
        self._counters = counters
        self._emit = emit
        self._cache: TierCache | None = None
        self._arrivals: dict[int, Future[None]] = {}
        self._ended: _Ended | None = None
        self._scope = anyio.CancelScope()

    def stop(self) -> None:
        """End the turn soon: within the time of one layer. Idempotent; call on the loop."""
        self._ended = self._ended or _Ended("the caller of generate went away")
        self._scope.cancel()
        if self._cache is not None:
            self._cache.stop(self._ended)
        _fail(self._arrivals, self._ended)

    async def run(self, session: Session, bound: Bound, request: Request) -> GenerateResult:
        """Answer ``request``; afterwards the session's history is prompt and reply.

        If it fails or is stopped, the history is what it was before.

        Raises:
            AttachError: if the prompt cannot be used.
            SessionBusyError: if the engine refuses a second turn on a busy session.
        """
        with self._scope:
            return await self._turn(session, bound, request)
        raise self._ended or _Ended("the turn was stopped")

    async def _turn(self, session: Session, bound: Bound, request: Request) -> GenerateResult:
        async with session:
            await session.begin_turn()
            try:
                before = session.token_ids
                try:
                    return await self._answer(session, bound, request, before)
                except BaseException:
                    session.remember(before)
                    raise
            finally:
                session.end_turn()

    async def _answer(
        self, session: Session, bound: Bound, request: Request, history: list[int]
    ) -> GenerateResult:
        ids = encode_prompt(
            request.prompt,
            history,
            self._tokenizer,
            chat=request.chat,
            append=request.append,
            vocabulary=vocabulary_size(self._model),
        )
        for attempt in range(_RESTORES + 1):
            relay = _Relay(self._emit, request.started)
            self._renew(bound, request, ids)
            # the last prompt token is always computed: its logits are the answer's beginning
            async with session.match(ids[:-1]) as match:
                # what would take longer to load than to compute anew is left where it is
                tokens = match.worth if attempt < _RESTORES else 0
                try:
                    output, by_tier = await self._generate(
                        match, bound, ids, request, relay, tokens
                    )
                except LoadIncomplete as error:
                    self._counters.restores_failed += 1
                    self._counters.why_not_reused = str(error)
                    _log.warning("session %s: %s", session.id, error)
                    continue
                if not tokens:
                    why = match.reason.value if match.reason else "prompt shorter than a block"
                    self._counters.why_not_reused = why
            break
        self._counters.reused += tokens // bound.space.block_tokens
        if not tokens and len(ids) >= _TELLING and relay.prefill > 0:
            session.computed(len(ids), relay.prefill)
        if await self._workers.run_long(self._unchanged, bound):
            await self._store(session, output)
        else:
            # whose KV this is, nobody can tell: adapters were switched while the model ran
            self._counters.why_not_stored = "the model changed during the call"
        session.remember(output)  # the last token has no KV yet, but it was said
        reply = output[len(ids) :]
        slowest = max(by_tier, key=self._tiers.index) if by_tier else None
        return GenerateResult(
            text=self._decode(reply),
            input_ids=ids,
            output_ids=output,
            prompt_tokens=len(ids),
            reused_tokens=tokens,
            tier=slowest,
            by_tier=by_tier,
            ttft_s=relay.first or 0.0,
        )

    def _decode(self, reply: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(reply, skip_special_tokens=True)
        return text

    def _renew(self, bound: Bound, request: Request, ids: list[int]) -> None:
        """Start with a fresh cache: a failed restore may have left rubbish in the last one."""
        more = expected_new_tokens(self._model, request.arguments, len(ids))
        self._cache = TierCache(bound.layers, reserve=len(ids) + more)
        self._arrivals = {}
        if self._ended is not None:
            self._cache.stop(self._ended)

    async def _generate(
        self,
        match: Match,
        bound: Bound,
        ids: list[int],
        request: Request,
        relay: _Relay,
        tokens: int,
    ) -> tuple[list[int], dict[str, int]]:
        cache = self._cache
        assert cache is not None
        layers: LayerLoad | None = None
        feed: Job[None] | None = None
        if tokens:
            cache.open_restore(tokens, bound.space.block_tokens)
            layers = match.layers(into=RestoreView(cache, tokens), tokens=tokens)
            self._arrivals = {layer.index: Future() for layer in bound.layers}
            cache.restoring(tokens, self._arrivals)
            feed = self._workers.spawn(_feed, layers, match, self._arrivals, name="hf-feed")
        run = self._workers.spawn(
            self._workers.run_long, self._call, cache, ids, request.arguments, relay, name="hf-run"
        )
        try:
            output = await absorb(run, self.stop)
        except BaseException:
            # a read that hangs holds nobody: it lands in this attempt's cache, which is dropped
            _fail(self._arrivals, LoadIncomplete(0, "the model stopped before all layers came"))
            match.close()
            raise
        if feed is not None:
            await feed.wait()  # the model has used every layer: this is over, or about to be
        return output, dict(layers.by_tier) if layers is not None else {}

    def _call(
        self, cache: TierCache, ids: list[int], arguments: Mapping[str, Any], relay: _Relay
    ) -> list[int]:
        """Run the model; in a worker thread.

        Full ids, full mask, and a cache shorter than the prompt: the one combination that every
        version of Transformers answers rightly.
        """
        relay.begin()
        tensor = torch.tensor([ids], dtype=torch.long, device=input_device(self._model))
        with torch.no_grad():
            output = self._model.generate(
                input_ids=tensor,
                attention_mask=torch.ones_like(tensor),
                streamer=relay,
                **{cache_keyword(self._model): cache},
                **with_our_cache(arguments),
            )
        result: list[int] = output[0].tolist()
        if result[: len(ids)] != ids:
            raise AttachError(
                f"{type(base_model(self._model)).__name__}.generate did not return the prompt it "
                "was given"
            )
        return result

    async def _store(self, session: Session, output: list[int]) -> None:
        cache, counters = self._cache, self._counters
        assert cache is not None
        view = CapturedView(cache)
        known = output[: view.tokens]
        try:
            stored = await session.store(known, view, start=min(cache.prefix, len(known)))
        except (BackendError, CapacityError, ClosedError) as error:
            # the reply is there and right; only the next turn will be slower
            counters.stores_failed += 1
            counters.why_not_stored = str(error)
            _log.warning("session %s: reply not stored: %s", session.id, error)
            return
        counters.stored += sum(block.state == "stored" for block in stored.blocks)
        skips = [block.reason.value for block in stored.blocks if block.reason is not None]
        if skips:
            counters.why_not_stored = f"skipped: {skips[0]}"
        elif not stored.blocks:
            counters.why_not_stored = "shorter than a block"


async def _feed(layers: LayerLoad, match: Match, arrivals: Mapping[int, Future[None]]) -> None:
    """Resolve each layer's future as it lands; whatever happens, none is left waiting."""
    failure: Exception = LoadIncomplete(0, "the load ended early")
    try:
        async for layer in layers:
            if not arrivals[layer].done():
                arrivals[layer].set_result(None)
    except LoadIncomplete as error:
        failure = error
    except TierKVError as error:
        failure = LoadIncomplete(_first_missing(arrivals), str(error))
    finally:
        _fail(arrivals, failure)
        match.close()  # the lease is not needed while the model writes its reply


def _first_missing(arrivals: Mapping[int, Future[None]]) -> int:
    return next((index for index, arrival in arrivals.items() if not arrival.done()), 0)


def _fail(arrivals: Mapping[int, Future[None]], error: Exception) -> None:
    for arrival in arrivals.values():
        if not arrival.done():
            arrival.set_exception(error)
