"""An engine over files on a shared mount: write-through, restarts, lost files, a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running, usable
from tierkv.decisions.types import SkipReason
from tierkv.errors import BackendError
from tierkv.testing.crash import disk_usage
from tierkv.testing.faults import Corrupting, Failing, Fault, Short, Slow
from tierkv_backends.file.files import Files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.rig import Rig

pytestmark = pytest.mark.anyio
SPACE = kit.space()
BLOCKS = 6


@pytest.fixture(scope="module", autouse=True)
async def _loop_has_run(anyio_backend: object) -> None:
    """A loop opens descriptors of its own when it first runs: not to be taken for a leak."""
    await asyncio.sleep(0)


def said(seed: int = 1) -> tuple[list[int], kit.Memory]:
    return kit.tokens(BLOCKS, seed=seed), kit.Memory(SPACE.layout, BLOCKS * 16, seed=seed)


def frames(path: Path) -> list[Path]:
    return sorted((path / "file").glob("??/??/[0-9a-f]*"))


async def store(rig: Rig, seed: int = 1) -> tuple[list[int], kit.Memory]:
    """Store a prompt and wait until it is in every tier that it shall be in."""
    ids, kv = said(seed)
    async with rig.engine.session(f"s{seed}") as session:
        await session.store(ids, kv.view)
    await rig.settle()
    return ids, kv


async def check(rig: Rig, ids: list[int], kv: kit.Memory, blocks: int) -> None:
    """Exactly these blocks come back, bit for bit, and nothing behind them is touched."""
    async with rig.engine.session("reader") as session:
        tokens, back = await load(session, ids)
    assert tokens == blocks * 16
    assert back.same(kv, tokens)
    assert back.untouched(tokens)


@pytest.mark.parametrize("layout", sorted(kit.LAYOUTS))
@pytest.mark.parametrize("kinds", ["file", "host+file"])
@pytest.mark.usefixtures("no_fd_leaks", "no_thread_leaks")
async def test_f031_a_restart_finds_what_was_stored(
    kinds: str, layout: str, tmp_path: Path
) -> None:
    space = kit.space(layout)
    ids, kv = kit.tokens(BLOCKS, seed=1), kit.Memory(space.layout, BLOCKS * 16, seed=1)
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            assert (await session.store(ids, kv.view)).stored == BLOCKS
            assert (await session.flush()).missing == 0
        await rig.at_rest()
        assert rig.backends["file"].stats().disk_bytes == disk_usage(tmp_path / "file")
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("b") as session:
            tokens, back = await load(session, ids)
            assert tokens == BLOCKS * 16
            assert back.same(kv, tokens)
        await rig.at_rest()
        assert rig.backends["file"].stats().disk_bytes == disk_usage(tmp_path / "file")


async def test_what_leaves_the_memory_is_read_from_files(tmp_path: Path) -> None:
    async with running("host+file", tmp_path, space=SPACE) as rig:
        ids, kv = await store(rig)
        assert len(frames(tmp_path)) == BLOCKS, "written through"
        rig.cool()
        async with rig.engine.session("b") as session, session.match(ids) as match:
            back = kit.Memory(SPACE.layout, len(ids))
            result = await match.load(into=back.view)
            assert result.tokens == BLOCKS * 16
            assert result.by_tier["file"] == BLOCKS * 16
            assert back.same(kv, result.tokens)
        await rig.at_rest()


async def test_f028_lost_files_are_misses_and_the_engine_goes_on(tmp_path: Path) -> None:
    async with running("host+file", tmp_path, space=SPACE) as rig:
        ids, kv = await store(rig)
        rig.cool()
        for path in frames(tmp_path):
            path.unlink()
        await check(rig, ids, kv, 0)
        await usable(rig, SPACE)
        await store(rig)
        rig.cool()
        await check(rig, ids, kv, BLOCKS)
        await rig.at_rest()


@pytest.mark.parametrize("lost", range(BLOCKS))
async def test_f020_a_lost_file_ends_the_prefix(lost: int, tmp_path: Path) -> None:
    async with running("host+file", tmp_path, space=SPACE) as rig:
        ids, kv = await store(rig)
        rig.cool()
        async with rig.engine.session("a") as session, session.match(ids) as match:
            assert match.tokens == BLOCKS * 16
            frames(tmp_path)[lost].unlink()
            back = kit.Memory(SPACE.layout, len(ids))
            result = await match.load(into=back.view)
            assert result.tokens < BLOCKS * 16
            assert back.same(kv, result.tokens)
            assert back.untouched(result.tokens)
        await usable(rig, SPACE)


async def test_f029_eviction_of_lost_files_goes_on(tmp_path: Path) -> None:
    tier = tierkv.Tier("file", "256KiB", path=str(tmp_path / "file"))
    async with tierkv.open(tiers=[tier], space=SPACE) as engine:
        for seed in range(12):
            ids, kv = said(seed)
            async with engine.session(f"s{seed}") as session:
                assert (await session.store(ids, kv.view)).stored == BLOCKS
                tokens, back = await load(session, ids)
                assert tokens == BLOCKS * 16
                assert back.same(kv, tokens)
            for path in frames(tmp_path)[::2]:
                path.unlink()
            assert disk_usage(tmp_path / "file") <= 256 << 10


FAULTS: list[Fault] = [Failing("read"), Short(), Corrupting(), Corrupting(0.0), Slow(0.01, "read")]


@pytest.mark.parametrize("number", range(len(FAULTS)))
async def test_i4_a_faulty_read_is_a_miss(number: int, tmp_path: Path) -> None:
    fault = FAULTS[number]
    fault.active = True
    async with running("host+file", tmp_path, space=SPACE, faults={"file": [fault]}) as rig:
        ids, kv = await store(rig)
        rig.cool()
        async with rig.engine.session("b") as session:
            tokens, back = await load(session, ids)
            assert back.same(kv, tokens)
            assert back.untouched(tokens)
            assert tokens == (BLOCKS * 16 if isinstance(fault, Slow) else 0)
        fault.active = False
        await usable(rig, SPACE)
        await rig.at_rest()


async def test_f037_damage_on_the_disk_is_a_miss(tmp_path: Path) -> None:
    """Bits flipped in the frames, which the tier itself cannot notice."""
    async with running("file", tmp_path, space=SPACE) as rig:
        ids, kv = await store(rig)
    for path in frames(tmp_path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    async with running("file", tmp_path, space=SPACE) as rig:
        await check(rig, ids, kv, 0)
        for _ in range(BLOCKS):  # each load may find no more than the first damaged block
            await store(rig)
            async with rig.engine.session("reader") as session:
                tokens, back = await load(session, ids)
                assert back.same(kv, tokens)
        assert tokens == BLOCKS * 16
        await rig.at_rest()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE])
async def test_k4_a_disk_that_refuses_degrades_one_tier(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async with running("host+file", tmp_path, space=SPACE) as rig:
        with monkeypatch.context() as patched:
            patched.setattr(Files, "open_writer", refuse)
            ids, kv = await store(rig)
            await check(rig, ids, kv, BLOCKS)  # from memory
            assert frames(tmp_path) == []
            async with rig.engine.session("s1") as session:
                assert (await session.flush()).missing == BLOCKS
        await usable(rig, SPACE)
        await rig.at_rest()
    async with running("file", tmp_path, space=SPACE) as rig:
        monkeypatch.setattr(Files, "open_writer", refuse)
        ids, kv = said(2)
        async with rig.engine.session("a") as session:
            result = await session.store(ids, kv.view)
            assert result.stored == 0
            assert {b.reason for b in result.blocks} <= {SkipReason.FULL, SkipReason.FAILED}
        await rig.at_rest()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EIO])
async def test_k6_a_failure_that_passes_costs_no_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async with running("file", tmp_path, space=SPACE) as rig:
        ids, kv = await store(rig)
        before = frames(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(Files, "open_reader", refuse)
            async with rig.engine.session("reader") as session:
                tokens, back = await load(session, ids)
            assert tokens == 0
            assert back.untouched()
        await usable(rig, SPACE)
        assert set(before) <= set(frames(tmp_path)), "others on the mount would miss them"
        await check(rig, ids, kv, BLOCKS)
        await rig.at_rest()


async def test_k4_an_unusable_directory_is_an_error_at_open(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "thesis.tex").write_text("years of work")
    with pytest.raises(BackendError, match="directory of its own"):
        async with running("host+file", tmp_path, space=SPACE):
            pass


@pytest.mark.every_loop
async def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    """What one has stored the other finds when it opens; what one deletes is a miss for both."""
    async with running("file", tmp_path, space=SPACE) as first:
        ids, kv = await store(first)
        async with running("host+file", tmp_path, space=SPACE) as second:
            await check(second, ids, kv, BLOCKS)
            other, other_kv = await store(second, seed=2)
            await check(second, other, other_kv, BLOCKS)
            await first.engine.reset()
            await check(first, ids, kv, 0)
            second.cool()
            await check(second, other, other_kv, BLOCKS)
            async with second.engine.session("c") as session:
                tokens, back = await load(session, ids)
                assert back.same(kv, tokens)
            await second.at_rest()
        await first.at_rest()
