"""A real vLLM's log has tierkv's lines, in vLLM's form, from each process that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.vllm.processes import Ran

CODE = """
from benchmarks.vllm.engine import make_llm

transfer = {
    "kv_connector": "TierKVConnector",
    "kv_connector_module_path": "tierkv_adapters.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "config": {"metrics": False, "tiers": [{"kind": "host", "capacity": "64MiB"}]}
    },
}
llm = make_llm(args["model"], transfer, kv_bytes=32 << 20, dtype="float32")
print("BUILT")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("multiprocess", [False, True], ids=["one process", "core elsewhere"])
def test_the_log_tells_once_what_is_served(
    vllm_run: Callable[..., Ran], vllm_model: Callable[[str], str], multiprocess: bool
) -> None:
    ran = vllm_run(
        CODE,
        {"model": vllm_model("tiny-llama")},
        multiprocess=multiprocess,
        env={"VLLM_LOGGING_LEVEL": "INFO"},
    )
    assert ran.status == 0, ran.log
    (line,) = [line for line in ran.log.splitlines() if "tierkv serves rank 0 of 1" in line]
    assert " INFO " in line
    assert "worker.py:" in line
