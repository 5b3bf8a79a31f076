"""Pieces of code for processes with vLLM: an engine with our connector, and what it tells."""

from __future__ import annotations

__all__ = ["PROMPTS", "SETTINGS", "SETUP"]

PROMPTS = """
import random

def prompt(seed, length=700):
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(length)]
"""
"""``prompt(seed, length)``: token ids of the tiny models."""

SETTINGS = """
def tiers(root):
    return {
        "metrics": False,
        "tiers": [
            {"kind": "host", "capacity": "64MiB"},
            {"kind": "nvme", "capacity": "256MiB", "path": root},
        ],
    }

def transfer(**extra):
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv_adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
"""
"""``tiers(root)``: settings of an engine; ``transfer(...)``: of vLLM's connector."""

SETUP = (
    PROMPTS
    + SETTINGS
    + """
import time
from benchmarks.vllm.engine import complete, make_llm

def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler

def side(llm):
    return scheduler(llm).connector.scheduler_side

def worker():
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    return get_kv_transfer_group().worker_side

def quiet(llm, within=60.0):
    # stores are done and the index has heard of them
    rank, manager = worker()._rank, worker()._manager
    assert rank.drain(within), "saves do not end"
    manager.flush()
    time.sleep(0.05)
    return rank.counters.snapshot()

def free_blocks(llm):
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
"""
)
"""All of the above, ``complete`` and ``make_llm``, and looks into an engine in this process."""
