"""LoRA adapters under a real vLLM: each answers from its own KV, and never from an older self's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.engines import SETUP
from tests.vllm.lora import write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORED = 640

LORA = (
    SETUP
    + """
from pathlib import Path
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from tests.vllm.lora import write_adapter

llm = make_llm(
    args["model"],
    transfer(config=tiers(args["root"])),
    kv_bytes=32 << 20,
    enable_lora=True,
    max_loras=2,
    max_lora_rank=8,
)
names, serial = {"a": 1, "b": 2}, 0

def ask(tokens, lora=None, salt=None, inplace=False):
    global serial
    serial += 1
    llm.reset_prefix_cache()
    quiet(llm)
    engine, one = llm.llm_engine, {"prompt_token_ids": tokens}
    if salt:
        one["cache_salt"] = salt
    wanted = None
    if lora:
        wanted = LoRARequest(lora, names[lora], args[lora], load_inplace=inplace)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    engine.add_request(f"r{serial}", one, sampling, lora_request=wanted)
    while engine.has_unfinished_requests():
        for answer in engine.step():
            found = {"output": list(answer.outputs[0].token_ids)}
            found["cached"] = answer.num_cached_tokens
    return found

one, two, three = prompt(1), prompt(2), prompt(3)
"""
)

STORE = (
    LORA
    + """
tell(
    plain=ask(one), a=ask(one, "a"), a_again=ask(one, "a"), b=ask(one, "b"),
    b_again=ask(one, "b"), plain_again=ask(one),
)
# other bytes under the same name and path: vLLM computes with the old ones all the same
write_adapter(Path(args["a"]), 3)
tell(behind=[ask(two, "a") for _ in range(3)])
# until it is told to read them
tell(newer=ask(three, "a", inplace=True), newer_again=ask(three, "a"), newer_one=ask(one, "a"))
"""
)

FRESH = (
    LORA
    + """
tell(b=ask(one, "b"), plain=ask(one))
tell(one=ask(one, "a"), two=ask(two, "a"), three=ask(three, "a"))
tell(truth=[ask(each, "a", salt="nobody's")["output"] for each in (one, two, three)])
"""
)


def test_f005_f006_adapters_share_no_kv_and_newer_bytes_find_none(
    tmp_path: Path, vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str]
) -> None:
    wanted = {"model": vllm_model("tiny-llama"), "root": str(tmp_path / "root")}
    wanted |= {name: write_adapter(tmp_path / name, n) for n, name in enumerate("ab")}
    first = vllm_run(STORE, wanted).checked()
    cached = {name: one["cached"] for name, one in first.items() if name != "behind"}
    assert cached == {
        "plain": 0,
        "a": 0,
        "a_again": STORED,
        "b": 0,
        "b_again": STORED,
        "plain_again": STORED,
        "newer": 0,
        "newer_again": STORED,
        "newer_one": 0,
    }
    outputs = {name: tuple(first[name]["output"]) for name in cached}
    assert len({outputs[name] for name in ("plain", "a", "b", "newer_one")}) == 4
    for name in ("plain", "a", "b", "newer"):
        assert outputs[f"{name}_again"] == outputs[name], name

    second = vllm_run(FRESH, wanted).checked()
    assert second["b"] == {"output": list(outputs["b"]), "cached": STORED}, "its first request, too"
    assert second["plain"] == {"output": list(outputs["plain"]), "cached": STORED}
    assert second["one"]["output"] == list(outputs["newer_one"])
    for name, truth in zip(("one", "two", "three"), second["truth"], strict=True):
        assert second[name] == {"output": truth, "cached": 0}, name
