"""Recurrent states under a real vLLM: short convolutions, and a gated delta net.

Prompts are asked one after the other: what vLLM's CPU kernels compute of a prompt depends on what
else is in its batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

# model, dtype, tokens of a page as vLLM chooses them there
MODELS = [("tiny-lfm2", "float32", 128), ("tiny-qwen3next", "bfloat16", 256)]

START = (
    SETUP
    + """
llm = make_llm(
    args["model"],
    transfer(config=tiers(args["root"])),
    kv_bytes=32 << 20,
    dtype=args["dtype"],
    **args.get("options", {}),
)

def ask(tokens, max_tokens=100):
    return complete(llm, [tokens], max_tokens=max_tokens)[0]
"""
)
FIRST = (
    START
    + """
first = ask(prompt(1))
told = {"first": first, "second": ask(prompt(2)), "counted": quiet(llm)}
chat = prompt(1) + first["output"]  # a turn: its prompt is computed, and what was decoded
told["turn"] = ask(chat + prompt(5, 50))
quiet(llm)
tell(**told)
if args["kill"]:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
)
SECOND = (
    START
    + """
told = {"first": ask(prompt(1)), "second": ask(prompt(2))}
told["counted"] = worker()._rank.counters.snapshot()
chat = prompt(1) + told["first"]["output"]
told["turn"] = ask(chat + prompt(5, 50))
branch = prompt(1)[: args["page"] + 20] + prompt(6, 400)
told["branch"] = ask(branch, 4)
told["exactly"] = ask(prompt(1)[: args["page"]], 4)
quiet(llm)
llm.reset_prefix_cache()
told["joined"] = ask(prompt(1)[: args["page"] + 40], 4)
told["other"] = ask(prompt(3))
tell(stats=side(llm).stats(), free=free_blocks(llm), **told)
"""
)


@pytest.mark.parametrize(("name", "dtype", "page"), MODELS)
def test_a_fresh_process_goes_on_from_a_stored_state(
    name: str,
    dtype: str,
    page: int,
    tmp_path: Path,
    vllm_run: Callable[..., Ran],
    vllm_model: Callable[[str], str],
) -> None:
    wanted = {
        "model": vllm_model(name),
        "root": str(tmp_path / "root"),
        "dtype": dtype,
        "page": page,
        "kill": True,
    }
    first = vllm_run(FIRST, wanted)
    assert first.status == -9, first.log
    again = vllm_run(SECOND, wanted).checked()
    for key in ("first", "second", "turn"):
        assert again[key]["output"] == first.told[key]["output"], key
    stored, decoded = 700 // page * page, 799 // page * page
    assert [first.told[key]["cached"] for key in ("first", "second")] == [0, 0]
    assert [again[key]["cached"] for key in ("first", "second")] == [stored, stored]
    assert again["counted"]["load_tokens"] == 2 * stored
    assert again["counted"]["loads_short"] == 0
    # the second turn's prefix ends at a state that decoding left, where it came to a page's end
    assert again["turn"]["cached"] == max(stored, decoded)
    # vLLM left no state so early: nothing is offered, until a prompt ended just there
    assert again["exactly"]["cached"] == again["branch"]["cached"] == 0
    assert again["joined"]["cached"] == page
    assert again["other"]["cached"] == 0
    assert len(set(again["free"])) == 1, "blocks of the device leaked"


CHUNKED = (
    START
    + """
rank = worker()._rank
begin = rank.begin
def begin_behind_saves(orders):
    # the next chunk may get a state's page: whether its save has begun by then is the machine's
    # affair, and one that has not is dropped
    assert rank.drain(60)
    begin(orders)
rank.begin = begin_behind_saves
told = {"whole": ask(prompt(1), 8)}
quiet(llm)
for length in (200, 300, 500, 600):
    llm.reset_prefix_cache()
    told[str(length)] = ask(prompt(1)[:length] + prompt(6, 200), 8)
    quiet(llm)
    llm.reset_prefix_cache()
    told["again" + str(length)] = ask(prompt(1)[:length] + prompt(6, 200), 8)
llm.reset_prefix_cache(reset_connector=True)
for length in (200, 300, 500, 600):
    told["cold" + str(length)] = ask(prompt(1)[:length] + prompt(6, 200), 8)
    llm.reset_prefix_cache(reset_connector=True)
tell(free=free_blocks(llm), **told)
"""
)


@pytest.mark.parametrize("ahead", [False, True])
def test_chunked_prefill_leaves_a_state_where_each_chunk_ends(
    ahead: bool, tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    # chunks of 256 tokens; also where steps are scheduled ahead of the results
    options = {"max_num_batched_tokens": 256, "async_scheduling": ahead}
    wanted = {
        "model": vllm_model("tiny-lfm2"),
        "root": str(tmp_path / "root"),
        "dtype": "float32",
        "options": options,
    }
    told = vllm_run(CHUNKED, wanted).checked()
    assert told["whole"]["cached"] == 0
    found = {length: told[str(length)]["cached"] for length in (200, 300, 500, 600)}
    assert found == {200: 0, 300: 256, 500: 256, 600: 512}
    for length in (200, 300, 500, 600):
        assert told[f"again{length}"]["cached"] >= found[length]
        for key in (f"{length}", f"again{length}"):
            assert told[key]["output"] == told[f"cold{length}"]["output"], key
    assert len(set(told["free"])) == 1


DAMAGED = (
    START
    + """
told = {"first": ask(prompt(1), 8)}
quiet(llm)
if args["damage"]:
    from pathlib import Path
    worker().close()
    for path in Path(args["root"]).rglob("*"):
        if path.is_file() and path.stat().st_size > (1 << 16):
            data = bytearray(path.read_bytes())
            for at in range(4096 + 700, len(data), 1 << 10):
                data[at] ^= 1
            path.write_bytes(data)
    tell(**told)
else:
    tell(counted=worker()._rank.counters.snapshot(), stats=side(llm).stats(),
         free=free_blocks(llm), healed=(llm.reset_prefix_cache(), ask(prompt(1), 8))[1], **told)
"""
)


def test_a_damaged_state_is_computed_anew(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {
        "model": vllm_model("tiny-lfm2"),
        "root": str(tmp_path / "root"),
        "dtype": "float32",
        "damage": True,
    }
    first = vllm_run(DAMAGED, wanted).checked()["first"]
    told = vllm_run(DAMAGED, {**wanted, "damage": False}).checked()
    assert told["first"]["output"] == told["healed"]["output"] == first["output"]
    assert told["counted"]["corrupt"] >= 1
    assert told["counted"]["load_tokens"] == 0
    assert len(set(told["free"])) == 1


STORM = (
    START
    + """
import random

dice = random.Random(5)
prompts = [prompt(100 + n, 300 + 90 * n) for n in range(5)]
# a fresh engine's answers, alone
plain = {}
for number, one in enumerate(prompts):
    plain[number] = ask(one, 40)["output"]
    llm.reset_prefix_cache(reset_connector=True)
engine = llm.llm_engine
core = scheduler(llm)
import vllm
sampling = vllm.SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False
)
wrong, preempted, answers = 0, 0, 0
for turn in range(args["rounds"]):
    number = dice.randrange(len(prompts))
    name = f"r{turn}"
    engine.add_request(name, {"prompt_token_ids": prompts[number]}, sampling.clone())
    steps, output, again = dice.randrange(1, 30), None, False
    while engine.has_unfinished_requests():
        for answer in engine.step():
            output = list(answer.outputs[0].token_ids)
        steps -= 1
        if steps == 0 and dice.random() < 0.6 and core.running:
            # as where pages are short: all of its pages are given away
            core.reset_prefix_cache(reset_running_requests=True)
            preempted, again = preempted + 1, True
        if steps == 0 and dice.random() < 0.2:
            engine.abort_request([name])
            output = None
    if output is not None and len(output) == 40:
        answers += 1
        # what was decoded is computed as a prompt then, to other last bits: so does vLLM alone
        wrong += output != plain[number] and not again
    if dice.random() < 0.5:
        llm.reset_prefix_cache()
quiet(llm)
tell(wrong=wrong, preempted=preempted, answers=answers, free=free_blocks(llm),
     counted=worker()._rank.counters.snapshot(), stats=side(llm).stats())
"""
)


@pytest.mark.parametrize(("name", "dtype"), [each[:2] for each in MODELS])
def test_preemption_and_aborts_leave_states_right(
    name: str,
    dtype: str,
    tmp_path: Path,
    vllm_run: Callable[..., Ran],
    vllm_model: Callable[[str], str],
) -> None:
    wanted = {
        "model": vllm_model(name),
        "root": str(tmp_path / "root"),
        "dtype": dtype,
        "rounds": 24,
    }
    told = vllm_run(STORM, wanted).checked()
    assert told["answers"] > 10
    assert told["preempted"] > 3
    assert told["wrong"] == 0
    assert told["counted"]["load_tokens"] > 0
    assert told["counted"]["errors"] == 0
    assert len(set(told["free"])) == 1


REFUSED = (
    SETUP
    + """
try:
    make_llm(
        args["model"],
        transfer(config=tiers(args["root"])),
        kv_bytes=32 << 20,
        **args["options"],
    )
except Exception as error:
    tell(kind=type(error).__name__, text=str(error))
else:
    tell(kind=None, text="")
"""
)


def test_states_that_vllm_does_not_keep_are_refused(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {
        "model": vllm_model("tiny-lfm2"),
        "root": str(tmp_path / "root"),
        "options": {"enable_prefix_caching": False},
    }
    ran = vllm_run(REFUSED, wanted)
    assert ran.told["kind"] == "AttachError", ran.log
    assert "--enable-prefix-caching" in ran.told["text"]
