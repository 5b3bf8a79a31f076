"""A fresh process finds what an earlier one stored, and answers with the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import PROMPTS, SETTINGS, SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORED = 640  # whole blocks of 128 (or 64) tokens in prompts of 700

FIRST = (
    SETUP
    + """
llm = make_llm(args["model"], transfer(config=tiers(args["root"])), kv_bytes=32 << 20)
prompts = [prompt(1), prompt(2)]
tell(answers=complete(llm, prompts), counted=quiet(llm))
if args["kill"]:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
)
SECOND = (
    SETUP
    + """
llm = make_llm(args["model"], transfer(config=tiers(args["root"])), kv_bytes=32 << 20)
prompts = [prompt(1), prompt(2)]
answers = complete(llm, prompts)
tell(answers=answers, counted=worker()._rank.counters.snapshot(), scheduler=side(llm).stats())
llm.reset_prefix_cache()  # the device's
tell(again=complete(llm, prompts), other=complete(llm, [prompt(3)]))
# what the connector keeps is emptied, too
tell(reset=llm.reset_prefix_cache(reset_connector=True), empty=complete(llm, prompts))
tell(free=free_blocks(llm))
"""
)


@pytest.mark.parametrize(
    ("name", "kill"), [("tiny-llama", False), ("tiny-gemma3", True), ("tiny-mla", True)]
)
def test_a_fresh_process_answers_from_what_was_stored(
    name: str,
    kill: bool,
    tmp_path: Path,
    vllm_run: Callable[..., Ran],
    vllm_model: Callable[[str], str],
) -> None:
    # full attention; full and sliding in two groups; latents. Also behind a SIGKILL
    wanted = {"model": vllm_model(name), "root": str(tmp_path / "root"), "kill": kill}
    ran = vllm_run(FIRST, wanted)
    first = ran.told if kill else ran.checked()
    assert ran.status == (-9 if kill else 0), ran.log
    assert [one["cached"] for one in first["answers"]] == [0, 0]
    assert first["counted"]["save_tokens"] >= 2 * STORED
    second = vllm_run(SECOND, wanted).checked()
    outputs = [one["output"] for one in first["answers"]]
    for answers in (second["answers"], second["again"], second["empty"]):
        assert [one["output"] for one in answers] == outputs
    assert [one["cached"] for one in second["answers"]] == [STORED, STORED]
    assert second["counted"]["load_tokens"] == 2 * STORED
    assert second["scheduler"]["loaded_tokens"] == 2 * STORED
    assert [one["cached"] for one in second["again"]] == [STORED, STORED]
    assert second["other"][0]["cached"] == 0
    assert second["reset"] is True
    assert [one["cached"] for one in second["empty"]] == [0, 0]
    assert len(set(second["free"])) == 1, "blocks of the device leaked"


APART = (
    PROMPTS
    + SETTINGS
    + """
import time
from benchmarks.vllm.engine import complete, make_llm

llm = make_llm(
    args["model"],
    transfer(config=tiers(args["root"])),
    kv_bytes=32 << 20,
    tensor_parallel_size=args["ranks"],
)
prompts = [prompt(1), prompt(2)]
told = {"cold": complete(llm, prompts)}
deadline = time.monotonic() + 60
while True:  # stores are heard of through the rank's socket
    llm.reset_prefix_cache()
    told["warm"] = complete(llm, prompts)
    if all(one["cached"] for one in told["warm"]) or time.monotonic() > deadline:
        break
told["metrics"] = [m.name for m in llm.get_metrics() if "tierkv" in m.name]
told["loaded"] = sum(
    m.value for m in llm.get_metrics() if m.name == "vllm:tierkv_load_tokens"
)
told["reset"] = llm.reset_prefix_cache(reset_connector=True)
told["empty"] = complete(llm, prompts)
tell(**told)
"""
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_core_in_a_process_of_its_own(
    ranks: int, tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root"), "ranks": ranks}
    # two: tensor parallel, an engine in each worker
    first = vllm_run(APART, wanted, multiprocess=True).checked()
    outputs = [one["output"] for one in first["cold"]]
    assert [one["output"] for one in first["warm"]] == outputs
    assert [one["output"] for one in first["empty"]] == outputs
    assert [one["cached"] for one in first["warm"]] == [STORED, STORED]
    assert [one["cached"] for one in first["empty"]] == [0, 0]
    assert first["reset"] is True
    assert first["loaded"] >= ranks * 2 * STORED
    assert "vllm:tierkv_corrupt" in first["metrics"]
    again = vllm_run(APART, wanted, multiprocess=True).checked()
    assert [one["output"] for one in again["cold"]] == outputs
