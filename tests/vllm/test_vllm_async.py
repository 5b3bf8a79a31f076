"""The asynchronous engine: many clients, some of whom hang up; its core is killed and restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import PROMPTS, SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORED = 640

CODE = (
    PROMPTS
    + SETTINGS
    + """
import asyncio, os, signal
import psutil
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

def build():
    connector = KVTransferConfig(**transfer(config=tiers(args["root"])))
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args["model"], dtype="float32", enforce_eager=True, max_num_seqs=4, seed=0,
            kv_cache_memory_bytes=32 << 20, max_model_len=2048, skip_tokenizer_init=True,
            kv_transfer_config=connector,
        )
    )

async def ask(llm, name, tokens):
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    async for answer in llm.generate({"prompt_token_ids": tokens}, sampling, name):
        last = answer
    return list(last.outputs[0].token_ids), last.num_cached_tokens

async def main():
    llm, prompts = build(), [prompt(n) for n in range(4)]
    first = [await ask(llm, f"first-{n}", one) for n, one in enumerate(prompts)]
    wrong = cached = hung_up = 0
    for number in range(args["rounds"]):
        await llm.reset_prefix_cache()
        names = [f"{number}-{n}" for n in range(10)]
        tasks = [asyncio.ensure_future(ask(llm, f, prompts[n % 4])) for n, f in enumerate(names)]
        await asyncio.sleep(0.01 * number)
        for task in tasks[::3]:
            task.cancel()
        for n, task in enumerate(tasks):
            try:
                output, hit = await task
            except asyncio.CancelledError:
                hung_up += 1
                continue
            wrong += output != first[n % 4][0]
            cached += hit
    tell(first=[hit for _, hit in first], wrong=wrong, cached=cached, hung_up=hung_up)
    children = psutil.Process().children(recursive=True)
    core = [child for child in children if "EngineCore" in child.name()]
    dying = asyncio.ensure_future(ask(llm, "dying", prompt(50)))
    await asyncio.sleep(0.02)
    for child in core:
        os.kill(child.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(dying, 120)
        tell(killed=len(core), died="no")
    except Exception as error:
        tell(killed=len(core), died=type(error).__name__)
    llm.shutdown()
    llm = build()
    again = [await ask(llm, f"again-{n}", one) for n, one in enumerate(prompts)]
    tell(again=[hit for _, hit in again], same=[a[0] == f[0] for a, f in zip(again, first)])
    llm.shutdown()

asyncio.run(main())
"""
)


def test_f051_clients_that_hang_up_and_a_core_that_is_killed(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root"), "rounds": 5}
    told = vllm_run(CODE, wanted, multiprocess=True).checked()
    assert told["first"] == [0] * 4
    assert told["wrong"] == 0
    assert told["cached"] > 0
    assert told["hung_up"] > 0
    assert told["killed"] == 1
    assert told["died"] in {"EngineDeadError", "no"}  # it may have answered before
    assert told["again"] == [STORED] * 4
    assert told["same"] == [True] * 4
