"""Fault probes on tierkv: one kind of damage each, and whether what came of it was right.

Eighteen situations, most of which LMCache 0.5.6 was seen to fail in, with the same names in
:mod:`benchmarks.peers_lmcache_probes`. *Held* means: what came back was what was put, or a miss;
nothing raised, hung or leaked; and the next store worked.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

import tierkv
from tierkv.testing.crash import run_crashes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

__all__ = ["PROBES", "Rig", "probe"]

_BLOCK: Final = 16
_SHAPE: Final = (8, _BLOCK, 128)  # with K and V, 64 KiB in bfloat16
_FRAME: Final = 68 << 10  # with its header page
_HANG_S: Final = 20.0
Verdict = tuple[bool, str]


class Rig:
    """An engine, and blocks whose every value is a number."""

    def __init__(self, engine: tierkv.Engine) -> None:
        self.engine = engine

    async def put(self, number: int, value: float | None = None, tenant: str = "") -> Any:
        """Store one block that says ``value``; what became of it."""
        data = torch.full(_SHAPE, float(number if value is None else value)).bfloat16()
        async with self.engine.session(f"s{number}", tenant=tenant) as session:
            stored = await session.store([number] * _BLOCK, tierkv.views.dense([(data, data)]))
        return stored.blocks[0]

    async def get(self, number: int, tenant: str = "") -> float | None:
        """The value that a block is full of; None for a miss, NaN for anything else."""
        k, v = (torch.full(_SHAPE, -1.0).bfloat16() for _ in range(2))
        handle = self.engine.session(f"s{number}", tenant=tenant)
        async with handle as session, session.match([number] * _BLOCK) as match:
            loaded = await match.load(tierkv.views.dense([(k, v)]))
        if not loaded.tokens:
            return None
        value = float(k.view(-1)[0])
        return value if bool((k == value).all() and (v == value).all()) else float("nan")

    async def has(self, number: int) -> bool:
        """Whether a block would be found."""
        handle = self.engine.session(f"s{number}")
        async with handle as session, session.match([number] * _BLOCK) as match:
            return match.tokens > 0

    @property
    def at_rest(self) -> bool:
        """Whether no lease, staging memory or reservation is left, and the books are right."""
        core = self.engine.core
        core.decisions.check()
        reserved = any(core.decisions.reserved(level.index) for level in core.levels)
        return not (core.decisions.leases() or core.staging.used or reserved)


@asynccontextmanager
async def _rig(*tiers: tierkv.Tier, **settings: Any) -> AsyncIterator[Rig]:
    layout = tierkv.Layout.uniform(1, _SHAPE[0], _SHAPE[2], "bfloat16")
    space = tierkv.Space(tierkv.Identity("probe", "1"), layout, block_tokens=_BLOCK)
    async with tierkv.open(tiers=list(tiers), space=space, tick=0.05, **settings) as engine:
        yield Rig(engine)


def _file(place: Path, blocks: int = 256) -> tierkv.Tier:
    return tierkv.Tier("file", blocks * (_FRAME + 4096), path=str(place / "file"))


def _host(blocks: int) -> tierkv.Tier:
    return tierkv.Tier("host", blocks * _FRAME)


def _frames(place: Path) -> list[Path]:
    """Files that hold a frame, oldest first."""
    found = [p for p in place.rglob("*") if p.is_file() and p.stat().st_size >= 65536]
    return sorted(found, key=lambda p: p.stat().st_mtime_ns)


async def truncated(place: Path) -> Verdict:
    """A file of a block loses its second half."""
    async with _rig(_file(place)) as rig:
        for number in (1, 2, 3):
            await rig.put(number)
        await rig.engine.flush()
        victim = _frames(place)[1]
        with victim.open("r+b") as file:
            file.truncate(victim.stat().st_size // 2)
        got = [await rig.get(number) for number in (1, 2, 3)]
        return got == [1.0, None, 3.0] and rig.at_rest, f"1, 2, 3 read as {got}"


async def bitflip(place: Path) -> Verdict:
    """Two bytes of a file change."""
    async with _rig(_file(place)) as rig:
        await rig.put(1)
        await rig.engine.flush()
        with _frames(place)[0].open("r+b") as file:
            file.seek(9000)
            file.write(b"\xff\x7f")
        got = await rig.get(1)
        return got is None and rig.at_rest, f"read as {got}"


async def missing(place: Path) -> Verdict:
    """A file vanishes."""
    async with _rig(_file(place)) as rig:
        await rig.put(1)
        await rig.engine.flush()
        _frames(place)[0].unlink()
        got, there = await rig.get(1), await rig.has(1)
        again = (await rig.put(1)).state
        right = got is None and not there and again == "stored" and await rig.get(1) == 1.0
        return (
            right and rig.at_rest,
            f"read as {got}, found afterwards {there}, stored anew {again}",
        )


async def prefetch_oom_deadlock(place: Path) -> Verdict:
    """No staging memory is left while a prefetch wants some."""
    async with _rig(_host(4), _file(place), staging="1MiB") as rig:
        for number in range(8):
            await rig.put(number)
        await rig.engine.flush()
        staging = rig.engine.core.staging
        held = []
        while (buffer := staging.acquire_nowait(65536)) is not None:
            held.append(buffer)
        job = await rig.engine.prefetch(tokens=[0] * _BLOCK)
        there = await asyncio.wait_for(rig.has(7), 5)
        for buffer in held:
            buffer.release()
        await asyncio.wait_for(job.wait(), 5)
        got = [await asyncio.wait_for(rig.get(number), 5) for number in range(8)]
        right = there and got == [float(number) for number in range(8)]
        return right and rig.at_rest, f"lookups answered {there}, all read {got}"


async def remove_accounting(place: Path) -> Verdict:
    """Everything is removed from a full tier: is its room there again."""
    async with _rig(_file(place, 16)) as rig:
        states = [(await rig.put(number)).state for number in range(16)]
        await rig.engine.reset()
        used = rig.engine.stats().used["file"]
        after = [(await rig.put(100 + number)).state for number in range(3)]
        right = after == ["stored"] * 3 and used == 0
        told = f"{states.count('stored')} stored, all removed, {used} bytes in use, then {after}"
        return right and rig.at_rest, told


async def write_failure(place: Path) -> Verdict:
    """The directory of a tier vanishes while blocks are written."""
    async with _rig(_host(64), _file(place), tier_timeout=1.0) as rig:
        await rig.put(99)
        await rig.engine.flush()
        shutil.rmtree(place / "file")
        states = [(await rig.put(number)).state for number in range(8)]
        flushed = await rig.engine.flush()
        got = [await rig.get(number) for number in range(8)]
        right = got == [float(number) for number in range(8)] and flushed.missing == 8
        return right and rig.at_rest, f"stored {states.count('stored')} of 8, {flushed}, all read"


async def restart(place: Path) -> Verdict:
    """A new engine on the directory of an old one."""
    async with _rig(_file(place)) as rig:
        for number in range(5):
            await rig.put(number)
    async with _rig(_file(place)) as rig:
        got = [await rig.get(number) for number in range(5)]
        return got == [float(number) for number in range(5)], f"read as {got}"


async def _in_flight(place: Path, policy: str) -> Verdict:
    async with _rig(_file(place, 16), policy=policy) as rig:
        jobs = [rig.engine.workers.spawn(rig.put, number) for number in range(200)]
        states = [(await job.wait()).state for job in jobs]
        await rig.engine.flush()
        stats, limit = rig.engine.stats(), rig.engine.core.decisions.capacity(0)
        files = len(_frames(place))
        right = stats.used["file"] <= limit and files == stats.tiers["file"].entries
        told = f"{states.count('stored')} of 200 stored, {files} files, used {stats.used['file']}"
        return right and rig.at_rest, told


async def lfu_inflight(place: Path) -> Verdict:
    """200 stores at once into a disk tier of 16, the policy counting frequency."""
    return await _in_flight(place, "lrfu")


async def lru_inflight(place: Path) -> Verdict:
    """The same with the LRU policy."""
    return await _in_flight(place, "lru")


def torn_write(place: Path) -> Verdict:
    """A process is killed while it writes."""
    report = run_crashes(place / "killed", 4, seed=7, tear=True)
    right = not report.problems and report.hits == report.flushed
    return right, f"{report.kills} kills: {report.hits} of {report.flushed} flushed parts right"


async def pin_leak_evict(place: Path) -> Verdict:
    """RAM full of leased blocks: what becomes of one more."""
    async with _rig(_host(8)) as rig, rig.engine.session("reader") as session:
        ids = [n for n in range(8) for _ in range(_BLOCK)]
        data = torch.zeros(_SHAPE[0], 8 * _BLOCK, _SHAPE[2]).bfloat16()
        await session.store(ids, tierkv.views.dense([(data, data)]))
        async with session.match(ids) as match:
            more = await asyncio.wait_for(rig.put(100), 5)
        after = await rig.put(101)
        right = match.tokens == len(ids) and more.state == "skipped" and after.state == "stored"
        told = f"{more.state} ({more.reason}), after the leases ended {after.state}"
        return right and rig.at_rest, told


async def put_overwrite(place: Path) -> Verdict:
    """A second store of a key, with other bytes."""
    async with _rig(_host(8)) as rig:
        await rig.put(1, 1.0)
        state = (await rig.put(1, 7.0)).state
        got = await rig.get(1)
        return state == "present" and got == 1.0, f"the second is told {state!r}, read as {got}"


async def use_after_evict(place: Path) -> Verdict:
    """What was loaded is kept while its block is evicted and its memory used again."""
    async with _rig(_host(1)) as rig:
        await rig.put(1, 5.0)
        k, v = (torch.zeros(_SHAPE).bfloat16() for _ in range(2))
        async with rig.engine.session("s1") as session, session.match([1] * _BLOCK) as match:
            await match.load(tierkv.views.dense([(k, v)]))
        await rig.put(2, 9.0)
        right = bool((k == 5.0).all() and (v == 5.0).all()) and await rig.get(2) == 9.0
        return right, f"reads {float(k.view(-1)[0])} after another block took the place"


async def fs_l2(place: Path) -> Verdict:
    """A file is truncated, stored anew, then rots."""
    async with _rig(_file(place)) as rig:
        await rig.put(1, 3.0)
        await rig.engine.flush()
        with _frames(place)[0].open("r+b") as file:
            file.truncate(100)
        first, again = await rig.get(1), (await rig.put(1, 3.0)).state
        second = await rig.get(1)
        with _frames(place)[-1].open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff\x7f" * 4)
        third = await rig.get(1)
        right = (first, again, second, third) == (None, "stored", 3.0, None)
        return right and rig.at_rest, f"{first}, stored anew: {again}, {second}, rotten: {third}"


async def mp_write_burst(place: Path) -> Verdict:
    """4000 blocks in a row into RAM for 900, all of it evictable."""
    async with _rig(_host(900)) as rig:
        states = [(await rig.put(number)).state for number in range(4000)]
        stored = states.count("stored")
        return stored == 4000 and rig.at_rest, f"{stored} of 4000 admitted"


async def mp_isolated_lru_thread(place: Path) -> Verdict:
    """Tenants with quotas run into the watermark."""
    tenants = {name: {"quota": {"host": 40 * _FRAME}} for name in ("a", "b")}
    async with _rig(_host(64), tenants=tenants) as rig:
        for number in range(500):
            await rig.put(number, tenant="a" if number % 2 else "b")
        await asyncio.sleep(0.3)  # some ticks
        more = [(await rig.put(1000 + n, tenant=t)).state for n, t in enumerate("ab")]
        used = rig.engine.stats().used["host"]
        restarts = rig.engine.metrics.scrape().decode()
        died = [x for x in restarts.splitlines() if "restarts_total{" in x and x[-3:] != "0.0"]
        right = more == ["stored"] * 2 and used <= 64 * _FRAME and not died
        return right and rig.at_rest, f"afterwards {more}, restarted loops: {died or 'none'}"


async def mp_lru_after_1s(place: Path) -> Verdict:
    """RAM full of evictable blocks: is the next one admitted at once."""
    async with _rig(_host(64)) as rig:
        for number in range(64):
            await rig.put(number)
        state = (await rig.put(100)).state
        return state == "stored" and rig.at_rest, f"the first store after it was full: {state}"


async def mp_poisoned_key_e2e(place: Path) -> Verdict:
    """A block falls out of RAM, its file is truncated; it is recomputed and stored again."""
    async with _rig(_host(2), _file(place)) as rig:
        fresh = count(100)

        async def push_out() -> None:
            for _ in range(4):
                await rig.put(next(fresh))
            await rig.engine.flush()

        await rig.put(1, 3.0)
        await rig.engine.flush()
        victim = _frames(place)[0]
        await push_out()
        first = await rig.get(1)
        await push_out()
        with victim.open("r+b") as file:
            file.truncate(100)
        second, again = await rig.get(1), (await rig.put(1, 3.0)).state
        await rig.engine.flush()
        await push_out()
        third = await rig.get(1)
        right = (first, second, again, third) == (3.0, None, "stored", 3.0)
        return right and rig.at_rest, f"{first}, truncated: {second}, {again} anew, then {third}"


_PROBES: Final[dict[str, Callable[[Path], Awaitable[Verdict] | Verdict]]] = {
    each.__name__: each
    for each in (
        *(mp_write_burst, mp_isolated_lru_thread, mp_lru_after_1s, mp_poisoned_key_e2e),
        *(truncated, bitflip, missing, prefetch_oom_deadlock, remove_accounting, write_failure),
        *(restart, lfu_inflight, lru_inflight, torn_write, pin_leak_evict, put_overwrite),
        *(use_after_evict, fs_l2),
    )
}
PROBES: Final[Sequence[str]] = tuple(_PROBES)


def probe(name: str, place: Path) -> Verdict:
    """Run a probe in a directory of its own under ``place``; whether it held, and what was seen."""
    place.mkdir(parents=True, exist_ok=True)
    fn = _PROBES[name]
    with tempfile.TemporaryDirectory(dir=place) as folder:
        if not asyncio.iscoroutinefunction(fn):
            verdict = fn(Path(folder))
            assert isinstance(verdict, tuple)
            return verdict
        try:
            found: Verdict = asyncio.run(_bounded(fn(Path(folder))))
        except Exception as error:  # noqa: BLE001 - a probe that raises did not hold
            return False, f"{type(error).__name__}: {error}"
        return found


async def _bounded(what: Awaitable[Verdict]) -> Verdict:
    async with asyncio.timeout(6 * _HANG_S):
        return await what
