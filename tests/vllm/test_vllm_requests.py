"""Isolation, aborts and preemption under a real vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORED = 640

ISOLATION = (
    SETUP
    + """
llm = make_llm(
    args["model"],
    transfer(config=tiers(args["root"])),
    kv_bytes=32 << 20,
)
one = prompt(1)

def ask(salt=None, params=None):
    llm.reset_prefix_cache()
    quiet(llm)
    return complete(llm, [one], salts=[salt], transfer_params=params)[0]

def tierkv_params(**values):
    return {"tierkv": values}

tell(
    plain=ask(),
    plain_again=ask(),
    red=ask("red"),
    red_again=ask("red"),
    blue=ask("blue"),
    acme=ask(None, tierkv_params(tenant="acme")),
    acme_again=ask(None, tierkv_params(tenant="acme")),
    nothing=ask(None, tierkv_params(max_load_tokens=0)),
    part=ask(None, tierkv_params(max_load_tokens=256)),
    malformed=ask(None, tierkv_params(tennant="acme")),
    session=ask(None, tierkv_params(session="chat-1")),
    stats=side(llm).stats(),
    sessions=[info.id for info in worker()._manager.engine.sessions()],
)
"""
)


def test_f005_salts_tenants_and_wishes_of_requests(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(ISOLATION, wanted).checked()
    cached = {
        name: one["cached"]
        for name, one in told.items()
        if isinstance(one, dict) and "cached" in one
    }
    assert cached == {
        "plain": 0,
        "plain_again": STORED,
        "red": 0,
        "red_again": STORED,
        "blue": 0,
        "acme": 0,
        "acme_again": STORED,
        "nothing": 0,
        "part": 256,
        "malformed": 0,
        "session": STORED,
    }
    outputs = {tuple(told[name]["output"]) for name in cached}
    assert len(outputs) == 1
    assert told["stats"]["malformed"] == 1
    assert told["sessions"] == ["chat-1"], "sessions of requests without one have to go"


PRESSURE = (
    SETUP
    + """
# room for about 2,800 tokens: four requests of 700 and 250 tokens do not fit
llm = make_llm(
    args["model"],
    transfer(config=tiers(args["root"])),
    kv_bytes=(2 * 65536) * 23,
    max_model_len=1024,
)
prompts = [prompt(number) for number in range(4)]
alone = [complete(llm, [one], max_tokens=250)[0]["output"] for one in prompts]
quiet(llm)
rounds = []
for _ in range(args["rounds"]):
    llm.reset_prefix_cache()
    answers = complete(llm, prompts, max_tokens=250)
    rounds.append([a["output"] == o for a, o in zip(answers, alone)])
metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
counted = quiet(llm)
# aborts in every state: of what waits, loads, runs
from vllm import SamplingParams
import random as chance
dice, engine, serial = chance.Random(3), llm.llm_engine, 0
for _ in range(args["aborts"]):
    llm.reset_prefix_cache()
    names = []
    for one in dice.sample(prompts, 3):
        serial += 1
        names.append(f"abort-{serial}")
        sampling = SamplingParams(
            temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False
        )
        engine.add_request(names[-1], {"prompt_token_ids": one}, sampling)
    for _ in range(dice.randrange(6)):
        engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
deadline = time.monotonic() + 60
while free_blocks(llm)[0] < free_blocks(llm)[1] and time.monotonic() < deadline:
    engine.engine_core.get_output()  # loads of requests that are gone come to their end
left = free_blocks(llm)
llm.reset_prefix_cache()
after = complete(llm, prompts[:1], max_tokens=250)[0]["output"] == alone[0]
engine.engine_core.get_output()  # the ranks hear in the next step that a request is over
while worker()._manager.engine.sessions() and time.monotonic() < deadline + 60:
    time.sleep(0.01)
tell(
    rounds=rounds, counted=counted, left=left, after=after,
    preemptions=metrics.get("vllm:num_preemptions", 0), live=side(llm).stats(),
    errors=worker()._rank.counters.errors, sessions=len(worker()._manager.engine.sessions()),
)
"""
)


def test_f006_preemption_and_aborts_leak_no_block(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {
        "model": vllm_model("tiny-llama"),
        "root": str(tmp_path / "root"),
        "rounds": 3,
        "aborts": 20,
    }
    told = vllm_run(PRESSURE, wanted).checked()
    assert told["preemptions"] > 0, "there was no pressure"
    assert all(all(each) for each in told["rounds"])
    assert told["counted"]["load_tokens"] > 0
    assert told["left"][0] == told["left"][1]
    assert told["after"]
    assert told["errors"] == 0
    assert told["sessions"] == 0
