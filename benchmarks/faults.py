"""Thousands of cancelled calls on one engine after the other, and what they left behind.

Puts, gets, layer-wise loads, prefetches and closes are cancelled at random suspensions, by a scope
or natively, some of them while a thread hangs inside the backend. What must hold: no warning and no
stray exception; a caller's buffer has right bytes or was not written, and never changes after the
call has ended, also not when the threads that hung go on; at rest no lease, buffer, reservation,
descriptor, thread or temporary file is left. A part of :mod:`benchmarks.acceptance`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import anyio
import torch

import tierkv
from tierkv.errors import LoadIncomplete, TierKVError
from tierkv.registry import resolve
from tierkv.testing.cancel import Stepped
from tierkv.testing.faults import Hanging, inject

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from tierkv.abc import Device, View
    from tierkv.testing.faults import Faulty

__all__ = ["KINDS", "CancelReport", "cancels"]

KINDS: Final = ("host", "nvme", "file", "device cpu", "device sim")
_LAYERS, _HEADS, _DIM, _BLOCK, _BLOCKS = 2, 8, 64, 16, 6
_FRAME: Final = _LAYERS * 2 * _HEADS * _DIM * _BLOCK * 4 + 4096  # 132 KiB: six take a thread hop
_PROMPTS: Final = 40
_SENTINEL: Final = -7.0
_LIFE: Final = 500  # calls of one engine
_TOGETHER: Final = 4
_SPACE: Final = tierkv.Space(
    tierkv.Identity("cancels", "1"),
    tierkv.Layout.uniform(_LAYERS, _HEADS, _DIM, "float32"),
    block_tokens=_BLOCK,
)


@dataclass
class CancelReport:
    """What a series of cancelled calls came to.

    Attributes:
        calls: Calls made, by operation.
        cancels: Cancellations, at whatever suspension.
        cancelled: Calls that ended by theirs; the others had got what they wanted.
        hung: Calls during which a thread hung in the backend.
        tokens: Tokens that loads brought.
        wrong: Buffers with a wrong byte.
        late: Buffers that were written after their call had ended.
        warned: Warnings, and exceptions that nobody took.
        problems: Everything that must not be, in words; empty if all held.
    """

    calls: dict[str, int] = field(default_factory=dict)
    cancels: int = 0
    cancelled: int = 0
    hung: int = 0
    tokens: int = 0
    wrong: int = 0
    late: int = 0
    warned: int = 0
    problems: list[str] = field(default_factory=list)


class _Memory:
    """A caller's tensors: full of a sentinel, or of what belongs to a prompt."""

    def __init__(self, device: Device | None = None) -> None:
        shape = (_LAYERS, 2, _HEADS, _BLOCKS * _BLOCK, _DIM)
        nbytes = _LAYERS * 2 * _HEADS * _BLOCKS * _BLOCK * _DIM * 4
        raw = device.allocate(nbytes) if device is not None else None
        self.all = torch.empty(shape) if raw is None else raw.view(torch.float32).view(shape)
        self.all.fill_(_SENTINEL)

    @property
    def view(self) -> View:
        """Dense view of it."""
        return tierkv.views.dense([(layer[0], layer[1]) for layer in self.all])

    def wrong(self, right: torch.Tensor, tokens: int | None) -> bool:
        """Whether a tensor of a block is neither right nor untouched, or one that is due is not."""
        for block in range(_BLOCKS):
            span = slice(block * _BLOCK, (block + 1) * _BLOCK)
            mine, its = self.all[:, :, :, span], right[:, :, :, span]
            same = (mine == its).flatten(2).all(2)
            free = (mine == _SENTINEL).flatten(2).all(2)
            if not (same | free).all() or (
                tokens is not None and span.stop <= tokens and free.any()
            ):
                return True
        return False


@lru_cache(maxsize=_PROMPTS)
def _right(prompt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(prompt)
    shape = (_LAYERS, 2, _HEADS, _BLOCKS * _BLOCK, _DIM)
    return torch.randn(shape, generator=generator)


def _tiers(kind: str, place: Path, seed: int) -> list[tierkv.Tier]:
    small, large = 60 * _FRAME, 400 * _FRAME
    if kind.startswith("device"):
        device = "cpu" if kind == "device cpu" else f"sim:{seed}"
        return [tierkv.Tier("device", small, device=device), tierkv.Tier("host", large)]
    if kind == "host":
        return [tierkv.Tier("host", small)]
    return [tierkv.Tier("host", small), tierkv.Tier(kind, large, path=str(place / kind))]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class _Life:
    """One engine from its opening to its (perhaps cancelled) close."""

    def __init__(
        self, engine: tierkv.Engine, last: Faulty, seed: int, report: CancelReport
    ) -> None:
        self._engine = engine
        self._last = last  # the tier in which threads hang
        self._rng = random.Random(seed)
        self._report = report
        self._kept: list[tuple[_Memory, torch.Tensor]] = []
        self._number = 0

    async def run(self, calls: int) -> None:
        """Make so many calls, some at the same time; then look at everything that is left."""
        async with anyio.create_task_group() as group:
            for share in range(_TOGETHER):
                group.start_soon(self._some, calls // _TOGETHER + (share < calls % _TOGETHER))
        await self._at_rest()

    async def _some(self, calls: int) -> None:
        for _ in range(calls):
            await self._one()
            if len(self._kept) > 40:
                await self._look_again()

    async def _one(self) -> None:
        rng, report = self._rng, self._report
        self._number += 1
        name = rng.choice(("put", "put", "get", "get", "layers", "prefetch"))
        prompt, number = rng.randrange(_PROMPTS), self._number
        resident = getattr(self._engine.core.levels[0].resident, "device", None)
        memory = _Memory(resident if rng.random() < 0.5 else None)
        report.calls[name] = report.calls.get(name, 0) + 1
        tokens: int | None = None
        hang: Hanging | None = None
        if rng.random() < 0.03:
            hang = Hanging("read", "write", times=1)
            self._last.faults.append(hang)
            asyncio.get_running_loop().call_later(0.05, hang.release)
        if name == "put":
            memory.all.copy_(_right(prompt))
        operation: Callable[[], Awaitable[int | None]] = getattr(self, f"_{name}")
        operation = _with(operation, prompt, number, memory)
        tokens = await _cancelled(operation, rng, report, hung=hang is not None)
        if name == "put":
            memory.all.fill_(_SENTINEL)  # the tensors may be overwritten once the call has ended
        elif memory.wrong(_right(prompt), tokens):
            report.wrong += 1
        report.tokens += tokens or 0
        self._kept.append((memory, memory.all.clone()))
        if hang is not None:
            report.hung += hang.entered
            hang.active = False
            hang.release()
            self._last.faults.remove(hang)

    # ------------------------------------------------------------------ calls

    async def _put(self, prompt: int, number: int, memory: _Memory) -> int | None:
        ids = _ids(prompt)[: self._rng.randint(1, _BLOCKS) * _BLOCK]
        async with self._engine.session(f"s{number}") as session:
            await session.store(ids, memory.view)
        return None

    async def _get(self, prompt: int, number: int, memory: _Memory) -> int | None:
        handle = self._engine.session(f"s{number}")
        async with handle as session, session.match(_ids(prompt)) as match:
            return (await match.load(memory.view)).tokens

    async def _layers(self, prompt: int, number: int, memory: _Memory) -> int | None:
        handle = self._engine.session(f"s{number}")
        async with handle as session, session.match(_ids(prompt)) as match:
            try:
                async for _ in match.layers(memory.view):
                    pass
            except LoadIncomplete:
                return None
            return match.tokens

    async def _prefetch(self, prompt: int, number: int, memory: _Memory) -> int | None:
        job = await self._engine.prefetch(tokens=_ids(prompt))
        await job.wait()
        return None

    # ------------------------------------------------------------------ afterwards

    async def _look_again(self) -> None:
        """No buffer may have changed since its call ended."""
        kept, self._kept = self._kept, []
        await asyncio.sleep(0.002)
        self._report.late += sum(not torch.equal(m.all, was) for m, was in kept)

    async def _at_rest(self) -> None:
        core, runtime = self._engine.core, self._engine.runtime
        end = time.monotonic() + 30
        while runtime.fetcher.in_flight or runtime.behind.pending or core.storing:
            if time.monotonic() > end:
                self._report.problems.append("work is under way 30 s after the last call")
                return
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        await self._look_again()
        core.decisions.check()
        for level in core.levels:
            if level.doomed:
                await self._engine.workers.spawn(core.purge, level).wait()
            entries, stats = core.decisions.entries(level.index), level.backend.stats()
            if core.decisions.reserved(level.index):
                self._report.problems.append(f"{level.name}: reservations are left")
            if stats.entries != entries or stats.live_bytes != core.decisions.used(level.index):
                self._report.problems.append(f"{level.name}: {entries} parts booked, {stats}")
        if core.decisions.leases() or core.staging.used:
            left = f"{core.decisions.leases()} leases, {core.staging!r}"
            self._report.problems.append(f"not at rest: {left}")


def _ids(prompt: int) -> list[int]:
    return [prompt * 1000 + n for n in range(_BLOCKS * _BLOCK)]


def _with(operation: Callable[..., Awaitable[Any]], *args: Any) -> Callable[[], Awaitable[Any]]:
    return lambda: operation(*args)


async def _cancelled(
    make: Callable[[], Awaitable[Any]], rng: random.Random, report: CancelReport, *, hung: bool
) -> Any:
    """Run a call and cancel it at a random suspension; what it gave, None if it gave nothing."""
    native, step = rng.random() < 0.5, rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 7, 10, 15, 30))
    task, scope, live = asyncio.current_task(), anyio.CancelScope(), [True]
    assert task is not None
    end: Callable[[], object] = task.cancel if native else scope.cancel

    def cancel() -> None:
        if live:
            live.clear()
            report.cancels += 1
            end()

    def on_step(at: int) -> None:
        if at == step and hung:  # by then somebody is in it
            asyncio.get_running_loop().call_later(0.005, cancel)
        elif at == step:
            cancel()

    value = None
    try:
        with scope:
            value = await Stepped(_call(make), on_step)
        report.cancelled += scope.cancelled_caught
    except asyncio.CancelledError:
        if not native:
            raise
        report.cancelled += 1
    finally:
        live.clear()
        if native:
            task.uncancel()
    return value


async def _call(make: Callable[[], Awaitable[Any]]) -> Any:
    return await make()


async def _live(kind: str, place: Path, calls: int, seed: int, report: CancelReport) -> None:
    """One engine: open it, use it, close it while being cancelled, open and close it again."""
    tiers = _tiers(kind, place, seed)
    rng = random.Random(seed)
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: report.problems.append(f"nobody took {context.get('exception')!r}")
    )
    backends = [inject(resolve("backends", tier.kind)(tier)) for tier in tiers]
    engine = tierkv.open(
        tiers=tiers, space=_SPACE, backends=backends, staging="8MiB", tick=0.02, close_timeout=5.0
    )
    await engine.start()
    last = backends[0] if kind.startswith("device") else backends[-1]
    try:
        await _Life(engine, last, seed, report).run(calls)
    finally:
        report.calls["close"] = report.calls.get("close", 0) + 1
        await _cancelled(engine.aclose, rng, report, hung=False)
        await engine.aclose()


def cancels(kind: str, place: Path, wanted: int, seed: int = 0) -> CancelReport:
    """Cancel calls on one kind of backend; stops at the first engine that has problems.

    Args:
        kind: One of :data:`KINDS`.
        place: Directory for tiers that have one.
        wanted: How many cancellations, at least.
        seed: Of operations and moments.
    """
    report = CancelReport()
    torch.set_num_threads(1)
    asyncio.run(_live(kind, place / "warm", 8, seed, CancelReport()))  # whatever loads lazily
    gc.collect()
    before, threads = _descriptors(), threading.active_count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while report.cancels < wanted and not report.problems:
            seed += 1
            some = min(_LIFE, 2 * (wanted - report.cancels))
            try:
                asyncio.run(_live(kind, place, some, seed, report))
            except (TierKVError, AssertionError) as error:
                report.problems.append(f"seed {seed}: {type(error).__name__}: {error}")
        gc.collect()
    report.warned = len(caught)
    report.problems += sorted({f"warning: {w.message}" for w in caught})
    _left_behind(place, before, threads, report)
    for name, count in (("wrong", report.wrong), ("written late", report.late)):
        if count:
            report.problems.append(f"{count} buffers {name}")
    return report


def _left_behind(place: Path, before: int, threads: int, report: CancelReport) -> None:
    end = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.01)
    left: Sequence[str] = [str(p) for p in place.rglob("*tmp*")] if place.exists() else []
    if left:
        report.problems.append(f"temporary files: {left[:3]}")
    if _descriptors() != before:
        report.problems.append(f"{_descriptors()} descriptors are open, {before} were")
    if threading.active_count() > threads:
        names = [thread.name for thread in threading.enumerate()]
        report.problems.append(f"threads are left: {names}")
