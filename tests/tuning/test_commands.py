"""``tierkv sweep`` and ``tierkv tune`` from the command line."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from tests.tuning.planted import FRAME, scans
from tierkv import cli, tuning
from tierkv.cli import tuning as commands
from tierkv.config import load_config
from tierkv.errors import ConfigError
from tierkv.traces import write_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl.zst"
    write_trace(str(path), scans(30))
    return str(path)


def test_sweep(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "points.csv"
    sizes = ["--tier", f"host={8 * FRAME},{16 * FRAME}", "--tier", f"nvme=0,{64 * FRAME}"]
    command = ["sweep", trace, *sizes, "--policy", "lru,lru2", "--csv", str(table)]
    assert cli.main([*command, "--reach-hit", "0.1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    assert len(result["rows"]) == 8
    enough = [row for row in result["rows"] if row["token_hit_ratio"] >= 0.1]
    assert 0 < len(enough) < 8
    cheapest = min(enough, key=lambda row: (row["cost"], -row["token_hit_ratio"]))
    assert result["cheapest"].startswith(f"{cheapest['policy']}, host")
    assert len(table.read_text().splitlines()) == 9
    assert cli.main([*command, "--reach-hit", "0.99"]) == 1
    said = capsys.readouterr().out
    assert "none of these reaches it" in said
    assert said.count("lru2") == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tier", "host"], "want NAME=SIZE"),
        (["--tier", "host=1MiB", "--tier", "host=2MiB"], "each tier once"),
        (["--tier", "host=inf"], "a sweep needs sizes"),
        (["--tier", "host=1MiB", "--price", "host"], "want NAME=COST"),
        (["--tier", "host=1MiB", "--price", "host=-1"], "want NAME=COST"),
        (["--tier", "host=1MiB", "--price", "host=nan"], "want NAME=COST"),
        (["--tier", "host=1MiB", "--plot", "curve.doc"], "a picture ends in"),
        (["--tier", "host=1MiB", "--policy", "belady"], "belady"),
        (["--tier", "host=1MiB", "--csv", "/nowhere/a.csv"], "no directory '/nowhere'"),
        (["--tier", "host=1MiB", "--plot", "/nowhere/a.svg"], "no directory '/nowhere'"),
        (["--tier", "host=1MiB", "--csv", "/"], "is a directory"),
        (["--tier", "host=1MiB", "--price", "hosst=3"], "there is no such --tier (host)"),
        (["--tier", "host=1MiB", "--price", "host=inf"], "want NAME=COST"),
        (["--tier", "hostx=1MiB"], "another needs --price hostx=COST"),
        (["--tier", "host=nan"], "--tier host: not a size"),
        (["--tier", "host=-1"], "--tier host: not a size"),
        (["--tier", "host=1"], "hold no block of this trace"),
        (["--tier", "host=1MiB", "--prefill", "nan"], "--prefill"),
        (["--tier", "host=1MiB", "--csv", "/proc/a.csv"], "cannot be written"),
        (["--tier", "host=1MiB", "--sample", "nan"], "a share above 0 and up to 1"),
        (["--tier", "host=1MiB", "--sample", "2"], "a share above 0 and up to 1, not 2"),
        (["--tier", "host=1MiB", "--sample", "1e-9"], "take a larger one"),
        (["--tier", "host=1MiB", "--reach-hit", "5"], "--reach-hit"),
        (["--tier", "host=1MiB", "--save-seconds", "-1"], "--save-seconds"),
    ],
)
def test_sweep_refuses(
    wrong: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", trace, *wrong]) == 2
    assert message in capsys.readouterr().err


def test_tune(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "found.toml"
    command = ["tune", trace, "--tier", f"host={16 * FRAME}", "--policy", "lru,lru2"]
    command += ["--trials", "4", "--out", str(out), "--study", str(tmp_path / "study")]
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["trials"] == 4
    assert set(result["held_out"]) == {"shipped", "tuned"}
    assert load_config(out).config.policy == result["settings"]["policy"]
    assert cli.main(["config", "show", str(out)]) == 0
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "8 trials" in said
    assert "second half" in said


def test_tune_ends_with_ctrl_c(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    whole = tuning.tune

    def cut(*args: object, **options: object) -> object:
        def stop(done: int, best: float) -> None:
            raise KeyboardInterrupt

        return whole(*args, **(options | {"on_trial": stop}))  # type: ignore[arg-type]

    monkeypatch.setattr(commands, "tune", cut)
    out = tmp_path / "found.toml"
    assert cli.main(["tune", trace, "--tier", f"host={16 * FRAME}", "--out", str(out)]) == 130
    assert out.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tier", "host=1MiB,2MiB"], "one size a tier"),
        (["--tier", "host=1MiB", "--out", "/nowhere/at/all.toml"], "there is no directory"),
        (["--tier", "host=1MiB", "--budget", "soon"], "--budget: not a duration: 'soon'"),
        (["--tier", "host=1"], "hold no block of this trace"),
        (["--tier", "host=1MiB", "--prefill", "nan"], "--prefill"),
        (["--tier", "nvme=1MiB", "--path", ""], "names no directory"),
        (["--tier", "nvme=1MiB", "--path", "kv/{host}"], "unknown placeholder {host}"),
        (["--tier", "host=1MiB", "--out", "/proc/a.toml"], "cannot be written"),
        (["--tier", "host=1MiB", "--trials", "0"], "--trials"),
        (["--tier", "host=0"], "a tier needs bytes"),
        (["--tier", "hostx=1MiB"], "a tier is one of device, file, host, nvme"),
        (["--tier", "host=1MiB", "--policy", "lru,zz"], "unknown name 'zz'"),
        (["--tier", "host=1MiB", "--out", "/"], "is a directory"),
    ],
)
def test_tune_refuses(
    wrong: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", trace, *wrong]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_replays_nothing_before_each_policy_is_known(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "sweep", None)
    assert cli.main(["sweep", trace, "--tier", "host=1MiB", "--policy", "lru,zz"]) == 2
    assert "unknown name 'zz'" in capsys.readouterr().err


def test_a_trace_without_requests_is_swept_by_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.jsonl"
    write_trace(str(path), scans(0))
    assert cli.main(["sweep", str(path), "--tier", "host=1MiB"]) == 2
    assert "no requests" in capsys.readouterr().err


def test_a_size_given_twice_is_one_point(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", trace, "--tier", "host=1MiB,1MiB", "--policy", "lru,lru"]) == 0
    assert capsys.readouterr().out.count("host 1 MiB") == 1


def test_what_was_found_is_told_although_its_picture_cannot_be_drawn(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def full(path: Path, data: bytes) -> None:
        raise ConfigError(f"cannot write {path}: No space left on device; name another file")

    monkeypatch.setattr("tierkv.tuning.plotting.put", full)
    target = str(tmp_path / "curve.svg")
    assert cli.main(["sweep", trace, "--tier", "host=1MiB", "--plot", target]) == 2
    out, err = capsys.readouterr()
    assert "host 1 MiB" in out
    assert "No space left" in err


@pytest.mark.parametrize("odd", ["a trace\x00\x1b[31m\x7f", "\ud83d", "\U0001f600"])
def test_whatever_a_trace_is_called_its_settings_are_read_back(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    path, out = tmp_path / "trace.jsonl", tmp_path / "found.toml"
    planted = scans(30)
    planted.header = dataclasses.replace(planted.header, origin=odd)
    write_trace(str(path), planted)
    place = "/data/\U0001f600/\x7f/{worker}"
    options = ["--tier", f"nvme={16 * FRAME}", "--trials", "1", "--path", place]
    assert cli.main(["tune", str(path), *options, "--out", str(out)]) == 0
    assert load_config(out).config.tiers[0].path == place


def test_tune_refuses_a_file_that_is_no_study(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    study = tmp_path / "notes.txt"
    study.write_text("mine\n")
    out = ["--out", str(tmp_path / "found.toml"), "--study", str(study), "--trials", "1"]
    assert cli.main(["tune", trace, "--tier", "host=1MiB", *out]) == 2
    assert "is no study" in capsys.readouterr().err
    assert study.read_text() == "mine\n"


def test_tune_without_a_gain_says_plus_nothing(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    out = ["--out", str(tmp_path / "found.toml"), "--policy", "lrfu", "--trials", "1"]
    assert cli.main(["tune", trace, "--tier", f"host={16 * FRAME}", *out]) == 0
    assert "second half: +0.0%" in capsys.readouterr().out


def test_tune_replaces_what_it_wrote_and_nothing_else(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "tierkv.toml"
    command = ["tune", trace, "--tier", f"host={16 * FRAME}", "--trials", "1", "--out", str(out)]
    assert cli.main(command) == 0
    assert cli.main(command) == 0
    out.write_text("policy = 'lru'\n")
    assert cli.main(command) == 2
    assert "not from tierkv tune" in capsys.readouterr().err
    assert out.read_text() == "policy = 'lru'\n"
