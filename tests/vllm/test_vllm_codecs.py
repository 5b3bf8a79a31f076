"""Lossy codecs over described pages, and KV events, under a real vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import SETUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran

STORED = 640

CODE = (
    SETUP
    + """
from vllm.config import KVEventsConfig
from tierkv_adapters.vllm import register

register()
register()  # vLLM may run its plug-ins again
settings = tiers(args["root"])
settings["compression"] = "int8"
by_name = transfer(config=settings)
del by_name["kv_connector_module_path"]
llm = make_llm(
    args["model"],
    by_name,
    kv_bytes=32 << 20,
    kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
)
connector, events = scheduler(llm).connector, []
take = connector.take_events

def spy():
    taken = list(take())
    events.extend(taken)
    return taken

connector.take_events = spy
prompts, answers = [prompt(1), prompt(2)], []
for _ in range(2):
    answers.append(complete(llm, prompts))
    counted = quiet(llm)
    llm.reset_prefix_cache()
layout = worker().handshake()["layout"]
tell(
    cached=[[one["cached"] for one in each] for each in answers],
    counted=counted,
    names=[spec.name for spec in layout.groups[0].layers[0].tensors],
    raw=layout.raw_bytes(128) * 10,
    kept=worker()._manager.stats().tiers["nvme"].live_bytes,
)
llm.reset_prefix_cache(reset_connector=True)
complete(llm, [prompt(3, 20)])
complete(llm, [prompt(4, 20)])
totals = {}
for event in events:
    key = f"{type(event).__name__} {event.medium}"
    totals[key] = totals.get(key, 0) + len(event.block_hashes)
tell(events=totals)
"""
)


@pytest.mark.parametrize(("name", "groups"), [("tiny-llama", 1), ("tiny-gemma3", 2)])
def test_int8_over_described_pages_and_events_of_blocks(
    name: str,
    groups: int,
    tmp_path: Path,
    vllm_run: Callable[..., Ran],
    vllm_model: Callable[[str], str],
) -> None:
    wanted = {"model": vllm_model(name), "root": str(tmp_path / "root")}
    told = vllm_run(CODE, wanted).checked()
    assert told["cached"] == [[0, 0], [STORED, STORED]]
    assert told["counted"]["loads_short"] == 0
    assert told["names"] == ["k", "v"]
    assert told["kept"] < 0.5 * told["raw"]
    blocks = 10 * groups
    assert told["events"] == {
        "BlockStored CPU": blocks,
        "BlockStored STORAGE": blocks,
        "BlockRemoved CPU": blocks,
        "BlockRemoved STORAGE": blocks,
    }
