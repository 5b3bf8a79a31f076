"""What compression is for: more blocks in the same memory, and memory that does not fragment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from benchmarks import compression
from tests import kit
from tests.engine.compression_world import realistic
from tests.engine.rig import running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
Rule = tierkv.CompressionPolicy
LAYOUT = tierkv.Layout.uniform(layers=4, heads=4, dim=128, dtype="bfloat16")
TOKENS = 64
SPACE = tierkv.Space(tierkv.Identity("m", "rev1"), LAYOUT, block_tokens=TOKENS)
CAPACITY = 6 << 20  # eleven raw blocks of 512 KiB
MOST = 26
IDS = kit.tokens(MOST + 1, block=TOKENS)
KV = realistic(LAYOUT, len(IDS), seed=1)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


async def _kept(rule: str | Rule | None, tmp_path: Path) -> int:
    """Blocks of one conversation that a full host tier holds; it grows by one block a turn."""
    async with (
        running(
            "host",
            tmp_path,
            space=SPACE,
            capacity=CAPACITY,
            compression=rule,
            options={"high": 1.0, "low": 1.0},
        ) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        for blocks in range(1, MOST + 1):
            done = await session.store(IDS[: blocks * TOKENS + 51], KV.view, (blocks - 1) * TOKENS)
            await session.flush()
            if done.skipped:
                break
        else:
            raise AssertionError("the tier never became full")
        kept = rig.engine.core.decisions.entries(0)
        async with session.match(IDS) as match:
            assert match.tokens == kept * TOKENS
            back = kit.Memory(LAYOUT, len(IDS))
            assert (await match.load(into=back.view)).tokens == kept * TOKENS
        return kept


async def test_int8_keeps_1_85_times_as_many_blocks_in_a_full_host_tier(tmp_path: Path) -> None:
    raw = await _kept(None, tmp_path)

    assert raw == 11
    for rule in (Rule("int8"), Rule("int8", after_steps=50)):
        assert await _kept(rule, tmp_path) >= 1.85 * raw, rule


async def test_planes_keep_1_3_times_as_many_blocks_in_a_full_host_tier(tmp_path: Path) -> None:
    raw = await _kept(None, tmp_path)

    for rule in (Rule("planes"), Rule("planes", after_steps=50)):
        assert await _kept(rule, tmp_path) >= 1.3 * raw, rule


async def test_k6_small_frames_that_get_a_chain_on_their_way_need_more_staging_than_they_take(
    tmp_path: Path,
) -> None:
    """A batch of them is measured by what they may become: none is lost for want of staging."""
    rules = [
        Rule("int4", after_steps=50, tier="device"),
        Rule("int4+lz4", after_steps=50, tier="nvme"),
    ]
    tiers = [
        tierkv.Tier("device", "16MiB", device="cpu"),
        tierkv.Tier("nvme", "64MiB", path=str(tmp_path), write_through=False),
    ]
    ids = IDS[: 12 * TOKENS]
    async with (
        tierkv.open(tiers=tiers, space=SPACE, compression=rules, staging="2480KiB") as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, KV.view)
        decisions, recoder = engine.core.decisions, engine.runtime.behind.recoder
        await recoder.settled([part for part, _, _ in decisions.parts(0)])
        assert recoder.converted == 11
        engine.resize("device", 0)
        await engine.flush()
        assert (decisions.entries(0), decisions.entries(1)) == (0, 12)
        async with session.match(ids) as match:
            assert match.tokens == len(ids)


def test_the_benchmark_counts_the_same_and_can_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "RULES", ("int8",))
    tiny = ["--json", "--capacity", "5", "--operations", "50", "--blocks", "2", "--repeats", "1"]
    monkeypatch.setattr(compression, "ALLOCATABLE", 0.5)
    assert compression.main(tiny) == 0
    rows = {(r["what"], r["about"]): r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["blocks kept", "int8, after 50 steps"]["ratio"] >= 1.85
    assert rows["GB/s converted, over the bare encoder", "int8"]["value"] > 0
    monkeypatch.setattr(compression, "FLOORS", {"int8": 2.5})
    assert compression.main(tiny) == 1
    assert "below 2.5" in capsys.readouterr().err


# --------------------------------------------------------------------------- fragmentation


@pytest.mark.parametrize("mix", compression.FRAMES)
def test_0_95_of_the_memory_is_allocatable_after_100k_puts_and_deletes(mix: str) -> None:
    assert compression.allocatable(compression.FRAMES[mix], 100_000) >= 0.95
