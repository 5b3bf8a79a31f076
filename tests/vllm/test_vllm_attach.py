"""``attach`` with a real vLLM: its core in this process, and in another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

MODES = [pytest.param(False, id="one process"), pytest.param(True, id="core elsewhere")]

MANAGER = """
import time
import tierkv
from tierkv.blocking import CacheManager
from tierkv.errors import AttachError, ClosedError, ConfigError
from tierkv_adapters import vllm as tk

SMALL = dict(
    dtype="float32", enforce_eager=True, kv_cache_memory_bytes=32 << 20, max_num_seqs=4,
    max_model_len=4096, seed=0,
)
GREEDY = dict(max_new_tokens=24, do_sample=False, ignore_eos=True)

def manager(**settings):
    tiers = [
        tierkv.Tier("host", "64MiB"), tierkv.Tier("nvme", "256MiB", path=args["root"])
    ]
    return CacheManager(tiers=tiers, metrics=False, **settings)

def until(true, within=60.0):
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
"""

# module level: the default start method of vLLM's processes imports nothing of this snippet
SESSIONS = (
    MANAGER
    + """
from vllm import LLM, EngineArgs

m = manager().open()
m.create_session("early", ttl="2h")
given = EngineArgs(model=args["model"], **SMALL)
asked = tk.attach(given, m)
tell(
    unchanged=given.kv_transfer_config is None, same_kind=type(asked) is type(given),
    policy=asked.kv_transfer_config.kv_load_failure_policy,
)
fields = {k: v for k, v in vars(asked).items() if v != getattr(EngineArgs, k, None)}
llm = LLM(**fields)
before = tk.status(llm)
tell(attached=before.attached, seen_before=before.requests_seen, why=before.reason)

m.create_session("other", tenant="acme", salt=b"grain")
kv = tk.attach(llm, m)
with m.use_session("early"):
    one = kv.generate("Write a quicksort function in Python. " * 12, **GREEDY)
    two = kv.generate("Good, add detailed comments to it.", **GREEDY)
until(lambda: kv.status().blocks_stored >= 4)
m.flush()
llm.reset_prefix_cache()  # vLLM's own: what comes now comes from the tiers
three = kv.generate("And in Rust.", session="early", **GREEDY)
tell(
    joined=two.input_ids[: len(one.output_ids)] == one.output_ids,
    own=[one.reused_tokens, two.reused_tokens, two.tier],
    loaded=[three.reused_tokens, three.tier, three.by_tier, three.prompt_tokens],
    texts=[bool(one.text), one.ttft_s > 0],
)
# a cold engine says the same
m.create_session("cold", salt=b"fresh")
cold = kv.generate(three.input_ids, session="cold", **GREEDY)
tell(same=cold.output_ids == three.output_ids, cold=cold.reused_tokens)

# sessions in one batch keep their own, and tenants share nothing
long = "Tell me about the sea. " * 14
batch = kv.generate(["Shorter.", long], sessions=["early", "other"], **GREEDY)
kept = kv.generate(["Go on.", "Go on."], sessions=["early", "other"], **GREEDY)
tell(
    batch=[len(r.input_ids) for r in batch], foreign=batch[1].reused_tokens,
    kept=[
        r.input_ids[: len(b.output_ids)] == b.output_ids
        for r, b in zip(kept, batch, strict=True)
    ],
)
m.create_session("again")
mine = kv.generate(long, session="again", **GREEDY)
tell(no_crosstalk=mine.reused_tokens, same_text=mine.output_ids == batch[1].output_ids)

errors = {}
for name, call in {
    "twice": lambda: kv.generate(["a", "b"], sessions=["early", "early"]),
    "none": lambda: kv.generate("a"),
    "unknown": lambda: kv.generate("a", session="nobody"),
    "long": lambda: kv.generate([1] * 5000, session="early", **GREEDY),
    "best": lambda: kv.generate("a", session="early", n=2),
    "other_manager": lambda: tk.attach(llm, CacheManager(tiers=[tierkv.Tier("host", "1MiB")])),
}.items():
    try:
        call()
    except Exception as error:
        errors[name] = type(error).__name__
tell(errors=errors)

# behind a reset all is keyed apart, and the session is still the application's own
llm.reset_prefix_cache(reset_connector=True)
kv.generate("Once more, from the start. " * 16, session="early", **GREEDY)
def early():
    return next((i.tokens, i.nbytes) for i in m.sessions() if i.id == "early")
until(lambda: min(early()) > 0)
m.flush()

info = {i.id: (i.tenant, i.ttl) for i in m.sessions()}
m.clear_session("early")
tell(emptied=early())
fresh = kv.generate("Hello.", session="early", **GREEDY)
tell(info=info, cleared=len(fresh.input_ids))
for _ in range(2):
    m.destroy_session("early")
tell(
    left=sorted(i.id for i in m.sessions()), stats=m.stats().sessions, health=m.health()["status"],
    seen=kv.status().requests_seen,
)
kv.detach()
try:
    kv.generate("a", session="other")
except AttachError:
    tell(detached=True)
m.close()
"""
)


@pytest.mark.parametrize("multiprocess", MODES)
def test_sessions_work_wherever_the_core_runs(
    multiprocess: bool,
    tmp_path: Path,
    vllm_run: Callable[..., Ran],
    vllm_model: Callable[[str], str],
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(SESSIONS, wanted, multiprocess=multiprocess).checked()
    assert told["unchanged"]
    assert told["same_kind"]
    assert told["policy"] == "recompute"
    assert (told["attached"], told["seen_before"], told["why"]) == (True, 0, "no request yet")
    assert told["joined"]
    assert told["own"] == [0, 384, "vllm"]
    assert told["loaded"][:3] == [512, "host", {"host": 512}]
    assert told["same"]
    assert told["cold"] == 0
    assert told["texts"] == [True, True]
    assert told["foreign"] == 0
    assert told["kept"] == [True, True]
    assert told["no_crosstalk"] == 0, "another tenant's KV was shared"
    assert told["same_text"]
    assert told["errors"] == {
        "twice": "ConfigError",
        "none": "ConfigError",
        "unknown": "ConfigError",
        "long": told["errors"]["long"],
        "best": "AttachError",
        "other_manager": "AttachError",
    }
    assert told["info"]["early"] == ["", 7200.0]
    assert told["info"]["other"] == ["acme", None]
    assert told["emptied"] == [0, 0]
    assert told["cleared"] == len("Hello.")
    assert told["left"] == ["again", "cold", "other"]
    assert (told["stats"], told["health"], told["seen"]) == (3, "open", 11)
    assert told["detached"]


ASYNC = (
    MANAGER
    + PROMPTS
    + """
import asyncio
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

m = manager()
m.open()

async def main():
    asked = tk.attach(AsyncEngineArgs(model=args["model"], **SMALL), m)
    try:
        m.stats()
    except ClosedError as error:
        tell(awaited=str(error)[:40])
    engine = AsyncLLM.from_engine_args(asked)
    try:
        kv = tk.attach(engine, m)
        m.create_session("a")
        m.create_session("b")
        replies = {}

        async def chat(name, text):
            with m.use_session(name):
                replies.setdefault(name, []).append(await kv.generate(text, **GREEDY))

        async with asyncio.TaskGroup() as tasks:
            for name in "ab":
                for turn in range(2):  # the second waits for the first
                    tasks.create_task(chat(name, f"{name}{turn} Tell me about the sea. " * 14))
        tell(joined=[
            second.input_ids[: len(first.output_ids)] == first.output_ids
            for first, second in replies.values()
        ], reused=[second.reused_tokens for _, second in replies.values()])

        pieces = []
        stream = kv.stream("Now in short.", session="a", **GREEDY)
        async for token in stream:
            pieces.append((token.id, token.text))
        result = stream.result
        tell(
            ids=[i for i, _ in pieces] == result.output_ids[len(result.input_ids):],
            text="".join(t for _, t in pieces) == result.text,
        )
        stream = kv.stream("Never mind.", session="a", **{**GREEDY, "max_new_tokens": 500})
        async for token in stream:
            break
        await stream.aclose()
        again = await kv.generate("Next.", session="a", **GREEDY)
        tell(left=again.input_ids[: len(result.output_ids)] == result.output_ids
             and len(again.input_ids) == len(result.output_ids) + len("Next."))
        tell(status=tk.status(engine).attached, seen=kv.status().requests_seen)
    finally:
        engine.shutdown()
    until(lambda: not tk.status(engine).attached)
    tell(after=tk.status(engine).reason[:24], health=m.health()["status"])

asyncio.run(main())
m.close()
"""
)


def test_async_engines_and_streams(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    told = vllm_run(ASYNC, wanted, multiprocess=True).checked()
    assert told["awaited"].startswith("the vLLM engine is not there (yet)")
    assert told["joined"] == [True, True]
    assert all(reused >= 256 for reused in told["reused"])
    assert told["ids"]
    assert told["text"]
    assert told["left"], "a turn that was left leaves nothing behind"
    assert (told["status"], told["seen"]) == (True, 7)
    assert told["after"] == "no engine answers at " + told["after"][21:]
    assert told["health"] == "closed"
