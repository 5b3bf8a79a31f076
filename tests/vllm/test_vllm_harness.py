"""What the other tests with vLLM stand on: processes that are killed, models that tell."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.vllm.processes import run, why_not

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.vllm.processes import Ran

pytestmark = pytest.mark.timeout(900)  # processes are killed long before


def test_what_was_told_outlives_the_process() -> None:
    code = "tell(a=args['x'])\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    died = run(code, {"x": 7})
    assert (died.told, died.status, died.outcome) == ({"a": 7}, -9, "died")
    with pytest.raises(RuntimeError, match=r"died \(status -9"):
        died.checked()


def test_a_process_that_hangs_is_killed_with_what_it_started() -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
tell(child=child.pid)
time.sleep(600)
"""
    hung = run(code, within=10)
    assert hung.outcome == "hung"
    deadline = time.monotonic() + 60
    while _runs(hung.told["child"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # nobody may be there to collect it


def test_an_error_is_shown() -> None:
    with pytest.raises(RuntimeError, match="ValueError: it is so"):
        run("raise ValueError('it is so')").checked()


def test_an_interpreter_without_vllm_says_so(tmp_path: Path) -> None:
    assert "cannot be run" in str(why_not(tmp_path / "python"))


CODE = """
from benchmarks.vllm.engine import complete, make_llm
llm = make_llm(args["model"])
first, other = args["prompts"]
tell(first=complete(llm, [first]), other=complete(llm, [other]))
llm.reset_prefix_cache()
tell(both=complete(llm, [first, other]), again=complete(llm, [first]))
"""


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-mla"])
def test_tiny_models_tell_wrong_kv(
    vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str], name: str
) -> None:
    """Their output depends on a page far back, and on nothing else."""
    first = [(7 * n * n + 3 * n) % 251 for n in range(400)]
    other = [(5 * token + 1) % 251 for token in first[:128]] + first[128:]  # one page
    args = {"model": vllm_model(name), "prompts": [first, other]}
    told = vllm_run(CODE, args).checked()
    assert told["first"][0]["output"] != told["other"][0]["output"]
    assert len(set(told["first"][0]["output"])) > 3
    for a, b in (("first", "again"), ("first", "both")):
        assert told[a][0]["output"] == told[b][0]["output"]
    assert told["other"][0]["output"] == told["both"][1]["output"]
