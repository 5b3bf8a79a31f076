"""Mistakes in settings, and several engines in one process, under a real vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

CODE = (
    SETUP
    + """
import gc, traceback
import tierkv
from tierkv.blocking import CacheManager

def end(llm):
    llm.llm_engine.engine_core.shutdown()
    gc.collect()

def attempt(over=None, **extra):
    try:
        llm = make_llm(args["model"], transfer(**extra) | (over or {}), kv_bytes=32 << 20)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        late = any(frame.name == "initialize_from_config" for frame in frames)
        return [type(error).__name__, str(error), "late" if late else "early"]
    try:
        return [one["cached"] for one in complete(llm, [prompt(1)])]
    finally:
        end(llm)

good = tiers(args["root"])

def disk(path):
    return {"metrics": False, "tiers": [{"kind": "nvme", "capacity": "64MiB", "path": path}]}

wrong = {
    "unknown": attempt(config=good, block_token=3),
    "unknown_engine": attempt(config=good | {"polcy": "lru"}),
    "tierless": attempt(config={"metrics": False}),
    "policy": attempt({"kv_load_failure_policy": "fail"}, config=good),
    "file": attempt(config=args["root"] + "/none.toml"),
    "root": attempt(config=disk("/proc/none")),
    "socket": attempt(config=good, socket_dir="/proc/none"),
}
inner = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": args["other"] + "-example"},
}

def several(policy):
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [transfer(config=good), inner]},
    }

wrong["around"] = attempt(several("fail"))
tell(beside=[attempt(several("recompute")) for _ in range(2)])
with CacheManager(tiers=[tierkv.Tier("nvme", "64MiB", path=args["locked"])], metrics=False):
    wrong["locked"] = attempt(config=disk(args["locked"]))
tell(wrong=wrong)

one = make_llm(args["model"], transfer(config=good), kv_bytes=32 << 20)
first = complete(one, [prompt(1)])
quiet(one)
try:
    make_llm(args["model"], transfer(config=tiers(args["other"])), kv_bytes=32 << 20)
except Exception as error:
    tell(second=[type(error).__name__, str(error)])
# the first one answers as before, whether or not vLLM took its connector away
one.reset_prefix_cache()
tell(first=first, again=complete(one, [prompt(1), prompt(2)]))
end(one)
two = make_llm(args["model"], transfer(config=good), kv_bytes=32 << 20)
tell(after=complete(two, [prompt(1), prompt(2)]))
tell(names=sorted({m.name for m in two.get_metrics() if "tierkv_load" in m.name}))
"""
)


def test_f078_f087_mistakes_and_several_engines_in_one_process(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {name: str(tmp_path / name) for name in ("root", "other", "locked")}
    told = vllm_run(CODE, wanted | {"model": vllm_model("tiny-llama")}).checked()
    said = {
        "unknown": ("ConfigError", "block_tokens", "early"),
        "unknown_engine": ("ConfigError", "policy", "early"),
        "tierless": ("ConfigError", "no tiers", "early"),
        "policy": ("ConfigError", "kv_load_failure_policy='recompute'", "early"),
        "file": ("ConfigError", "none.toml", "early"),
        "around": ("ConfigError", "kv_load_failure_policy='recompute'", "late"),
        "root": ("BackendError", "/proc/none", "late"),
        "socket": ("ConfigError", "/proc/none", "late"),
        "locked": ("RootLockedError", "in use by process", "late"),
    }
    for name, (kind, text, when) in said.items():
        found = told["wrong"][name]
        assert (found[0], found[2]) == (kind, when), (name, found)
        assert text in found[1], (name, found)
    assert told["beside"] == [[0], [640]], "in a MultiConnector"
    kind, text = told["second"]
    assert kind == "AttachError"
    assert "one connector for a process" in text
    alone = told["first"][0]["output"]
    assert told["again"][0]["output"] == alone
    assert [one["output"] for one in told["after"]] == [one["output"] for one in told["again"]]
    assert told["after"][0]["cached"] == 640
    assert "vllm:tierkv_load_tokens" in told["names"]
