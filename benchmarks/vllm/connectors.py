"""The connectors that are compared, and how each is broken: plain data for ``KVTransferConfig``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONNECTORS", "DEADLINE_S", "FAULTS", "plug_in", "transfer"]

CONNECTORS: Final = ("none", "example", "tiering-fs", "tierkv")
FAULTS: Final = ("corrupt", "slow", "failing", "transfer")
"""Bits flipped in what is stored; a slow tier; all reads fail; all copies to the tiers fail."""

DEADLINE_S: Final = 2.0
_MEMORY: Final = 512 << 20
_FAULTY_KINDS: Final = {"slow": "slow_nvme", "failing": "failing_nvme", "transfer": "readonly_nvme"}


def transfer(connector: str, folder: Path, fault: str | None = None) -> dict[str, Any] | None:
    """Arguments of ``KVTransferConfig``, or None where there is no connector.

    Args:
        connector: One of :data:`CONNECTORS`.
        folder: Where it stores.
        fault: One of :data:`FAULTS`, or None; ``"corrupt"`` needs nothing here.
    """
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if connector == "none":
        return None
    if connector == "example":
        extra: dict[str, Any] = {"shared_storage_path": str(folder)}
        if fault == "slow":
            slow = "SlowExampleConnector"
            return both | _named(slow, "benchmarks.vllm.stack") | _extra(extra)
        return both | {"kv_connector": "ExampleConnector"} | _extra(extra)
    if connector == "tiering-fs":
        return both | {"kv_connector": "OffloadingConnector"} | _extra(_tiering(folder, fault))
    disk = {"path": str(folder), "capacity": _MEMORY}
    kind = _FAULTY_KINDS.get(fault or "", "nvme")
    memory = "full_host" if fault == "transfer" else "host"
    tiers = [{"kind": memory, "capacity": _MEMORY}, {"kind": kind, "name": "disk"} | disk]
    extra = {"config": {"tiers": tiers}}
    if fault == "slow":
        extra["load_deadline"] = f"{DEADLINE_S}s"
    return both | _named("TierKVConnector", "tierkv_adapters.vllm.connector") | _extra(extra)


def _named(name: str, module: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": module}


def _extra(values: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector_extra_config": values}


def _tiering(folder: Path, fault: str | None) -> dict[str, Any]:
    tier: dict[str, Any] = {"type": "fs", "root_dir": str(folder)}
    if fault in ("slow", "failing"):
        tier["type"] = {"slow": "SlowTier", "failing": "FailingTier"}[fault]
        tier["module_path"] = "benchmarks.vllm.stack"
    return {
        "spec_name": "CpuTieringFailing" if fault == "transfer" else "CpuTiering",
        "spec_module_path": "benchmarks.vllm.stack",
        "cpu_bytes_to_use": _MEMORY,
        "secondary_tiers": [tier],
    }


def plug_in(folder: Path) -> Path:
    """Make the faulty backends known as a third party's would be: by an entry point.

    Args:
        folder: Gets the metadata of a distribution.

    Returns:
        What belongs on ``PYTHONPATH``.
    """
    about = folder / "tierkv_bench_faults-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: tierkv-bench-faults", "Version: 1", ""]
    (about / "METADATA").write_text("\n".join(lines))
    names = {
        "failing_nvme": "FailingNvme",
        "full_host": "FullHost",
        "readonly_nvme": "ReadonlyNvme",
        "slow_nvme": "SlowNvme",
    }
    lines = [f"{kind} = benchmarks.vllm.faulty:{name}" for kind, name in names.items()]
    (about / "entry_points.txt").write_text("\n".join(["[tierkv.backends]", *lines]) + "\n")
    return folder
