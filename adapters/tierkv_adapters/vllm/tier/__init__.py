"""tierkv below vLLM's own OffloadingConnector: a secondary tier, and policies for its CPU tier.

For users who stay on that connector. Those who can choose take
:class:`~tierkv_adapters.vllm.TierKVConnector`: it has sessions, tenants, TTLs by request, lossy
codecs and direct ways to storage, and needs no experimental interface. Settings
(``kv_connector_extra_config`` of ``OffloadingConnector``)::

    {"spec_name": "TieringOffloadingSpec",
     "cpu_bytes_to_use": 8589934592,
     "eviction_policy": "lrfu",
     "cache_policy_module_path": "tierkv_adapters.vllm.tier.policies",
     "secondary_tiers": [{"type": "TierKVTier", "module_path": "tierkv_adapters.vllm.tier",
                          "config": "tierkv.toml"}]}

vLLM before 0.28 takes no module paths: call :func:`register` in a plug-in of your own, and write
``"type": "tierkv"``. The tier's engine lives in the scheduler's process, beside vLLM's CPU tier.

vLLM does not empty its tiers when it resets its caches, although it does so because of other
weights, too: ours then begins anew under other keys, unless ``"weights_are_fixed": true`` is said.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv_adapters.vllm.tier.manager import TierKVTier
    from tierkv_adapters.vllm.tier.policies import TierKVCachePolicy
    from tierkv_adapters.vllm.tier.registering import register

__all__ = ["TierKVCachePolicy", "TierKVTier", "register"]

_HOMES = {"TierKVCachePolicy": "policies", "TierKVTier": "manager", "register": "registering"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
