"""``tierkv demo``, whole, with a model that is tiny; and what can go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo.conftest import save
from tierkv.cli import main
from tierkv.errors import BackendError
from tierkv_adapters.hf.demo import restart, running
from tierkv_adapters.hf.demo.loading import load_model
from tierkv_adapters.hf.demo.scenario import Scenario

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer after the restart in this process: a new one takes seconds to load its libraries."""

    def ask(directory: Path, root: Path, request: restart.Request) -> restart.Answer:
        model, _ = load_model(directory)
        return restart.answer(model, root, json.dumps(asdict(request)))

    monkeypatch.setattr(running, "ask_new_process", ask)


def _demo(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code = main(["demo", "--json", *options])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    result: dict[str, Any] = json.loads(printed.out)
    return result


def test_everything_is_shown_and_identical(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    store = tmp_path / "store"
    result = _demo(capsys, "--model", str(tiny), "--keep", str(store))
    turns, back = result["turns"], result["restart"]

    assert result["totals"]["identical"] is True
    assert len(turns) >= 7
    assert [turn["reused_tokens"] for turn in turns].count(0) == 2  # first turn, first reader
    for turn in turns:
        assert turn["identical"]
        assert turn["identical_to_cold"]
        assert (turn["tier"] is None) == (turn["reused_tokens"] == 0)
        assert min(turn["ttft_cold_s"], turn["ttft_restored_s"]) > 0
    assert {turn["tier"] for turn in turns} == {None, "host", "nvme"}
    held = result["totals"]["bytes_by_tier"]
    assert held["nvme"] > held["host"] > 0
    assert back["identical"]
    assert back["reused_tokens"] / back["prompt_tokens"] >= 0.85
    assert any(path.is_file() for path in store.rglob("*"))

    request.getfixturevalue("one_process")  # it was shown above that a new one answers
    again = _demo(capsys, "--model", str(tiny), "--keep", str(store), "--max-new-tokens", "1")
    first = again["turns"][0]
    assert first["reused_tokens"] >= 0.9 * first["prompt_tokens"], "the kept store was not used"
    assert again["totals"]["identical"] is True


@pytest.mark.usefixtures("one_process")
def test_a_seed_makes_other_prompts(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny), "--keep", str(tmp_path), "--max-new-tokens", "1"]
    for seed in ("4", "5"):
        first = _demo(capsys, *options, "--seed", seed)["turns"][0]
        assert first["reused_tokens"] < 0.1 * first["prompt_tokens"]


@pytest.mark.usefixtures("one_process")
def test_the_table_goes_to_stdout_and_progress_to_stderr(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", "--model", str(tiny), "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr()

    assert "time to first token" in printed.out
    assert "after restart" in printed.out
    assert "What to try next" in printed.out
    assert "restarting" in printed.err
    assert "restarting" not in printed.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_process")
def test_a_reply_that_differs_is_a_failure(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scenario, "expected", lambda *_: [1, 2, 3])

    assert main(["demo", "--json", "--model", str(tiny), "--max-new-tokens", "2"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["restart"]["identical"] is False
    assert result["totals"]["identical"] is False


def test_ctrl_c_cleans_up(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_thread_leaks: None,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def ask(*_: object) -> None:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Scenario, "ask", ask)

    assert main(["demo", "--model", str(tiny)]) == 130
    assert [name.startswith("tierkv-demo-") for name in seen[0]] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_the_process(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tierkv", "demo", "--model", str(tiny)]
    # long replies: it must still be busy when the signal comes
    command += ["--max-new-tokens", "250"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("tierkv-demo-*/*")) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=90)

    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.glob("tierkv-demo-*")) == []


@pytest.mark.parametrize("bad", ["no-such-model", "empty", "broken", "short"])
def test_a_model_that_will_not_do(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / bad
    expected = {
        "no-such-model": "neither",
        "empty": "no config.json",
        "broken": "cannot load",
        "short": "context of",
    }[bad]
    if bad != "no-such-model":
        directory.mkdir()
    if bad == "broken":
        (directory / "config.json").write_text('{"model_type": "llama"}')
    if bad == "short":
        save(directory, positions=512)

    assert main(["demo", "--model", str(directory)]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert "Traceback" not in message


def test_a_store_that_cannot_be_kept_is_refused_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "find_model", None)
    file = tmp_path / "notes"
    file.write_text("mine")

    for keep in (file, file / "deep" / "er"):
        assert main(["demo", "--keep", str(keep)]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert f"{str(file)!r} is no directory; name another one" in err
    assert file.read_text() == "mine"


def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from tierkv.cli import main; "
        "sys.exit(main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_an_index_it_says_where_to_get_weights(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TIERKV_WHEELS"}
    environment |= {"TIERKV_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", "demo"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 2
    assert "TIERKV_WHEELS" in done.stderr
    assert "--model DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_restart_that_fails_says_why(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho first >&2\necho no disk >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    with pytest.raises(BackendError, match="code 3: no disk"):
        restart.ask_new_process(tiny, tmp_path, restart.Request([1, 2, 3], 2))


def test_the_new_process_refuses_rubbish(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("rubbish"))

    assert main(["demo", "--model", str(tiny), "--keep", str(tmp_path), "--answer"]) == 2
    assert "meant for the demo itself" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_real_model_is_as_quick_as_promised(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.models import model_directory

    model_directory("smollm2")
    assert main(["demo", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)

    assert result["totals"]["identical"] is True
    assert all(turn["identical_to_cold"] for turn in result["turns"])
    assert result["totals"]["ttft_ratio_median"] <= 0.25
    back = result["restart"]
    assert back["reused_tokens"] / back["prompt_tokens"] >= 0.9
