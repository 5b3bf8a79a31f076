"""Storms under a real vLLM: aborts, preemption and a failing tier, in every way of scheduling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORM = (
    SETUP
    + """
import gc
import random as chance
import tierkv
from tierkv.blocking import CacheManager
from tierkv.registry import resolve
from tierkv.testing.faults import Failing, inject
from tierkv_adapters.serving.registry import lend
from vllm import SamplingParams

# shorter than a block, whole blocks, one more and one less
prompts = [prompt(n, length) for n, length in enumerate((1, 127, 128, 256, 511, 640, 700))]
LENGTH = 60

def end(llm):
    llm.llm_engine.engine_core.shutdown()
    gc.collect()

class Sometimes(Failing):
    # one call in ten of those that say so
    dice = chance.Random(5)

    def refuse(self, operation):
        if operation in ("read", "write") and self.dice.random() >= 0.1:
            return None
        self.failed = getattr(self, "failed", 0) + 1
        return super().refuse(operation)

plain = make_llm(args["model"], kv_bytes=32 << 20, max_model_len=1024)
truth = [complete(plain, [one], max_tokens=LENGTH)[0]["output"] for one in prompts]
end(plain)
sampling = SamplingParams(
    temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False,
    extra_args={"kv_transfer_params": {"tierkv": {"report": True}}},
)

class Crowd:
    # requests that come and go; what became of them

    def __init__(self, llm, seed):
        self.llm, self.engine, self.dice = llm, llm.llm_engine, chance.Random(seed)
        self.live, self.seed, self.serial = {}, seed, 0
        self.wrong = self.done = self.reported = 0

    def add(self, count):
        for _ in range(count):
            self.serial += 1
            name, number = f"{self.seed}-{self.serial}", self.dice.randrange(len(prompts))
            self.live[name] = number
            one = {"prompt_token_ids": prompts[number]}
            self.engine.add_request(name, one, sampling.clone())

    def step(self):
        for answer in self.engine.step():
            if answer.finished and answer.request_id in self.live:
                right = truth[self.live.pop(answer.request_id)]
                self.wrong += list(answer.outputs[0].token_ids) != right
                self.done += 1
                self.reported += (answer.kv_transfer_params or {})["tierkv"]["loaded"]

    def drain(self):
        while self.engine.has_unfinished_requests():
            self.step()

    def storm(self, rounds):
        for _ in range(rounds):
            if self.dice.random() < 0.3:
                self.llm.reset_prefix_cache()
            self.add(self.dice.randrange(1, 4))
            for _ in range(self.dice.randrange(30)):
                self.step()
            if self.live and self.dice.random() < 0.4:
                gone = self.dice.sample(sorted(self.live), self.dice.randint(1, len(self.live)))
                self.engine.abort_request(gone)
                for name in gone:
                    del self.live[name]
        self.drain()

def page(llm):
    complete(llm, [prompt(99, 20)], max_tokens=2)  # counts travel with the next step
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}

def result(llm, crowd):
    deadline = time.monotonic() + 60
    while free_blocks(llm)[0] < free_blocks(llm)[1] and time.monotonic() < deadline:
        llm.llm_engine.engine_core.get_output()  # loads of requests that are gone
    counted = quiet(llm)
    shown = page(llm)
    return {
        "wrong": crowd.wrong, "done": crowd.done, "reported": crowd.reported,
        "free": free_blocks(llm), "counted": counted, "stats": side(llm).stats(),
        "page": {name.removeprefix("vllm:"): value for name, value in shown.items()},
    }
"""
)

WAYS = (
    STORM
    + """
ways = [
    {"enable_chunked_prefill": True, "enable_prefix_caching": True, "async_scheduling": True},
    {"enable_chunked_prefill": True, "enable_prefix_caching": False, "async_scheduling": False},
    {"enable_chunked_prefill": False, "enable_prefix_caching": True, "async_scheduling": False},
    {"enable_chunked_prefill": False, "enable_prefix_caching": False, "async_scheduling": True},
]
outcomes = []
for seed, way in enumerate(ways):
    # room for one request of the longest kind and a half
    way["max_num_batched_tokens"] = 256 if way["enable_chunked_prefill"] else 1024
    llm = make_llm(
        args["model"], transfer(config=tiers(args["root"])), kv_bytes=(2 * 65536) * 13,
        max_model_len=1024, **way,
    )
    crowd = Crowd(llm, seed)
    crowd.storm(args["rounds"])
    outcomes.append(result(llm, crowd))
    outcomes[-1]["sessions"] = len(worker()._manager.engine.sessions())
    end(llm)
tell(ways=outcomes)
"""
)


def test_f046_aborts_and_preemption_in_every_way_of_scheduling(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root"), "rounds": 15}
    told = vllm_run(WAYS, wanted).checked()["ways"]
    assert len(told) == 4
    for way in told:
        assert way["wrong"] == 0
        assert way["done"] > 0
        assert way["free"][0] == way["free"][1]
        assert way["sessions"] == 0
        assert way["counted"]["errors"] == 0
        assert way["stats"]["failed_loads"] == 0, "an abort is no failure"
        assert way["stats"]["blocked"] == 0, "and blocks nobody"
        assert way["page"]["tierkv_load_tokens"] == way["counted"]["load_tokens"]
        assert way["stats"]["loaded_tokens"] == way["counted"]["load_tokens"]
    assert sum(way["page"]["num_preemptions"] for way in told) > 0
    assert sum(way["counted"]["load_tokens"] for way in told) > 0


FLAKY = (
    STORM
    + """
fault = Sometimes("read", "write")
specs = [tierkv.Tier("nvme", capacity="64MiB", path=args["root"])]
backends = [inject(resolve("backends", spec.kind)(spec), fault) for spec in specs]
with CacheManager(tiers=specs, metrics=False, backends=backends) as manager:
    llm = make_llm(
        args["model"], transfer(manager=lend(manager), retry_after="0s"), kv_bytes=32 << 20,
        max_model_len=1024,
    )
    crowd = Crowd(llm, 1)
    for _ in range(args["rounds"]):
        llm.reset_prefix_cache()
        crowd.add(4)
        crowd.drain()
        quiet(llm)
    tell(failed=fault.failed, **result(llm, crowd))
    end(llm)
"""
)


def test_f045_a_tier_that_fails_one_call_in_ten(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root"), "rounds": 12}
    told = vllm_run(FLAKY, wanted).checked()
    counted, stats, page = told["counted"], told["stats"], told["page"]
    assert (told["wrong"], told["done"]) == (0, 48)
    assert told["free"][0] == told["free"][1]
    assert told["failed"] > 0
    assert counted["loads_short"] + counted["saves_failed"] > 0, "errors are counted"
    assert counted["errors"] == 0, "and none of them is a surprise"
    # what the page says came, came: the rank's, the scheduler's and the requests' own counts agree
    assert 0 < page["tierkv_load_tokens"] == counted["load_tokens"]
    assert page["tierkv_scheduler_loaded_tokens"] == stats["loaded_tokens"]
    assert stats["loaded_tokens"] == counted["load_tokens"] == told["reported"]
    assert page["tierkv_scheduler_failed_loads"] == counted["loads_short"]
    accepted = page["tierkv_scheduler_accepted_tokens"]
    assert accepted == stats["loaded_tokens"] + stats["failed_tokens"]
