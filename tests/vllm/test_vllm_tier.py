"""tierkv below vLLM's own OffloadingConnector, for real: a tier, and policies for its CPU tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.vllm.damage import flip_bits
from tests.vllm.engines import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

TIERING = (
    PROMPTS
    + """
import time
from benchmarks.vllm.engine import complete, counters, make_llm

def offloading(tier, cpu_bytes=64 << 20, **extra):
    named = {"type": "TierKVTier", "module_path": "tierkv_adapters.vllm.tier"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTiering",
            "spec_module_path": "benchmarks.vllm.stack",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [named | tier] if tier is not None else [],
            **extra,
        },
    }

def disk(root):
    tiers = [{"kind": "nvme", "capacity": "256MiB", "path": root}]
    return {"config": {"metrics": False, "tiers": tiers}}

def tiering(llm):
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.connector_scheduler.manager

def side(llm):
    return tiering(llm).secondary_tiers[0].side

def quiet(llm, within=60.0):
    # stores only go on while the engine steps
    ends = time.monotonic() + within
    while tiering(llm).has_pending_work() or side(llm).busy():
        complete(llm, [[7, 7, 7, 7]], max_tokens=2)
        assert time.monotonic() < ends, "stores do not end"
    side(llm).manager.flush()

def free_blocks(llm):
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
"""
)

ANSWER = (
    TIERING
    + """
llm = make_llm(args["model"], offloading(disk(args["root"]) | args.get("tier", {})))
one = complete(llm, [prompt(1)])[0]
complete(llm, [[9, 9, 9, 9]], max_tokens=2)
quiet(llm)
complete(llm, [[9, 9, 9, 9]], max_tokens=2)
tell(one=one, counted=side(llm).counters.snapshot(), page=counters("vllm:tierkv_tier"))
llm.llm_engine.engine_core.shutdown()
tell(closed=True)
"""
)

LEAST = {"tiny-llama": 640, "tiny-gemma3": 640, "tiny-mla": 640}


@pytest.mark.parametrize("model", list(LEAST))
def test_a_fresh_process_reloads_and_bit_rot_is_computed_anew(
    tmp_path: Path, model: str, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model(model), "root": str(tmp_path / "root")}
    first = vllm_run(ANSWER, wanted).checked()
    assert first["counted"]["stored_chunks"] > 0
    second = vllm_run(ANSWER, wanted).checked()
    assert second["one"]["output"] == first["one"]["output"]
    assert second["one"]["cached"] >= LEAST[model], second
    assert second["counted"]["loaded_chunks"] > 0
    assert second["counted"]["stored_chunks"] == 0, "it is there already"
    assert second["page"]["vllm:tierkv_tier_loaded_chunks_total"] > 0
    assert second["closed"], "vLLM got its memory back"
    assert flip_bits(tmp_path / "root") > 0
    third = vllm_run(ANSWER, wanted).checked()
    assert third["one"]["output"] == first["one"]["output"], "damaged bytes reached the model"
    assert third["counted"]["corrupt_chunks"] > 0
    assert third["counted"]["loaded_chunks"] < second["counted"]["loaded_chunks"]


def test_other_weights_are_other_keys(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    vllm_run(ANSWER, wanted).checked()
    other = vllm_run(ANSWER, wanted | {"tier": {"identity": {"kernel": "other"}}}).checked()
    assert other["one"]["cached"] == 0
    assert other["counted"]["loads"] == 0


RESET = (
    TIERING
    + """
import torch

llm = make_llm(args["model"], offloading(disk(args["root"])))
before = complete(llm, [prompt(1)])[0]
quiet(llm)
executor = llm.llm_engine.engine_core.engine_core.model_executor
with torch.no_grad():
    for parameter in executor.driver_worker.worker.model_runner.model.parameters():
        parameter.add_(torch.sin(torch.arange(parameter.numel())).view_as(parameter) * 0.5)
llm.reset_prefix_cache(reset_connector=True)
since = complete(llm, [prompt(1)])[0]
quiet(llm)
llm.reset_prefix_cache()
tell(before=before, since=since, again=complete(llm, [prompt(1)])[0])
"""
)


def test_f006_weights_changed_in_place_find_nothing_of_before(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(RESET, wanted).checked()
    assert told["since"]["cached"] == 0
    assert told["since"]["output"] != told["before"]["output"]
    assert told["again"]["cached"] >= LEAST["tiny-llama"]
    assert told["again"]["output"] == told["since"]["output"]
    restarted = vllm_run(ANSWER, wanted).checked()  # with the weights of the files
    assert restarted["one"]["output"] == told["before"]["output"]
    assert restarted["one"]["cached"] >= LEAST["tiny-llama"]


FAULTS = (
    TIERING
    + """
import tierkv
from tierkv.blocking import CacheManager
from tierkv.registry import resolve
from tierkv.testing.faults import Corrupting, Failing, Hanging, Slow, inject
from tierkv_adapters.serving.registry import lend

spec = tierkv.Tier("nvme", capacity="256MiB", path=args["root"])
faults = {
    "failing": Failing("read"),
    "corrupting": Corrupting(),
    "slow": Slow(8.0, "read"),
    "hanging": Hanging("read"),
}
for fault in faults.values():
    fault.active = False
backend = inject(resolve("backends", "nvme")(spec), *faults.values())
manager = CacheManager(tiers=[spec], backends=[backend], metrics=False, tier_timeout=60.0).open()
tier = {"manager": lend(manager), "load_deadline": "500ms", "retry_after": "30s",
        "weights_are_fixed": True}
llm = make_llm(args["model"], offloading(tier))
told = {"blocks": free_blocks(llm)[1]}
for number, (name, fault) in enumerate(faults.items()):
    one = prompt(number)
    first = complete(llm, [one])[0]
    quiet(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    before, fault.active = side(llm).counters.snapshot(), True
    began = time.monotonic()
    during = complete(llm, [one])[0]
    took = time.monotonic() - began
    fault.active = False
    if name == "hanging":
        fault.release()
    after = side(llm).counters.snapshot()
    quiet(llm)
    told[name] = {
        "first": first, "during": during, "took": took, "free": free_blocks(llm),
        "counted": {key: after[key] - before[key] for key in after},
    }
    tell(**told)
one = prompt(50)
complete(llm, [one])
quiet(llm)
llm.reset_prefix_cache(reset_connector=True)
tell(last=complete(llm, [one])[0], **told)
"""
)


def test_a_faulty_tier_costs_time_and_no_answer(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(FAULTS, wanted).checked()
    for name in ("failing", "corrupting", "slow", "hanging"):
        case = told[name]
        assert case["during"]["output"] == case["first"]["output"], name
        # once: neither a livelock nor a second try at what has just failed
        assert case["counted"]["loads"] == case["counted"]["loads_short"] == 1, name
        assert case["counted"]["loaded_chunks"] == 0, name
        assert case["free"] == [told["blocks"]] * 2, name
        # the deadline is 0.5 s; a guard, far from it, and below the tier's own 8 s
        assert case["took"] < 7.0, name
    assert told["failing"]["counted"]["failed_chunks"] == 5
    assert told["corrupting"]["counted"]["corrupt_chunks"] == 5
    assert told["slow"]["counted"]["late_chunks"] == 5
    assert told["hanging"]["counted"]["late_chunks"] == 5
    assert told["last"]["cached"] == 640, "it goes on loading"


STORM = (
    TIERING
    + """
import random as chance

dice = chance.Random(5)
small = 12 * 128 * 1024  # of the CPU tier: chunks come and go all the time
policy = {"eviction_policy": args["policy"],
          "cache_policy_module_path": "tierkv_adapters.vllm.tier.policies"}
llm = make_llm(
    args["model"], offloading(disk(args["root"]), small, **policy), kv_bytes=20 * 128 * 1024,
    max_model_len=1024,
)
prompts = [prompt(200 + n, 300 + 50 * n) for n in range(6)]
wanted = []
for one in prompts:
    answer = complete(llm, [one], max_tokens=24)[0]
    assert answer["cached"] == 0
    wanted.append(answer["output"])
wrong = cached = 0
for _ in range(args["rounds"]):
    chosen = dice.sample(range(len(prompts)), 4)
    if dice.random() < 0.5:
        llm.reset_prefix_cache()
    answers = complete(llm, [prompts[c] for c in chosen], max_tokens=24)
    wrong += sum(a["output"] != wanted[c] for a, c in zip(answers, chosen))
    cached += sum(a["cached"] for a in answers)
quiet(llm)
held = tiering(llm).primary_tier
tell(wrong=wrong, cached=cached, free=free_blocks(llm), counted=side(llm).counters.snapshot(),
     policy=type(held._policy).__name__, pinned=held._num_chunks - held._get_num_free_chunks()
     - held._num_evictable_cache_chunks)
"""
)


@pytest.mark.parametrize("policy", ["lrfu", "s3fifo", "gittins"])
def test_pressure_and_preemption_change_no_answer(
    tmp_path: Path, policy: str, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root"), "rounds": 15}
    told = vllm_run(STORM, wanted | {"policy": policy}).checked()
    assert told["policy"] == f"TierKV_{policy}"
    assert told["wrong"] == 0
    assert told["cached"] > 0
    assert told["free"][0] == told["free"][1], "no block of the paged cache is leaked"
    assert told["pinned"] == 0, "no chunk of the CPU tier is leaked"
    assert told["counted"]["errors"] == 0
    assert told["counted"]["loaded_chunks"] > 0


APART = (
    TIERING
    + """
from pathlib import Path
from benchmarks.vllm.engine import settle
if __name__ == "__main__":
    llm = make_llm(args["model"], offloading(disk(args["root"])))
    one = complete(llm, [prompt(1)])[0]
    settle(llm, args["root"])
    tell(one=one)
"""
)


def test_the_engine_core_may_be_killed_at_the_end(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    # as by default: the scheduler and its tiers in a process of their own, which is killed
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    first = vllm_run(APART, wanted, multiprocess=True).checked()
    second = vllm_run(APART, wanted, multiprocess=True).checked()
    assert second["one"]["output"] == first["one"]["output"]
    assert second["one"]["cached"] == 640
