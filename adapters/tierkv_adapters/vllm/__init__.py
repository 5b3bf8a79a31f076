"""vLLM: tiers, sessions, codecs and verified loads by configuration alone.

Attach a manager to the arguments of an engine, then work in its sessions (see
:func:`~tierkv_adapters.vllm.attached.attaching.attach`)::

    args = attach(EngineArgs(model=...), manager)
    llm = LLM(**vars(args))
    kv = attach(llm, manager)

Or name the connector where only a configuration can be given; the plug-in registers it in every
process of vLLM::

    KVTransferConfig(kv_connector="TierKVConnector", kv_role="kv_both",
                     kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"config": "tierkv.toml"})

Importing this package needs no vLLM; its names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv_adapters.vllm.attached.attaching import attach
    from tierkv_adapters.vllm.attached.handle import AsyncHandle, Handle
    from tierkv_adapters.vllm.attached.reporting import Status, status
    from tierkv_adapters.vllm.connector import TierKVConnector
    from tierkv_adapters.vllm.plugin import register

__all__ = ["AsyncHandle", "Handle", "Status", "TierKVConnector", "attach", "register", "status"]

_HOMES = {
    "AsyncHandle": "attached.handle",
    "Handle": "attached.handle",
    "Status": "attached.reporting",
    "TierKVConnector": "connector",
    "attach": "attached.attaching",
    "register": "plugin",
    "status": "attached.reporting",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
