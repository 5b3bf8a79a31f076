"""Configuration: frozen specs, and the strict layers file < environment < keyword arguments."""

from __future__ import annotations

from tierkv.config.compression import CompressionPolicy, engine_chains, later_rules
from tierkv.config.layers import OWN_VARIABLES, Loaded, load_config, to_plain
from tierkv.config.policies import Hybrid, Policy
from tierkv.config.resolve import resolve_policies, tier_chain
from tierkv.config.specs import EngineConfig, Tier

__all__ = [
    "OWN_VARIABLES",
    "CompressionPolicy",
    "EngineConfig",
    "Hybrid",
    "Loaded",
    "Policy",
    "Tier",
    "engine_chains",
    "later_rules",
    "load_config",
    "resolve_policies",
    "tier_chain",
    "to_plain",
]
