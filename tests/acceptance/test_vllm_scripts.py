"""Scripts in the style of existing serving code over a real vLLM, in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.conftest import vllm_model, vllm_python, vllm_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.vllm.processes import Ran

__all__ = ["vllm_model", "vllm_python", "vllm_run"]

MODES = [pytest.param(False, id="one process"), pytest.param(True, id="core elsewhere")]
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB: on a CPU vLLM takes its share of all memory else

ATTACH = """
import tierkv
from tierkv.blocking import CacheManager
from tierkv_adapters import vllm as tk
from vllm import EngineArgs, LLMEngine

model_dir = args["model"]
with CacheManager(tiers=[tierkv.Tier("host", capacity="64MiB")], metrics=True) as manager:
    args = tk.attach(
        EngineArgs(model=model_dir, tensor_parallel_size=1, gpu_memory_utilization=0.9), manager
    )
    assert tk.status(LLMEngine.from_engine_args(args)).attached
tell(done=True)
"""


@pytest.mark.parametrize("multiprocess", MODES)
def test_attach_to_vllm(
    multiprocess: bool, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama")}
    told = vllm_run(ATTACH, wanted, multiprocess=multiprocess, env=SMALL).checked()
    assert told["done"]


# the same script over both engines: only what ``attach`` is called with differs
CHAT = """
import gc, time, uuid
import tierkv
from tierkv.blocking import CacheManager

B = 128
GREEDY = dict(max_new_tokens=48, do_sample=False)
TALK = {
    "code": ["Write a quicksort function in Python. " * 8, "Good, add detailed comments to it."],
    "sea": ["Tell me about the sea, and what lives in it. " * 8, "Shorter, please."],
}

class ChatSession:
    def __init__(self, manager):
        self.session_id, self.manager = str(uuid.uuid4()), manager
        manager.create_session(self.session_id)

    def chat(self, kv, text, **sampling):
        with self.manager.use_session(self.session_id):
            return kv.generate(text, **sampling)

    def clear_history(self):
        self.manager.clear_session(self.session_id)

    def __del__(self):
        self.manager.destroy_session(self.session_id)

def script(kv, manager):
    sessions = {name: ChatSession(manager) for name in TALK}
    said = {}
    for turn in range(2):
        for name, texts in TALK.items():
            reply = sessions[name].chat(kv, texts[turn], **GREEDY)
            if turn:
                seen = said[name].output_ids  # prompt + reply
                assert reply.input_ids[: len(seen)] == seen
                assert reply.reused_tokens >= (len(seen) - 1) // B * B > 0
                assert reply.tier and sum(reply.by_tier.values()) >= reply.reused_tokens
            assert reply.output_ids[: len(reply.input_ids)] == reply.input_ids
            assert len(reply.output_ids) == len(reply.input_ids) + 48 and reply.text
            said[name] = reply
    first = sessions["code"]
    first.clear_history()
    again = first.chat(kv, "What is the capital of France?", **GREEDY)
    other = ChatSession(manager)
    fresh = other.chat(kv, "What is the capital of France?", **GREEDY)
    assert again.input_ids == fresh.input_ids and again.output_ids == fresh.output_ids
    end = time.monotonic() + 60
    while not kv.status().blocks_stored:
        assert time.monotonic() < end
        time.sleep(0.02)
    status = kv.status()
    assert status.attached and status.requests_seen == 6 and not status.stores_failed
    manager.flush()
    assert manager.stats().sessions == 3 and manager.health()["status"] == "open"
    gone = first.session_id
    del first, sessions["code"]
    gc.collect()
    assert gone not in {info.id for info in manager.sessions()}
    assert manager.stats().leases == 0
    manager.destroy_session(gone)  # idempotent
    kv.detach()
    return [reply.output_ids for reply in said.values()]
"""
HF = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from tierkv_adapters import hf

model = AutoModelForCausalLM.from_pretrained(args["model"])
model.generation_config.eos_token_id = None  # every reply has 48 tokens
tokenizer = AutoTokenizer.from_pretrained(args["model"])
tiers = [tierkv.Tier("host", capacity="64MiB")]
with CacheManager(tiers=tiers, block_tokens=B) as manager:
    kv = hf.attach(model, manager, tokenizer=tokenizer)
    tell(hf=script(kv, manager))
"""
VLLM = """
from tierkv_adapters import vllm as tk
from vllm import LLM

GREEDY["ignore_eos"] = True  # every reply has 48 tokens
tiers = [tierkv.Tier("host", capacity="64MiB")]
with CacheManager(tiers=tiers, block_tokens=B) as manager:
    model = LLM(**tk.attach({
        "model": args["model"], "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4,
        "kv_cache_memory_bytes": 32 << 20, "max_model_len": 4096,
    }, manager))
    kv = tk.attach(model, manager)
    tell(vllm=script(kv, manager))
"""


def test_one_script_over_two_engines(
    vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama")}
    hf = vllm_run(CHAT + HF, wanted).checked()["hf"]
    for multiprocess in (False, True):
        vllm = vllm_run(CHAT + VLLM, wanted, multiprocess=multiprocess).checked()["vllm"]
        first = len(vllm[0])
        assert [len(ids) for ids in vllm] == [len(ids) for ids in hf]
        assert first > 128
