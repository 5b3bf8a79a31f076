"""What a live engine recorded: its decision log replays exactly, its trace almost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.rig import load, running
from tests.engine.test_breaker import until
from tierkv.cli import main
from tierkv.errors import ConfigError
from tierkv.replay import Setup, replay, replay_log
from tierkv.traces import open_trace

if TYPE_CHECKING:
    from pathlib import Path

    import tierkv

pytestmark = pytest.mark.anyio
SPACE = kit.space()


async def _chat(engine: tierkv.Engine, rng: random.Random, turns: int) -> tuple[int, int]:
    """Conversations that grow and are forgotten; tokens asked for, and tokens found."""
    histories = {str(n): kit.tokens(rng.randint(1, 3), seed=n) for n in range(6)}
    asked = found = 0
    for turn in range(turns):
        name = str(min(rng.randrange(6), rng.randrange(6)))
        history = histories[name]
        async with engine.session(name, tenant="acme") as session:
            tokens, _ = await load(session, history)
            found += tokens
            asked += len(history)
            reply = kit.tokens(2, seed=1000 + turn)
            longer = [*history, *reply]
            kv = kit.Memory(SPACE.layout, len(longer), seed=1)
            await session.store(longer, kv.view, start=tokens)
            session.hint(stop_reason="tool_use" if turn % 2 else "end_turn")
            histories[name] = longer if len(longer) < 200 else kit.tokens(2, seed=5000 + turn)
    return asked, found


@pytest.mark.parametrize("kinds", ["host", "host+nvme"])
async def test_a_recorded_run_replays(kinds: str, tmp_path: Path) -> None:
    log, path = tmp_path / "decisions.log", tmp_path / "trace.jsonl.zst"
    files: dict[str, Any] = {"decision_log": log, "trace": path}
    async with running(
        kinds, tmp_path, space=SPACE, capacity=200_000, policy="lru", **files
    ) as rig:
        asked, found = await _chat(rig.engine, random.Random(3), 60)
        await rig.settle()
        decisions = rig.engine.core.decisions
        usable = [decisions.capacity(level.index) for level in rig.engine.core.levels]
        charge = next(nbytes for _, _, nbytes in decisions.parts(0))
        high, low = rig.engine.config.tiers[0].high, rig.engine.config.tiers[0].low
    # the decisions: byte for byte, the configuration told by the log itself
    with log.open("rb") as lines:
        report = replay_log(lines)
    assert report.same, (report.line, report.expected, report.got)
    assert main(["replay", "--decision-log", str(log)]) == 0
    # the workload: the same requests, found as the live engine found them
    trace = open_trace(path)
    requests = list(trace)
    assert trace.lost == 0
    assert sum(r.tokens for r in requests) == asked
    assert [r.stop_reason for r in requests[:2]] == ["end_turn", "tool_use"]
    assert len({r.session for r in requests}) == 6
    assert len({r.tenant for r in requests}) == 1
    blocks = [size // charge for size in usable]
    again = replay(trace, Setup(capacity_blocks=blocks, policy="lru", high=high, low=low))
    live, offline = found / asked, again.token_hit_ratio
    print(f"{kinds}: live {live:.4f}, replayed {offline:.4f}, error {offline - live:+.4f}")
    assert live > 0.2
    # live, write-behind and the ticks of the clock come between; with room for all they do not
    assert offline == pytest.approx(live, abs=0.05)


async def test_with_room_for_everything_the_trace_replays_exactly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    async with running("host", tmp_path, space=SPACE, capacity="16MiB", trace=path) as rig:
        asked, found = await _chat(rig.engine, random.Random(4), 40)
    report = replay(open_trace(path), Setup(capacity_blocks=10_000))
    assert (report.tokens, report.hit_tokens) == (asked, found)


async def test_runs_of_an_engine_append_to_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    for _ in range(2):
        async with running("host", tmp_path, space=SPACE, trace=path) as rig:
            await _chat(rig.engine, random.Random(1), 3)
    requests = list(open_trace(path))
    assert len(requests) == 6
    assert [r.time for r in requests] == sorted(r.time for r in requests)
    assert {r.session.partition("#")[2] for r in requests} == {"", "2"}


async def test_a_trace_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace: cannot write"):
        async with running("nvme", tmp_path, space=SPACE, trace=tmp_path / "no" / "t"):
            pass
    async with running("nvme", tmp_path, space=SPACE):  # and nothing was left locked
        pass


@pytest.mark.every_loop
async def test_a_running_engine_writes_its_trace_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.engine.tracing._PAUSE_S", 0.0)
    monkeypatch.setattr("tierkv.traces.recording._PATIENCE_S", 0.0)
    path = tmp_path / "trace.jsonl.zst"

    async with running("host", tmp_path, space=SPACE, trace=path, tick=0.002) as rig:
        before = 0
        for _ in range(3):  # each turn is written while the engine runs
            await _chat(rig.engine, random.Random(1), 1)
            await until(lambda size=before: path.stat().st_size > size, "a flush")  # type: ignore[misc]
            before = path.stat().st_size
    # a turn that nobody has patience with may be written in two pieces
    assert 3 <= len(list(open_trace(path))) <= 6
