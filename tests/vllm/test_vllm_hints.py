"""Hints under a real vLLM, from vLLM's own envelope and from a request's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

HINTS = (
    SETUP
    + """
import tierkv
from tierkv.blocking import CacheManager
from tierkv_adapters import vllm as tk
from vllm import SamplingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

m = CacheManager(tiers=[
    tierkv.Tier("host", "3MiB"), tierkv.Tier("nvme", "64MiB", path=args["root"]),
], metrics=False, policy="lru").open()
asked = tk.attach({}, m)
llm = make_llm(args["model"], asked["kv_transfer_config"], kv_bytes=32 << 20)
engine = llm.llm_engine

def counters_now():
    return tk.status(llm).ranks[0].counters

def until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)

def ask(ids, *actions, **wishes):
    envelope = KvHintsEnvelope("1", "m", list(actions)) if actions else None
    params = SamplingParams(
        temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": {"tierkv": wishes}},
    )
    name = f"r{time.monotonic_ns()}"
    engine.add_request(name, {"prompt_token_ids": ids}, params, kv_hints=envelope)
    output = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            pass
    quiet(llm)
    return output.kv_transfer_params

def where(ids):
    return [report.tier for report in m.explain(ids)]

one, two = prompt(1), prompt(2)
ask(one, KvHintAction("1", "pin", "1", {"ttl": "1h"}), KvHintAction("2", "evict", "1", {}))
ask(two)
until(lambda: counters_now()["hints"] == 1)
until(lambda: m.stats().leases)
tell(both=[where(one)[:5], where(two)[:5]])
for seed in range(10, 16):
    ask(prompt(seed))  # more than the host tier holds
tell(kept=[where(one)[:5], where(two)[:5]])

ask(prompt(20, 20), prefetch={"token_ids": two})  # somebody will ask for this
until(lambda: where(two)[:5] == ["host"] * 5)
ask(prompt(21, 20), pin="1h", prefetch={"session": "nobody"})
until(lambda: counters_now()["hints"] == 4)
llm.reset_prefix_cache()
report = ask(one, report=True)
stats = side(llm).stats()
tell(
    report=report, refused=counters_now()["hints_refused"],
    unknown=stats["hints_unknown"], unreadable=stats["hints_unreadable"],
    bad=ask(one, KvHintAction("3", "pin", "1", {"seconds": 5})),
    then=side(llm).stats()["hints_unreadable"],
)

# a ttl is that of the request's blocks
short = prompt(30)
ask(short, KvHintAction("4", "ttl", "1", {"ttl": "500ms"}))
until(lambda: where(short)[:5] == [None] * 5)
tell(gone=True)
m.close()
"""
)


def test_hints_are_followed(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(HINTS, wanted).checked()
    assert told["both"] == [["host"] * 5, ["host"] * 5]
    assert told["kept"] == [["host"] * 5, ["nvme"] * 5], "only what is pinned stays in memory"
    assert told["report"] == {"tierkv": {"own": 0, "loaded": 640, "tier": "host"}}
    assert (told["refused"], told["unknown"], told["unreadable"]) == (0, 1, 0)
    assert told["bad"] is None, "nobody asked for a report"
    assert told["then"] == 1
    assert told["gone"]
