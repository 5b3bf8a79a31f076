"""Short names for the tier and the policies in vLLM's own tables."""

from __future__ import annotations

import importlib
from contextlib import suppress

from tierkv.errors import AttachError
from tierkv.registry import names

__all__ = ["register"]

_TIERS = "vllm.v1.kv_offload.tiering.factory"
_POLICIES = "vllm.v1.kv_offload.cpu.policies.factory"


def register() -> None:
    """Make the tier known as ``"tierkv"``, and each policy as ``"tierkv-<name>"``. Idempotent.

    Policies only where vLLM has a table of them (0.28 and later).

    Raises:
        AttachError: if this vLLM has no table of tiers.
    """
    try:
        tiers = importlib.import_module(_TIERS).SecondaryTierFactory
    except (ImportError, AttributeError) as error:
        raise AttachError(f"this vLLM has no table of secondary tiers: {error}") from error
    with suppress(ValueError):  # it is there already
        tiers.register_tier("tierkv", "tierkv_adapters.vllm.tier", "TierKVTier")
    try:
        policies = importlib.import_module(_POLICIES).CachePolicyFactory
    except ImportError:
        return
    for name in names("policies"):
        with suppress(ValueError):
            policies.register_cache_policy(
                f"tierkv-{name}", "tierkv_adapters.vllm.tier.policies", name
            )
