"""What the specs mean for each tier; what this version cannot honour is refused here, loudly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.config.specs import CompressionPolicy, Hybrid, Policy, did_you_mean
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.config.specs import EngineConfig, Tier

__all__ = ["resolve_policies", "tier_chain"]


def resolve_policies(config: EngineConfig) -> dict[str, str]:
    """Name of the eviction policy of each tier, by tier name, in the order of the tiers.

    A tier's own ``policy`` wins; otherwise the first rule of ``config.policy`` that names the
    tier, or names none, is used.

    Raises:
        ConfigError: if a rule names a tier that is not there, a tier is left without a policy, or
            a rule asks for something that this version cannot do.
    """
    rules = _rules(config)
    names = [tier.name for tier in config.tiers]
    for rule in rules:
        if rule.tier is not None and rule.tier not in names:
            raise ConfigError(
                f"policy {rule.name!r}: no tier {rule.tier!r}; {did_you_mean(rule.tier, names)}"
            )
        if rule.unit != "part":
            raise ConfigError(
                f"policy {rule.name!r}: unit={rule.unit!r} is not available in this version; "
                f"leave it at 'part'"
            )
        if rule.action != "evict":
            raise ConfigError(
                f"policy {rule.name!r}: action={rule.action!r} is not available in this version; "
                f"leave it at 'evict': parts are demoted to the next tier before they are dropped"
            )
    chosen: dict[str, str] = {}
    for tier in config.tiers:
        fitting = [rule.name for rule in rules if rule.tier in (None, tier.name)]
        if tier.policy is None and not fitting:
            raise ConfigError(
                f"no policy for tier {tier.name!r}: add a rule without a tier, e.g. Policy('lrfu')"
            )
        chosen[tier.name] = tier.policy or fitting[0]
    return chosen


def tier_chain(config: EngineConfig, tier: Tier) -> str:
    """Codec chain of a tier: its own ``codec``, else ``config.compression``, else ``"raw"``.

    With codec ``"auto"`` it is the chain that is used where it pays.

    Raises:
        ConfigError: if compression is to wait (``after_steps``), which this version cannot do.
    """
    compression = config.compression
    if isinstance(compression, CompressionPolicy):
        if compression.after_steps:
            raise ConfigError(
                f"compression: after_steps={compression.after_steps} is not available in this "
                f"version; use 0 to compress at once"
            )
        compression = compression.chain
    return tier.candidate or tier.codec or compression or "raw"


def _rules(config: EngineConfig) -> tuple[Policy, ...]:
    if isinstance(config.policy, str):
        return (Policy(config.policy),)
    if isinstance(config.policy, Hybrid):
        return tuple(config.policy.rules)
    return (config.policy,)
