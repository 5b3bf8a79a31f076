"""The decision log of a running engine, on a disk that misbehaves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running
from tests.engine.test_breaker import until
from tierkv.decisions.log import replay, runs
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.engine.log import LogFile
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(4)
KV = kit.Memory(SPACE.layout, len(IDS), seed=1)


async def test_restarts_append_to_one_log_and_each_run_of_it_replays(tmp_path: Path) -> None:
    log, tiers = tmp_path / "log", kit.tiers("host+nvme", tmp_path)
    config = tierkv.EngineConfig(tiers=tiers, decision_log=str(log))
    for number in range(3):
        if number:  # the run before was killed in the middle of a line
            with log.open("ab") as file:
                file.write(b'{"op":"tick","no')
        async with tierkv.open(config, space=SPACE) as engine, engine.session("a") as session:
            await session.store(IDS, KV.view)
            await load(session, IDS)
    found = list(runs(log.read_bytes().splitlines(keepends=True)))
    assert len(found) == 3
    for lines in found:
        assert list(replay(lines, make_decisions(config, make_levels(config, None)))) == lines


@pytest.mark.parametrize("torn", [b"", b"torn", b"x" * 200_000])
def test_only_a_torn_line_is_taken_away(torn: bytes, tmp_path: Path) -> None:
    whole = b"a" * 70_000 + b"\n" + b"b\n"
    (tmp_path / "log").write_bytes(whole + torn)
    file = LogFile(str(tmp_path / "log"))
    file.write(b"c\n")
    file.close()
    file.close()
    assert (tmp_path / "log").read_bytes() == whole + b"c\n"


@pytest.mark.every_loop
async def test_two_engines_do_not_mix_their_logs(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    async with running("host", tmp_path, space=SPACE, decision_log=log):
        with pytest.raises(ConfigError, match="another engine writes to it"):
            async with running("host", tmp_path, space=SPACE, decision_log=log):
                pass
    async with running("host", tmp_path, space=SPACE, decision_log=log):
        pass  # the first one let go of it


@pytest.mark.every_loop
async def test_c8_a_log_on_a_disk_that_hangs_stops_neither_the_clock_nor_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    flush = LogFile.flush

    def hang(self: LogFile) -> None:
        self._writing = True
        entered.set()
        gate.wait()
        flush(self)

    monkeypatch.setattr(LogFile, "flush", hang)
    try:
        async with running(
            "host",
            tmp_path,
            space=SPACE,
            decision_log=str(tmp_path / "log"),
            tick=0.005,
            close_timeout=0.2,
        ) as rig:
            await until(entered.is_set, "a tick")
            log = rig.engine._log_file
            async with rig.engine.session("a", ttl="20ms") as session:
                await session.store(IDS, KV.view)
            stats, sessions = rig.engine.stats, rig.engine.sessions
            await until(lambda: not stats().used["host"], "housekeeping goes on")
            await until(lambda: not sessions(), "for sessions as well")
    finally:
        gate.set()
    assert log is not None
    await until(lambda: log._file.closed, "the thread that hung closes the file")
