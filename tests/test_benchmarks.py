"""Every benchmark runs at a tiny scale, prints its document, and its checks can fail."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import acceptance, datapath, disk, faults, gpu_check, peers_env, peers_probes
from benchmarks import pipeline as pipelines
from benchmarks.report import emit
from tierkv import jit
from tierkv.buffers import Arena
from tierkv.jit import copying
from tierkv.mover.blockcopies import Blocks
from tierkv.mover.grids import grid_of
from tierkv.pipeline import Pipeline
from tierkv.testing.faults import Corrupting, Faulty, inject
from tierkv.testing.virtual import Throttled, run_virtual

if TYPE_CHECKING:
    from tierkv.abc import Backend

SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))
KIB = 1 << 10


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON document that was printed."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    return found


ABOUT = ("measures", "against", "floors", "takes", "needs")
COMMANDS = (
    *("acceptance", "codec_peers", "codecs", "compression", "datapath", "disk", "gpu_check"),
    *("overhead", "peers", "pipeline", "policies", "prefetch", "replay", "sync", "ttft"),
    *("tune_prefetch", "vllm"),
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_what_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"benchmarks.{name}.__main__" if name == "vllm" else f"benchmarks.{name}"
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(where).main(["--help"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m benchmarks.{name} [-h] ")
    lines = told[: told.index("\noptions:")].splitlines()
    said = [line.split(maxsplit=1) for line in lines if line and not line.startswith(" ")]
    assert [words[0] for words in said if words[0] in ABOUT] == list(ABOUT)
    assert all(len(words) == 2 and "@" not in words[1] for words in said if words[0] in ABOUT)
    assert not re.search(r"``|:(mod|class|func):", told)
    options = told[told.index("\noptions:") :].split("\n\n")[0].splitlines()
    for line, following in zip(options, [*options[1:], ""], strict=True):
        explained = re.search(r"\S {2,}\S", line.strip()) or following.startswith(" " * 8)
        assert explained or not line.startswith("  -"), line


def test_every_benchmark_with_a_command_line_is_looked_at() -> None:
    folder = Path(acceptance.__file__).parent
    found = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in (*folder.glob("*.py"), *folder.glob("*/__main__.py"))
        if "arguments(" in path.read_text() and path.stem != "report"
    }
    assert found == set(COMMANDS)
    parsers = {p.name for p in folder.rglob("*.py") if "ArgumentParser(" in p.read_text()}
    assert parsers == {"report.py"}, "others have a help of their own"


# --------------------------------------------------------------------------- datapath


def test_datapath(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datapath, "_ROUNDS_S", 0.0)
    size = ["--mib", "0.25", "--batch", "0.5", "--repeats", "2", "--directory", str(tmp_path)]
    assert datapath.main([*size, "--json"]) in (0, 1)  # as fast as the machine is just now
    rows = document(capsys)["rows"]
    host = [row for row in rows if "ratio_to_memcpy" in row]
    assert {row["op"] for row in host} >= {"host get", "host put", "scatter to dense"}
    assert all(row["ratio_to_memcpy"] > 0 for row in host)
    assert {row["machine_code"] for row in rows} == {jit.host() is not None}
    assert {row["frames"] for row in host} == {1, 2}
    assert not list(tmp_path.iterdir())
    if disk.direct_works(tmp_path):
        ours = {row["op"]: row for row in rows if "ratio_to_odirect" in row}
        assert set(ours) == {"nvme read", "nvme write"}
        assert all(row["buffered_bytes"] == 0 for row in ours.values())


def test_the_bare_copy_and_the_tier_move_as_many_bytes() -> None:
    frames = datapath.Frames(256 * KIB, count=2, calls=2)
    assert frames.space.layout.groups[0].raw_bytes(frames.tokens) == frames.nbytes
    assert len(frames.ids(1)) == 2 * frames.tokens
    copy = datapath._Memcpy(frames, 1)
    copy.run(1)
    for target, source in zip(copy._targets[0], copy._source, strict=True):
        assert target.nbytes == frames.nbytes
        assert torch.equal(target.view(torch.int16), source.view(torch.int16))


@pytest.mark.parametrize("fast", [False, True])
def test_without_checksums_there_are_none(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the row without checksums leaves out is what stores really do."""
    if fast and jit.host() is None:
        pytest.skip("no machine code here")
    copying.prepare()
    monkeypatch.setattr(copying, "ready", lambda: fast)
    frames = datapath.Frames(256 * KIB, count=2)
    (view,) = datapath._pages(frames)
    space, starts = frames.space, [0, frames.tokens]
    table = Pipeline(space).table(0, frames.tokens)
    arena = Arena(4 << 20)
    buffers = [arena.allocate(table[-1].end) for _ in starts]
    memory = [buffer.memory for buffer in buffers if buffer is not None]
    assert len(memory) == 2
    grid = grid_of(view, table, frames.tokens, starts, writing=False)
    assert grid is not None
    right = Blocks(grid, view, starts, memory).gather(0, 2)
    assert bytes(16) not in {digest for sums in right for digest in sums}
    with datapath._no_checksum():
        none = Blocks(grid, view, starts, memory).gather(0, 2)
    assert {digest for sums in none for digest in sums} == {bytes(16)}


# --------------------------------------------------------------------------- pipeline


def test_pipeline_in_virtual_time(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--tokens", "8192", "--model", "none"]
    assert pipelines.main([*size, "--json"]) == 0
    first = document(capsys)["rows"]
    assert pipelines.main([*size, "--json"]) == 0
    assert document(capsys)["rows"] == first, "virtual time is the same every time"
    assert {row["what"].split(",")[0] for row in first} == {"virtual load", "virtual store"}
    assert all(1.0 <= row["ratio_to_ideal"] <= 1.10 for row in first)
    emit("pipeline", first, json_flag=False)


def test_a_pipeline_that_stalls_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each batch nothing happens for as long as the batch took: half of the speed."""

    class Stalling(Throttled):
        async def _transfer(self, nbytes: int) -> None:
            await super()._transfer(nbytes)
            await asyncio.sleep(self.latency + nbytes / self.bandwidth)

    monkeypatch.setattr(pipelines, "Throttled", Stalling)
    row = run_virtual(pipelines._virtual("load", 8192, 4.0))
    assert not row["ok"]
    assert isinstance(row["ratio_to_ideal"], float)
    assert row["ratio_to_ideal"] > 1.9


@pytest.mark.stress
@pytest.mark.model
def test_layer_by_layer_on_a_small_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=12_000,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    row = pipelines.model_row(model, 256, 128, 2)
    assert row["reused"] == 256
    assert isinstance(row["ratio"], float)


# --------------------------------------------------------------------------- GPU


@pytest.mark.parametrize("suites", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_gpu_check_on_the_stand_in(
    suites: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not suites:  # they run by themselves in other tests
        monkeypatch.setattr(gpu_check, "_suites", lambda *_: iter(()))
        monkeypatch.setattr(gpu_check, "_TIERS", ("device", "device+host+nvme", "host"))
    assert gpu_check.main(["--device", "cpu", "--mib", "1", "--repeats", "2", "--json"]) == 0
    rows = {row["what"]: row for row in document(capsys)["rows"]}
    assert all(row["ok"] for row in rows.values())
    assert sum(what.startswith("round trips over") for what in rows) == len(gpu_check._TIERS)
    assert any(what.startswith("suite of devices: ") for what in rows) == suites
    assert rows["files"]["value"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_gpu_check_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == []
    assert "no CUDA device" in said.err


def test_gpu_check_notices_wrong_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = gpu_check._tokens
    monkeypatch.setattr(gpu_check, "_TIERS", ("host",))
    monkeypatch.setattr(gpu_check, "_tokens", lambda pages, nhd: right(pages, nhd=nhd) + 1)
    (row,) = gpu_check._trips("cpu", "cpu", tmp_path)
    assert not row["ok"]
    assert "paged" in str(row["value"])


# --------------------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", faults.KINDS)
def test_cancelled_calls_leave_nothing(kind: str, tmp_path: Path) -> None:
    found = faults.cancels(kind, tmp_path, 12, seed=5)
    assert found.problems == []
    assert found.cancels >= 12
    assert found.cancelled > 0


def test_a_wrong_byte_is_noticed() -> None:
    memory = faults._Memory()
    right = faults._right(1)
    assert not memory.wrong(right, 0)
    assert memory.wrong(right, 16), "a block that is due and was not written"
    memory.all.copy_(right)
    assert not memory.wrong(right, 96)
    memory.all[1, 0, 3, 20, 5] += 1
    assert memory.wrong(right, 0)


def test_what_a_backend_spoils_is_never_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: without verification the same damage is seen as wrong buffers."""

    def spoil(backend: Backend) -> Faulty:
        return inject(backend, *([Corrupting(0.5)] if backend.kind == "nvme" else []))

    monkeypatch.setattr(faults, "inject", spoil)
    assert faults.cancels("nvme", tmp_path / "checked", 12, seed=5).wrong == 0
    monkeypatch.setattr("tierkv.mover.scattering.verify", lambda *_: None)
    monkeypatch.setattr("tierkv.sections.verify", lambda *_: None)
    assert faults.cancels("nvme", tmp_path / "blind", 60, seed=5).wrong > 0


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_acceptance_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_SCALE", str(0.1 * SCALE))
    bad = [row for row in acceptance.faults() if not row["ok"]]
    assert bad == []


def test_the_lane_names_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name in ("crash", "faults", "nvme", "device", "datapath", "peers", "pipeline", "replay"):
        assert name in listed


def test_reopening_is_measured() -> None:
    rows = list(acceptance._reopen(300))
    assert [row["ok"] for row in rows] == [True, True, True]
    assert rows[0]["value"] == 1.0


# --------------------------------------------------------------------------- peers


@pytest.mark.parametrize("name", peers_probes.PROBES)
def test_probe(name: str, tmp_path: Path) -> None:
    if name in ("mp_write_burst", "torn_write"):
        pytest.skip("takes seconds: in the stress lane")
    held, told = peers_probes.probe(name, tmp_path)
    assert held, told


@pytest.mark.stress
@pytest.mark.parametrize("name", ["mp_write_burst", "torn_write"])
def test_long_probe(name: str, tmp_path: Path) -> None:
    held, told = peers_probes.probe(name, tmp_path)
    assert held, told


@pytest.fixture
def lmcache() -> str:
    """An environment with LMCache that is there already."""
    place = os.environ.get("BENCH_LMCACHE_ENV")
    if place is None:
        pytest.skip("BENCH_LMCACHE_ENV names no environment with LMCache")
    return place


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_peers(lmcache: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert sum("probe" in row for row in rows) == 18
    assert all(row["ok"] for row in rows if "probe" in row)
    assert sum(row["lmcache"] != "held" for row in rows if "probe" in row) >= 10
    assert {row["op"] for row in rows if "op" in row} >= {"found after a restart"}


def test_an_environment_without_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_LMCACHE_ENV", str(tmp_path))
    with pytest.raises(RuntimeError, match="cannot be imported"):
        peers_env.find_python()
