"""A storm: conversations on an engine whose tier fails in every way at random, all of it checked.

``await storm(directory, seconds=60)`` runs loads, layer-wise loads, stores and flushes from many
tasks while one batch in ten of the last tier errs, delays, comes short, comes back corrupt or
hangs. What must hold: no exception out of a load, no wrong byte, every degraded operation counted,
and at rest nothing is leaked.
"""

from __future__ import annotations

import asyncio
import errno
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

import tierkv
from tierkv.abc import Backend, IoResult, IoStatus
from tierkv.errors import BackendError, LoadIncomplete, TierKVError
from tierkv.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv.abc import BackendStats, ReadRequest, StoredPart, Threads, WriteItem
    from tierkv.blocks import PartId

__all__ = ["StormReport", "Stormy", "storm"]

FAULTS: Final = ("error", "delay", "short", "corrupt", "hang")
_LAYOUT: Final = tierkv.Layout.uniform(2, 2, 16, "float32")
_BLOCK: Final = 16
_BLOCKS: Final = 6
_PROMPTS: Final = 48
_TASKS: Final = 8
_PAGE: Final = 4096


class Stormy(Backend):
    """A sound backend, one batch in so many of which goes wrong.

    Args:
        inner: The sound backend.
        share: Share of batches that go wrong.
        seed: Of what goes wrong when.
        hang: Seconds for which a hanging batch blocks its thread.

    Attributes:
        injected: Batches that went wrong, by kind.
        items: Items of all reads and writes.
        failed: Items that came back as failed although the medium was sound.
        corrupted: Items that came back as good with a bit flipped in their first section.
    """

    kind: ClassVar[str] = "stormy"

    def __init__(self, inner: Backend, share: float, seed: int, hang: float) -> None:
        self.inner = inner
        self.name = inner.name
        self.share = share
        self.injected = dict.fromkeys(FAULTS, 0)
        self.items = self.failed = self.corrupted = 0
        self._hang = hang
        self._random = random.Random(seed)
        self._threads: Threads | None = None

    @property
    def durable(self) -> bool:  # type: ignore[override] # a wrapper is what it wraps
        """As of the wrapped backend."""
        return self.inner.durable

    async def _weather(self, *, reading: bool) -> str:
        if self._random.random() >= self.share:
            return ""
        fault = self._random.choice(FAULTS if reading else ("error", "delay", "hang"))
        self.injected[fault] += 1
        if fault == "delay":
            await asyncio.sleep(self._random.uniform(0.001, 0.05))
        elif fault == "hang" and self._threads is not None:
            await self._threads.run(time.sleep, self._hang)
        return fault

    def _refusal(self) -> IoResult:
        return IoResult(IoStatus.ERROR, BackendError(self.name, "a storm", retryable=True))

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Open the wrapped backend; nothing goes wrong yet."""
        self._threads = threads
        return await self.inner.open(threads)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Read, or not, or wrongly."""
        fault = await self._weather(reading=True)
        self.items += len(requests)
        if fault == "error":
            self.failed += len(requests)
            error = OSError(errno.EIO, "a storm")
            some = [IoResult(IoStatus.ERROR, error), self._refusal()]
            return [self._random.choice(some) for _ in requests]
        results = await self.inner.read(requests, into)
        for number, result in enumerate(results):
            if result.status is not IoStatus.OK:
                self.failed += 1
            elif fault == "short":
                self.failed += 1
                into[number][len(into[number]) // 2 :] = bytes(-(-len(into[number]) // 2))
                results[number] = IoResult(IoStatus.SHORT)
            elif fault == "corrupt" and len(into[number]) > _PAGE:
                self.corrupted += 1
                into[number][_PAGE + self._random.randrange(64)] ^= 0x10
        return results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Write, or not."""
        fault = await self._weather(reading=False)
        self.items += len(items)
        if fault == "error":
            self.failed += len(items)
            return [self._refusal()] * len(items)
        results = await self.inner.write(items)
        self.failed += sum(result.status is not IoStatus.OK for result in results)
        return results

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Delete."""
        await self.inner.delete(parts)

    async def flush(self) -> None:
        """Sync."""
        await self.inner.flush()

    async def aclose(self) -> None:
        """Close the wrapped backend."""
        await self.inner.aclose()

    def charge(self, nbytes: int) -> int:
        """As of the wrapped backend."""
        return self.inner.charge(nbytes)

    def longest(self, charged: int) -> int:
        """As of the wrapped backend."""
        return self.inner.longest(charged)

    def stats(self) -> BackendStats:
        """As of the wrapped backend."""
        return self.inner.stats()


@dataclass
class StormReport:
    """What a storm brought.

    Attributes:
        loads: Loads made.
        tokens: Tokens that came out of the tiers.
        wrong: Loads with a wrong byte.
        injected: Batches that went wrong, by kind.
        counted: Figures of the metrics that tell of them.
        problems: Everything that must not be, for people; empty if all held.
    """

    loads: int = 0
    tokens: int = 0
    wrong: int = 0
    injected: dict[str, int] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _kv(prompt: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(prompt)
    shape = (2, _BLOCKS * _BLOCK, 16)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(2)
    ]


def _ids(prompt: int) -> list[int]:
    return [prompt * 1000 + n for n in range(_BLOCKS * _BLOCK)]


class _Storm:
    """The conversations, and what came of them."""

    def __init__(self, engine: tierkv.Engine, report: StormReport, seed: int) -> None:
        self._engine = engine
        self._report = report
        self._seed = seed
        self._kv = [_kv(prompt) for prompt in range(_PROMPTS)]

    async def talk(self, number: int, end: float) -> None:
        """One task of many."""
        rng = random.Random(self._seed * 1000 + number)
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            prompt = rng.randrange(_PROMPTS)
            async with self._engine.session(f"s{number}-{prompt}") as session:
                try:
                    await self._turn(session, prompt, rng)
                except BackendError:
                    pass  # a flush may say so
                except TierKVError as error:
                    self._report.problems.append(f"{type(error).__name__} out of a turn: {error}")
            await asyncio.sleep(0)

    async def _turn(self, session: Any, prompt: int, rng: random.Random) -> None:
        ids, report = _ids(prompt), self._report
        back = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in self._kv[prompt]]
        view = tierkv.views.dense(back)
        tokens = 0
        async with session.match(ids) as match:
            if rng.random() < 0.3:
                try:
                    async for _ in match.layers(into=view):
                        pass
                    tokens = match.tokens
                except LoadIncomplete:
                    tokens = 0
            else:
                deadline = rng.choice([None, None, 0.02])
                try:
                    tokens = (await match.load(into=view, deadline=deadline)).tokens
                except Exception as error:  # noqa: BLE001 - that is what must not be
                    report.problems.append(f"{type(error).__name__} out of a load: {error}")
        report.loads += 1
        report.tokens += tokens
        for mine, its in zip(back, self._kv[prompt], strict=True):
            for got, want in zip(mine, its, strict=True):
                if not torch.equal(got[:, :tokens], want[:, :tokens]):
                    report.wrong += 1
        await session.store(ids, tierkv.views.dense(self._kv[prompt]), start=tokens)
        if rng.random() < 0.02:
            await session.flush()


def _metric(page: str, name: str, *labels: str) -> float:
    total = 0.0
    for line in page.splitlines():
        if line.startswith(f"tierkv_{name}") and all(label in line for label in labels):
            total += float(line.rsplit(" ", 1)[1])
    return total


async def storm(
    directory: Path,
    *,
    seconds: float,
    share: float = 0.1,
    seed: int = 0,
    kind: str = "nvme",
) -> StormReport:
    """Let it blow for some seconds, then look what it left.

    Args:
        directory: Where the tier that fails keeps its files.
        seconds: How long.
        share: Share of its batches that go wrong.
        seed: Of what goes wrong when.
        kind: Kind of the tier.
    """
    frame = 12 * 1024
    tiers = [
        tierkv.Tier("host", 40 * frame),
        tierkv.Tier(kind, 4000 * frame, path=str(directory / kind)),
    ]
    stormy = Stormy(resolve("backends", kind)(tiers[1]), share, seed, hang=0.6)
    space = tierkv.Space(tierkv.Identity("storm", "1"), _LAYOUT, block_tokens=_BLOCK)
    report = StormReport()
    async with tierkv.open(
        tiers=tiers,
        space=space,
        backends=[resolve("backends", "host")(tiers[0]), stormy],
        tier_timeout=0.3,
        tick=0.05,
        staging="8MiB",
        threads=8,
    ) as engine:
        weather = _Storm(engine, report, seed)
        end = asyncio.get_running_loop().time() + seconds
        jobs = [
            engine.workers.spawn(weather.talk, number, end, name=f"storm-{number}")
            for number in range(_TASKS)
        ]
        for job in jobs:
            await job.wait()
        stormy.share = 0.0
        await _settle(engine)
        _check(engine, stormy, report)
    return report


async def _settle(engine: tierkv.Engine) -> None:
    """Wait until nothing is under way; what hangs ends by itself."""
    core, runtime = engine.core, engine.runtime
    for _ in range(6000):
        flying = any(level.flying or level.probing for level in core.levels)
        busy = runtime.fetcher.in_flight or runtime.behind.pending or core.storing
        busy = busy or runtime.prefetcher.open
        if not (flying or busy or core.staging.used):
            return
        await asyncio.sleep(0.005)


def _check(engine: tierkv.Engine, stormy: Stormy, report: StormReport) -> None:
    core, name = engine.core, f'tier="{stormy.name}"'
    page = engine.metrics.scrape().decode()
    failed = sum(
        _metric(page, "io_operations_total", name, f'direction="{way}"', 'outcome="failed"')
        for way in ("read", "write")
    )
    done = sum(
        _metric(page, "io_operations_total", name, f'direction="{way}"', 'outcome="ok"')
        for way in ("read", "write")
    )
    refused = failed + done - stormy.items  # by the breaker, without asking the medium
    report.injected = dict(stormy.injected)
    report.counted = {
        "failed": failed,
        "refused": refused,
        "corrupt": _metric(page, "corruption_total", name),
        "breaker": _metric(page, "breaker_transitions_total", name),
    }
    problems = report.problems
    if failed - refused != stormy.failed:
        problems.append(f"{stormy.failed} items failed, {failed - refused:g} were counted")
    corrupt = _metric(page, "corruption_total", name, 'kind="checksum"')
    if bool(corrupt) != bool(stormy.corrupted) or corrupt > stormy.corrupted:
        problems.append(f"{stormy.corrupted} items were corrupt, {corrupt:g} were counted")
    if report.wrong:
        problems.append(f"{report.wrong} tensors had wrong bytes")
    if core.decisions.leases() or core.staging.used or core.storing:
        problems.append(f"not at rest: {core.decisions.leases()} leases, {core.staging!r}")
    if any(core.decisions.reserved(level.index) for level in core.levels):
        problems.append("reservations are left")
    core.decisions.check()
