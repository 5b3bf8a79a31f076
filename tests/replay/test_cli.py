"""The commands ``tierkv trace`` and ``tierkv replay``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.replay import chains
from tests.replay.test_logs import live
from tests.traces import samples
from tierkv.cli import main
from tierkv.replay import Setup, belady, replay
from tierkv.traces import Trace, TraceHeader, open_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "trace.jsonl.zst"
    write_trace(str(made), chains.tree(2, 80, roots=4, width=3))
    return made


def run(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """Run a command that must succeed, and read its JSON."""
    assert main([*map(str, args), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    return document


def test_info(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run(capsys, "trace", "info", path)
    report = replay(open_trace(path), Setup(capacity_blocks=10_000))
    assert (facts["requests"], facts["lost_requests"]) == (80, 0)
    assert facts["token_hit_ratio_at_most"] == report.token_hit_ratio
    assert facts["block_hit_ratio_at_most"] == report.block_hit_ratio
    assert main(["trace", "info", str(path)]) == 0
    assert "token_hit_ratio_at_most" in capsys.readouterr().out


@pytest.mark.parametrize("form", sorted(samples.ALL))
def test_convert(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(samples.ALL[form])
    assert main(["trace", "convert", str(tmp_path / "in"), str(tmp_path / "out.zst")]) == 0
    assert "requests" in capsys.readouterr().out
    before = run(capsys, "trace", "info", tmp_path / "in")
    assert run(capsys, "trace", "info", tmp_path / "out.zst", "--format", "tierkv") == before
    assert main(["trace", "convert", str(tmp_path / "in"), str(tmp_path / "in")]) == 2
    assert (tmp_path / "in").read_text() == samples.ALL[form]


def test_blocks_and_bytes_are_told_where_the_format_leaves_them_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").write_text(samples.WEKA)
    options = ("--block-tokens", 128, "--bytes-per-token", "1KiB")
    facts = run(capsys, "trace", "info", tmp_path / "t", *options)
    assert (facts["block_tokens"], facts["bytes_per_token"]) == (128, 1024)
    assert facts["stop_reasons"] == {"tool_use": 1, "end_turn": 1}


def test_replay_gives_a_row_a_policy(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(capsys, "replay", path, "--policy", "lru,lrfu,lru", "--capacity-blocks", 12)
    lru, lrfu = document["rows"]
    trace = open_trace(path).loaded()
    base = replay(trace, Setup(capacity_blocks=12, policy="lru"))
    report = replay(trace, Setup(capacity_blocks=12, policy="lrfu"))
    assert (lru["policy"], lru["capacity_blocks"], lru["gap_closed"]) == ("lru", 12, 0.0)
    assert lrfu["token_hit_ratio"] == report.token_hit_ratio
    assert lrfu["block_hit_ratio"] == report.block_hit_ratio
    assert lrfu["gap_closed"] == report.against(base, belady(trace, 12)).gap_closed
    size = 12 * trace.header.block_tokens * trace.header.bytes_per_token
    same = run(capsys, "replay", path, "--policy", "lru", "--capacity", size)["rows"][0]
    assert same["hit_tokens"] == lru["hit_tokens"]
    quick = run(capsys, "replay", path, "--capacity-blocks", 12, "--no-gap")["rows"][0]
    assert quick["gap_closed"] is None


def test_replay_of_several_tiers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--capacity-blocks", "4,inf", "--prefetch", "arrival", "--prefetch-budget", "1GiB"]
    options += ["--prefill", "10"]  # so that requests wait for the server
    row = run(capsys, "replay", path, *options)["rows"][0]
    assert [tier["capacity_blocks"] for tier in row["by_tier"]] == [4, None]
    assert (row["gap_closed"], row["capacity_blocks"]) == (None, None)
    assert row["prefetch"]["arrival"]["issued"] > 0
    assert main(["replay", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert "lrfu" in out
    assert "lrfu, arrival: issued" in out


def test_root_first_and_a_model_of_ones_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--capacity-blocks", "6,inf", "--touch-order", "root_first", "--no-overlap"]
    options += ["--bandwidth", "1KB", "--prefill", "100", "--no-hints", "--admission", "second_use"]
    row = run(capsys, "replay", path, *options)["rows"][0]
    default = run(capsys, "replay", path, "--capacity-blocks", "6,inf")["rows"][0]
    assert row["ttft"]["mean"] > default["ttft"]["mean"]


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        (("replay",), 2, "name a trace file"),
        (("replay", "FILE"), 2, "--capacity-blocks or --capacity"),
        (("replay", "FILE", "--capacity-blocks", "some"), 2, "numbers or 'inf'"),
        (("replay", "FILE", "--capacity", "8XB"), 2, "--capacity: not a size"),
        (("replay", "FILE", "--capacity", "nan"), 2, "--capacity: not a size"),
        (("replay", "FILE", "--capacity", "-1GiB"), 2, "--capacity: not a size"),
        (("replay", "FILE", "--capacity-blocks", "9", "--bandwidth", "nan"), 2, "--bandwidth"),
        (("replay", "FILE", "--capacity-blocks", "9", "--bandwidth", "0"), 2, "positive bandw"),
        (("replay", "FILE", "--capacity-blocks", "9", "--prefill", "nan"), 2, "--prefill"),
        (("replay", "FILE", "--capacity-blocks", "9", "--config", "x"), 2, "give --decision-log"),
        (("replay", "FILE", "--decision-log", "FILE"), 2, "drop FILE"),
        (("replay", "--decision-log", "FILE", "--policy", "lrfu"), 2, "drop --policy"),
        (("replay", "--decision-log", "FILE"), 2, "trace.jsonl.zst: this is no decision log"),
        (("replay", "EMPTY", "--capacity-blocks", "9"), 2, "no requests in the trace"),
        (("trace", "info", "FILE", "--bytes-per-token", "nan"), 2, "--bytes-per-token: not a"),
        (("trace", "info", "FILE", "--bytes-per-token", "0"), 1, "a token cannot have 0 bytes"),
        (("trace", "info", "FOLDER"), 2, "Is a directory"),
        (("trace", "convert", "FILE", "FOLDER"), 2, "Is a directory"),
        (("trace", "record", "FOLDER", "--", "true"), 2, "is a directory; name a file"),
        (("trace", "record", "/nowhere/a", "--", "true"), 2, "there is no directory"),
        (("replay", "FILE", "--capacity-blocks", "9", "--policy", "nonsense"), 2, "nonsense"),
        (("replay", "nowhere", "--capacity-blocks", "9"), 2, "nowhere: cannot be read"),
        (("replay", "FILE", "--capacity", "8MiB,1B"), 2, "holds no block"),
        (("replay", "FILE", "--capacity-blocks", "0"), 2, "holds no block"),
        (("trace", "info", "nowhere"), 2, "nowhere: cannot be read"),
        (("trace", "info", "FILE", "--format", "csv"), 1, "no such format"),
        (("trace", "record", "new"), 2, "what is to be run"),
        (("trace", "record", "new", "--", "/no/such/command"), 2, "cannot run"),
    ],
)
def test_what_cannot_be_done_is_told(
    args: tuple[str, ...], code: int, why: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, folder = path.with_name("empty"), path.with_name("folder")
    write_trace(str(empty), Trace.of(TraceHeader(16), []))
    folder.mkdir()
    names = {"FILE": path, "EMPTY": empty, "FOLDER": folder}
    before = {p: p.stat().st_mtime_ns for p in path.parent.iterdir()}
    assert main([str(names.get(word, word)) for word in args]) == code
    out, err = capsys.readouterr()
    assert why in err
    assert out == ""
    assert {p: p.stat().st_mtime_ns for p in path.parent.iterdir()} == before, "half written"


def test_a_trace_of_before_is_no_recording(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "record", str(path), "--", "true"]) == 1
    assert "no engine recorded" in capsys.readouterr().err


def test_a_torn_trace_is_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["trace", "info", str(path)]) == 1
    assert "cut off" in capsys.readouterr().err


# --------------------------------------------------------------------------- decision logs


def test_a_decision_log_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = live()
    log = tmp_path / "log"
    log.write_bytes(b"".join(lines))
    found = run(capsys, "replay", "--decision-log", log)
    assert (found["same"], found["lines"], found["line"]) == (True, len(lines), 0)
    call = json.loads(lines[7])
    call["now"] += 1
    log.write_bytes(b"".join([*lines[:7], json.dumps(call).encode() + b"\n", *lines[8:]]))
    assert main(["replay", "--decision-log", str(log)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("line 8 differs\nlog: ")
    assert "\nhere: " in out
    assert main(["replay", "--decision-log", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["line"] == 8
    assert main(["replay", "--decision-log", str(tmp_path / "no")]) == 2


def test_a_decision_log_is_checked_against_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b"".join(live()))
    toml = tmp_path / "tierkv.toml"
    toml.write_text('[[tiers]]\nkind = "host"\ncapacity = "1MiB"\n')
    log = str(tmp_path / "log")
    assert main(["replay", "--decision-log", log, "--config", str(toml)]) == 2
    assert "another configuration" in capsys.readouterr().err


# --------------------------------------------------------------------------- recording

ENGINE = """
import asyncio, sys, tierkv

layout = tierkv.Layout.uniform(layers=2, heads=4, dim=64, dtype="float32")
space = tierkv.Space(tierkv.Identity(model="m", weights="1"), layout, block_tokens=16)

async def chat():
    async with tierkv.open(tiers=[tierkv.Tier("host", "1MiB")], space=space) as engine:
        async with engine.session("a") as session, session.match(list(range(48))):
            pass

asyncio.run(chat())
sys.exit(len(sys.argv))
"""


def test_a_command_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl.zst"
    command = [sys.executable, "-c", ENGINE, "--json", "--", "--help"]
    assert main(["trace", "record", str(path), "--", *command]) == 4  # its own code
    assert "recorded:" in capfd.readouterr().err
    (request,) = open_trace(path)
    assert (len(request.keys), request.tokens) == (3, 48)
    assert main(["trace", "record", str(tmp_path / "x"), sys.executable, "-c", "pass"]) == 1
    assert "no engine recorded" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "--capacity-blocks or --capacity, not both"),
        (["--capacity-blocks", "5", "--capacity", "1GiB"], "not both"),
        (["--capacity-blocks", "9" * 23], "no tier is as large as"),
        (["--capacity", "9000000TiB"], "no tier is as large as"),
        (["--capacity-blocks", "²"], "takes numbers or 'inf'"),
        (["--capacity-blocks", "5", "--prefetch", "arrival"], "needs a slower tier"),
        (["--capacity-blocks", "5,inf", "--prefetch-budget", "1GiB"], "without --prefetch"),
    ],
)
def test_replay_refuses_what_would_do_nothing(
    wrong: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(path), *wrong]) == 2
    assert message in capsys.readouterr().err


def test_a_size_may_be_endless(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(capsys, "replay", path, "--capacity", "1MiB,inf")["rows"]
    (same,) = run(capsys, "replay", path, "--capacity", f"1MiB,{1 << 50}")["rows"]
    assert row["token_hit_ratio"] == same["token_hit_ratio"] > 0


def test_a_log_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = live()
    (tmp_path / "log").write_bytes(b"".join([*lines[:5], b"torn"]))
    for name, message in (("log", "line 6"), ("none", "No such file"), (".", "Is a directory")):
        assert main(["replay", "--decision-log", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_ctrl_c_leaves_the_recorded_command_time_to_end(tmp_path: Path) -> None:
    code = """if True:
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(1)  # longer than an impatient parent waits
            print("put away", flush=True)
            raise SystemExit(7)
    """
    command = [sys.executable, "-m", "tierkv", "trace", "record", str(tmp_path / "t.jsonl"), "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.stdout.read() == b"put away\n"
        assert process.wait(60) == 7
