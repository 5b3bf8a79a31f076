"""Watching where parts are: everything once, then every change, and never anything out of date."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv.decisions.types import EvictReason
from tierkv.errors import ClosedError
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Failing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import tierkv
    from tierkv.blocks import PartId
    from tierkv.engine import Residency

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


class Mirror:
    """What a watcher believes."""

    def __init__(self) -> None:
        self.parts: dict[PartId, int] = {}
        self.batches: list[int] = []
        self.ended = 0

    def __call__(self, batch: Sequence[Residency]) -> None:
        self.batches.append(len(batch))
        self.ended += not batch
        for part, tiers in batch:
            self.parts[part] = tiers

    @property
    def there(self) -> dict[PartId, int]:
        """Parts that are anywhere."""
        return {part: tiers for part, tiers in self.parts.items() if tiers}


def truth(engine: tierkv.Engine) -> dict[PartId, int]:
    """Where each part is, asked the slow way; tiers that are broken left out."""
    found: dict[PartId, int] = {}
    decisions = engine.core.decisions
    for level in engine.core.levels:
        if decisions.costs.readable() >> level.index & 1:
            for part, _, _ in decisions.parts(level.index):
                found[part] = found.get(part, 0) | 1 << level.index
    return found


async def told(rig: Rig) -> None:
    """Let everything be told."""
    await rig.settle()
    watching = rig.engine._keepers()[0]
    async with asyncio.timeout(30):
        while watching._due or any(w.walking for w in watching._watchers):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def store(rig: Rig, blocks: int, seed: int) -> list[int]:
    """Store a conversation."""
    ids, kv = kit.tokens(blocks, seed=seed), kit.Memory(SPACE.layout, blocks * 16, seed=1)
    async with rig.engine.session(f"s{seed}") as session:
        await session.store(ids, kv.view)
    return ids


async def test_all_parts_then_one_empty_batch_then_changes(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        await store(rig, 5, 1)
        await rig.engine.flush()
        mirror = Mirror()
        assert mirror.batches == []
        stop = rig.engine.watch(mirror)
        assert mirror.batches == []  # never from inside the call
        await told(rig)
        assert mirror.batches == [5, 0]
        assert set(mirror.parts.values()) == {3}
        assert mirror.there == truth(rig.engine)
        await store(rig, 4, 2)
        await told(rig)
        assert mirror.ended == 1
        assert mirror.there == truth(rig.engine)
        assert len(mirror.there) == 9
        rig.cool()
        await told(rig)
        assert set(mirror.parts.values()) == {2}
        await rig.engine.reset()
        await told(rig)
        assert mirror.there == {}
        assert len(mirror.parts) == 9  # gone is told, too
        stop()
        stop()
        before = list(mirror.batches)
        await store(rig, 3, 3)
        await told(rig)
        assert mirror.batches == before


async def test_an_empty_engine_is_whole_at_once(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        mirror = Mirror()
        rig.engine.watch(mirror)
        await told(rig)
        assert mirror.batches == [0]


async def test_what_a_durable_tier_kept_is_told(tmp_path: Path) -> None:
    async with running("nvme", tmp_path, space=SPACE) as rig:
        await store(rig, 6, 1)
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        mirror = Mirror()
        rig.engine.watch(mirror)
        await told(rig)
        assert mirror.batches == [6, 0]
        assert set(mirror.parts.values()) == {2}


async def test_changes_are_told_together_and_not_twice(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        mirror = Mirror()
        rig.engine.watch(mirror)
        ids = await store(rig, 40, 1)
        await told(rig)
        core = rig.engine.core
        parts = [(part, generation) for part, generation, _ in core.decisions.parts(1)]
        del mirror.batches[:]
        # one turn of the loop: many changes of the same parts, one batch
        for part, generation in reversed(parts):
            for tier in (0, 1):
                reason = EvictReason.REMOVED
                core.free(core.decisions.invalidate(part, tier, generation, reason, core.clock()))
        assert mirror.batches == []
        await asyncio.sleep(0)
        assert mirror.batches == [40]
        assert mirror.there == {}
        assert (await load((await _session(rig)), ids))[0] == 0


async def _session(rig: Rig) -> tierkv.Session:
    session = rig.engine.session("probe")
    await session.__aenter__()
    return session


async def test_a_large_change_comes_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.engine.watching._SLICE", 7)
    async with running("host", tmp_path, space=SPACE) as rig:
        await store(rig, 40, 1)
        mirror = Mirror()
        rig.engine.watch(mirror)
        await told(rig)
        assert mirror.there == truth(rig.engine)
        assert (max(mirror.batches), mirror.ended, len(mirror.there)) == (7, 1, 40)
        await rig.engine.reset()
        await told(rig)
        assert mirror.there == {}
        assert max(mirror.batches) == 7


@pytest.mark.parametrize("seed", range(6))
async def test_a_walk_under_changes_ends_with_the_truth(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes and goes meanwhile, in rows before and behind the walk."""
    monkeypatch.setattr("tierkv.engine.watching._SLICE", 3)
    random_ = random.Random(seed)
    async with running("host+nvme", tmp_path, space=SPACE, capacity=40 * FRAME) as rig:
        core = rig.engine.core
        for number in range(12):
            await store(rig, random_.randint(1, 8), number)
        mirrors = []
        for number in range(12, 40):
            if number % 4 == 0:
                mirrors.append(Mirror())
                rig.engine.watch(mirrors[-1])
            for _ in range(random_.randint(0, 3)):
                await asyncio.sleep(0)
            kind = random_.randrange(4)
            if kind == 0:
                await store(rig, random_.randint(1, 8), number)
            elif kind == 1:
                known = list(core.decisions.parts(random_.randrange(2)))
                for part, generation, _ in random_.sample(known, min(3, len(known))):
                    core.lost(part, random_.randrange(2), generation, EvictReason.FAILED)
            elif kind == 2:
                rig.cool()
            else:
                rig.engine.forget_session(f"s{random_.randrange(number)}")
                await store(rig, 2, random_.randrange(number))
        await told(rig)
        for mirror in mirrors:
            assert mirror.there == truth(rig.engine)
            assert mirror.ended == 1
        await rig.at_rest()


async def test_a_tier_that_breaks_is_told_of_and_so_is_its_return(tmp_path: Path) -> None:
    clock = VirtualClock()
    fault = Failing("read")
    fault.active = False
    async with running(
        "host+nvme", tmp_path, space=SPACE, faults={"nvme": [fault]}, clock=clock
    ) as rig:
        ids = await store(rig, 4, 1)
        await rig.engine.flush()
        rig.cool()
        more = await store(rig, 2, 2)
        await rig.engine.runtime.behind.drain()
        mirror = Mirror()
        rig.engine.watch(mirror)
        await told(rig)
        assert sorted(mirror.parts.values()) == [2, 2, 2, 2, 3, 3]
        decisions = rig.engine.core.decisions
        for _ in range(20):
            decisions.failed(1, "read", clock())
        assert not decisions.costs.readable() >> 1 & 1
        await told(rig)
        assert sorted(mirror.parts.values()) == [0, 0, 0, 0, 1, 1]
        assert mirror.there == truth(rig.engine)
        session = await _session(rig)
        assert (await load(session, ids))[0] == 0
        assert (await load(session, more))[0] == 32
        clock.advance(3600)
        assert decisions.admit(1, "read", clock())
        decisions.sample(1, "read", 1, 0.001, clock())
        assert decisions.costs.readable() >> 1 & 1
        await told(rig)
        assert sorted(mirror.parts.values()) == [2, 2, 2, 2, 3, 3]
        assert mirror.ended == 1


async def test_a_watcher_that_raises_is_logged_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(batch: Sequence[Residency]) -> None:
        calls.append(len(batch))
        raise ValueError("planted")

    async with running("host", tmp_path, space=SPACE) as rig:
        mirror = Mirror()
        rig.engine.watch(broken)
        rig.engine.watch(mirror)
        await store(rig, 3, 1)
        await told(rig)
        await store(rig, 3, 2)
        await told(rig)
        assert len(calls) == 1
        assert "planted" in caplog.text
        assert mirror.there == truth(rig.engine)
        assert len(mirror.there) == 6


async def test_a_watcher_may_stop_itself_and_begin_another(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        await store(rig, 3, 1)
        second = Mirror()
        seen: list[int] = []

        def first(batch: Sequence[Residency]) -> None:
            seen.append(len(batch))
            stop()
            rig.engine.watch(second)

        stop = rig.engine.watch(first)
        await told(rig)
        assert seen == [3]
        assert second.there == truth(rig.engine)
        assert second.ended == 1


async def test_nobody_watches_nothing_is_noted(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        at = rig.engine.core.decisions._at
        assert at.moved is None
        stop = rig.engine.watch(Mirror())
        another = rig.engine.watch(Mirror())
        assert at.moved is not None
        stop()
        assert at.moved is not None
        another()
        assert at.moved is None
        await store(rig, 3, 1)
        await told(rig)


async def test_closing_ends_it(tmp_path: Path) -> None:
    mirror = Mirror()
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        await store(rig, 3, 1)
        stop = rig.engine.watch(mirror)
        await rig.engine.aclose()
        before = list(mirror.batches)
        with pytest.raises(ClosedError):
            rig.engine.watch(Mirror())
    assert mirror.batches == before
    stop()
    with pytest.raises(ClosedError):
        rig.engine.watch(Mirror())


async def test_only_an_open_engine_can_be_watched() -> None:
    import tierkv

    engine = tierkv.open(tiers=[tierkv.Tier("host", "1MiB")])
    with pytest.raises(ClosedError, match="not open"):
        engine.watch(Mirror())
