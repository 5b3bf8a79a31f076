"""Tiers that fail, lie, and hang under a real vLLM: it recomputes, alive, within the deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORED = 640

# one engine, lent, whose disk can be told to fail; its RAM holds nothing for long
FAULTS = (
    SETUP
    + """
import tierkv
from tierkv.blocking import CacheManager
from tierkv.registry import resolve
from tierkv.testing.faults import Corrupting, Failing, Hanging, Slow, inject
from tierkv_adapters.serving.registry import lend

specs = [
    tierkv.Tier("host", capacity="64MiB"),
    tierkv.Tier("nvme", capacity="256MiB", path=args["root"]),
]
faults = {
    "failing": Failing("read"),
    "corrupting": Corrupting(),
    "slow": Slow(8.0, "read"),
    "hanging": Hanging("read"),
}
for fault in faults.values():
    fault.active = False
backends = [resolve("backends", spec.kind)(spec) for spec in specs]
backends[1] = inject(backends[1], *faults.values())
config = {"tiers": specs, "metrics": False, "tier_timeout": 60.0}
manager = CacheManager(**config, backends=backends).open()
llm = make_llm(
    args["model"],
    transfer(manager=lend(manager), load_deadline="500ms", retry_after="0s"),
    kv_bytes=32 << 20,
)

def cold():
    # nothing on the device; in RAM only what is not on the disk
    llm.reset_prefix_cache()
    async def drop():
        core = manager.engine.core
        from tierkv.decisions.types import EvictReason
        slower = {part for part, _, _ in core.decisions.parts(1)}
        while left := [(p, g) for p, g, _ in core.decisions.parts(0) if p in slower]:
            drops = core.decisions.dropped(left, 0, EvictReason.CAPACITY, core.clock())
            core.free(drops)
            assert drops
    manager.call(drop)

def counts():
    return worker()._rank.counters.snapshot()

told = {"blocks": free_blocks(llm)[1]}
"""
)

EACH = """
for number, (name, fault) in enumerate(faults.items()):
    one = prompt(number)
    first = complete(llm, [one])[0]
    quiet(llm)
    cold()
    before, fault.active = counts(), True
    began = time.monotonic()
    during = complete(llm, [one])[0]
    took = time.monotonic() - began
    fault.active = False
    if name == "hanging":
        fault.release()
    after = counts()
    llm.reset_prefix_cache()
    quiet(llm)
    cold()
    healed = complete(llm, [one])[0]
    told[name] = {
        "first": first, "during": during, "healed": healed, "took": took,
        "counted": {key: after[key] - before[key] for key in after},
        "loaded": side(llm).stats()["loaded_tokens"],
        "free": free_blocks(llm),
    }
    tell(**told)
"""


LAST = """
one = prompt(50)
complete(llm, [one])
quiet(llm)
llm.reset_prefix_cache()
tell(last=complete(llm, [one])[0], **told)
"""


def test_a_faulty_tier_costs_time_and_no_answer(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    # damaged bytes, errors, a tier that takes 8 s, one that never answers
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(FAULTS + EACH + LAST, wanted).checked()
    for name in ("failing", "corrupting", "slow", "hanging"):
        case = told[name]
        assert case["during"]["output"] == case["first"]["output"], name
        assert case["healed"]["output"] == case["first"]["output"], name
        assert case["counted"]["loads"] == case["counted"]["loads_short"] == 1, name
        assert case["counted"]["load_tokens"] == 0, name
        assert case["free"] == [told["blocks"]] * 2, name
        # the deadline is 0.5 s; a guard, far from it, and below the tier's own 8 s
        assert case["took"] < 7.0, name
    assert told["corrupting"]["counted"]["corrupt"] == 1
    assert told["slow"]["counted"]["deadline_misses"] == 1
    assert told["hanging"]["counted"]["deadline_misses"] == 1
    assert told["last"]["cached"] == STORED, "it goes on loading what is in memory"


def test_two_groups_are_computed_anew_when_their_load_fails(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    # blocks of several groups cannot be named to vLLM: it is told of the request instead
    wanted = {"model": vllm_model("tiny-gemma3"), "root": str(tmp_path / "root")}
    code = FAULTS + EACH.replace("faults.items()", "list(faults.items())[:2]")
    told = vllm_run(code, wanted).checked()
    for name in ("failing", "corrupting"):
        case = told[name]
        assert case["during"]["output"] == case["first"]["output"], name
        assert case["counted"]["loads_short"] == 1, name
        assert case["free"] == [told["blocks"]] * 2, name


STORM = """
import random as chance

dice = chance.Random(7)
flaky = faults["failing"]
prompts = [prompt(100 + number, 300 + 37 * number) for number in range(6)]
plain = [complete(llm, [one], max_tokens=24)[0]["output"] for one in prompts]
quiet(llm)
wrong = rounds = 0
for _ in range(args["rounds"]):
    cold()
    flaky.active = dice.random() < 0.5
    chosen = dice.sample(range(len(prompts)), 4)
    answers = complete(llm, [prompts[c] for c in chosen], max_tokens=24)
    wrong += sum(a["output"] != plain[c] for a, c in zip(answers, chosen))
    rounds += 1
    flaky.active = False
told["counted"] = counts()
tell(wrong=wrong, rounds=rounds, free=free_blocks(llm), **told)
"""


def test_a_tier_that_fails_now_and_then_changes_no_answer(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    # four requests at once, half of the rounds with a disk that refuses reads
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root"), "rounds": 12}
    told = vllm_run(FAULTS + STORM, wanted).checked()
    assert told["wrong"] == 0
    assert told["free"] == [told["blocks"]] * 2
    assert told["counted"]["loads_short"] > 0
    assert told["counted"]["load_tokens"] > 0
    assert told["counted"]["errors"] == 0
