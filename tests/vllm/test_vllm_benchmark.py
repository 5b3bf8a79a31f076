"""The benchmark with vLLM: its rows, and that each bound of ours can be missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.vllm import __main__ as command
from benchmarks.vllm import damage
from benchmarks.vllm.connectors import CONNECTORS, FAULTS, plug_in, transfer
from benchmarks.vllm.measure import Answer, Broken, Visit
from benchmarks.vllm.processes import run
from benchmarks.vllm.rows import Findings, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.vllm.processes import Ran

pytestmark = pytest.mark.timeout(900)  # processes are killed long before
RIGHT = [4, 5, 6]


def visit(cpu: float, cached: int, output: list[int] | None = None, ttft: float = 0.0) -> Visit:
    """A process that answered one prompt of 2,048 tokens."""
    answer = Answer(output or RIGHT, cached, ttft or cpu, cpu, cpu, cpu)
    return Visit("alive", {2048: answer}, {}, "")


def findings() -> Findings:
    """What a sound tierkv beside the others gives, in two rounds."""
    found = Findings()
    for _ in range(2):
        for name, again in (("none", 10.0), ("example", 1.2), ("tierkv", 1.0)):
            found.add(name, visit(10.0, 0), again=False)
            found.add(name, visit(again, 0 if name == "none" else 1920), again=True)
    for fault in FAULTS:
        found.broken["tierkv", fault] = Broken(visit(10.0, 0, ttft=2.1), 7)
    return found


def ours(found: Findings) -> dict[str, Any]:
    return next(row for row in rows(found, [2048]) if row["connector"] == "tierkv")


def test_rows_have_what_was_promised() -> None:
    table = rows(findings(), [2048])
    assert [row["connector"] for row in table] == ["none", "example", "tierkv"]
    row = table[-1]
    assert row["ok"] is True
    assert (row["prompt_tokens"], row["hit_tokens"], row["cpu_s"]) == (2048, 1920, 1.0)
    assert (row["cpu_ratio"], row["ttft_ratio"], row["restart_hit"]) == (0.1, 0.1, 1920 / 2048)
    assert (row["corrupt_detected"], row["slow_tier_s"]) == (True, 2.1)
    assert (row["failing_tier"], row["failed_transfer"]) == ("alive", "alive")


def again(cpu: float, cached: int, output: list[int] | None = None) -> Callable[[Findings], None]:
    def spoil(found: Findings) -> None:
        found.again["tierkv"] = [visit(cpu, cached, output)] * 2

    return spoil


def broken(fault: str, what: Visit, damaged: int = 7) -> Callable[[Findings], None]:
    def spoil(found: Findings) -> None:
        found.broken["tierkv", fault] = Broken(what, damaged)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        again(1.0, 1700),
        again(1.0, 1920, [4, 5, 7]),
        again(1.6, 1920),
        again(1.4, 1920),  # slower than the example connector
        broken("corrupt", visit(10.0, 0, [4, 5, 7])),
        broken("corrupt", visit(10.0, 0), damaged=0),
        broken("slow", visit(10.0, 0, ttft=90.0)),
        broken("slow", Visit("hung", {}, {}, "")),
        broken("failing", Visit("hung", {}, {}, "")),
        broken("failing", visit(10.0, 0, [4, 5, 7])),
        broken("transfer", Visit("died", {}, {}, "")),
    ],
)
def test_every_bound_can_be_missed(spoil: Callable[[Findings], None]) -> None:
    found = findings()
    spoil(found)
    assert ours(found)["ok"] is False


def test_who_died_is_told() -> None:
    found = findings()
    assert not found.complaints
    found.broken["tierkv", "transfer"] = Broken(Visit("died", {}, {}, "AssertionError"), 0)
    assert found.complaints == ["tierkv, transfer: died\nAssertionError"]


def test_damage_is_done_to_what_holds_kv(tmp_path: Path) -> None:
    big, small = tmp_path / "a" / "blocks", tmp_path / "index"
    big.parent.mkdir()
    data = bytes(range(256)) * 400
    big.write_bytes(data)
    small.write_bytes(data[:1000])
    assert damage.flip_bits(tmp_path) == 6
    assert small.read_bytes() == data[:1000]
    changed = [n for n, (x, y) in enumerate(zip(data, big.read_bytes(), strict=True)) if x != y]
    assert len(changed) == 6
    assert changed[1] - changed[0] == 16 << 10
    assert damage.truncate(tmp_path) == 1
    assert big.stat().st_size == len(data) // 2


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_settings_are_plain_data(tmp_path: Path, connector: str, fault: str | None) -> None:
    asked = transfer(connector, tmp_path, fault)
    assert (asked is None) == (connector == "none")
    assert json.loads(json.dumps(asked)) == asked


def test_faulty_tiers_are_found_by_name(tmp_path: Path) -> None:
    code = """
import tierkv
from tierkv import registry
for kind in ("failing_nvme", "full_host", "readonly_nvme", "slow_nvme"):
    tier = tierkv.Tier(kind, "16MiB", path=None if "host" in kind else args["path"])
    tell(**{kind: type(registry.resolve("backends", kind)(tier)).__name__})
"""
    path = str(plug_in(tmp_path))
    told = run(
        code, {"path": str(tmp_path / "t")}, python=Path(sys.executable), env={"PYTHONPATH": path}
    ).checked()
    assert set(told.values()) == {"FailingNvme", "FullHost", "ReadonlyNvme", "SlowNvme"}


def test_without_vllm_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TIERKV_VLLM_PYTHON", str(tmp_path / "python"))
    assert command.main(["--json"]) == 2
    assert "cannot be run" in capsys.readouterr().err


def test_quick(
    vllm_python: Path,
    vllm_run: Callable[..., Ran],
    vllm_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of it on a tiny model, without faults: the example connector and ours."""
    monkeypatch.setenv("TIERKV_VLLM_PYTHON", str(vllm_python))
    only = ["--only", "tierkv", "--model", vllm_model("tiny-llama")]
    assert command.main(["--json", "--quick", *only]) in (0, 1)  # as quick as the machine is now
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    row = document["rows"][-1]
    assert (row["connector"], row["identical"], row["hit_tokens"]) == ("tierkv", True, 512)
