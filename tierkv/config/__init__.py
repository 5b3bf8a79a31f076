"""Configuration: frozen specs, and the strict layers file < environment < keyword arguments."""

from __future__ import annotations

from tierkv.config.layers import OWN_VARIABLES, Loaded, load_config, to_plain
from tierkv.config.resolve import resolve_policies, tier_chain
from tierkv.config.specs import CompressionPolicy, EngineConfig, Hybrid, Policy, Tier

__all__ = [
    "OWN_VARIABLES",
    "CompressionPolicy",
    "EngineConfig",
    "Hybrid",
    "Loaded",
    "Policy",
    "Tier",
    "load_config",
    "resolve_policies",
    "tier_chain",
    "to_plain",
]
