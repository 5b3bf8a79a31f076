"""What the specs mean for each tier; what this version cannot honour is refused here, loudly."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tierkv.config.compression import base_chain
from tierkv.config.fields import did_you_mean
from tierkv.config.policies import Hybrid, Policy
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.config.specs import EngineConfig, Tier

__all__ = ["resolve_policies", "tier_chain"]


def resolve_policies(config: EngineConfig) -> dict[str, tuple[Policy, ...]]:
    """The rules of each tier, in order, by tier name, in the order of the tiers.

    A tier's own ``policy`` is its only rule. Otherwise every rule of ``config.policy`` that names
    the tier, or names none, applies in turn; one that demotes does so above its ``to`` only and
    orders single parts elsewhere. A second rule of the same unit and action would never get its
    turn, and is left out.

    Raises:
        ConfigError: if a rule names a tier that is not there or not slower, or a tier is left
            without a policy.
    """
    rules = _rules(config)
    names = [tier.name for tier in config.tiers]
    for rule in rules:
        _check_rule(rule, names)
    chosen: dict[str, tuple[Policy, ...]] = {}
    for number, tier in enumerate(config.tiers):
        if tier.policy is not None:
            chosen[tier.name] = (Policy(tier.policy, tier=tier.name),)
            continue
        mine: dict[tuple[str, str], Policy] = {}
        for rule in rules:
            if rule.tier in (None, tier.name):
                here = dataclasses.replace(rule, tier=tier.name)
                if rule.to is not None and names.index(rule.to) <= number:
                    here = Policy(rule.name, tier=tier.name)
                mine.setdefault((here.unit, here.action), here)
        if not mine:
            raise ConfigError(
                f"no policy for tier {tier.name!r}: add a rule without a tier, e.g. Policy('lrfu')"
            )
        chosen[tier.name] = tuple(mine.values())
    return chosen


def _check_rule(rule: Policy, names: Sequence[str]) -> None:
    for name in (rule.tier, rule.to):
        if name is not None and name not in names:
            raise ConfigError(
                f"policy {rule.name!r}: no tier {name!r}; {did_you_mean(name, names)}"
            )
    if rule.to is not None:
        above = rule.tier or names[0]
        if names.index(rule.to) <= names.index(above):
            raise ConfigError(
                f"policy {rule.name!r}: it cannot demote to {rule.to!r}, which is not slower than "
                f"{above!r}; name a tier further down"
            )


def tier_chain(config: EngineConfig, tier: Tier) -> str:
    """Codec chain of a tier's new blocks: its own ``codec``, else what ``compression`` says.

    With codec ``"auto"`` it is the chain that is used where it pays.

    Raises:
        ConfigError: if the rules of ``config.compression`` contradict each other or the tiers.
    """
    base = base_chain(config, tier)
    return tier.candidate or tier.codec or base


def _rules(config: EngineConfig) -> tuple[Policy, ...]:
    if isinstance(config.policy, str):
        return (Policy(config.policy),)
    if isinstance(config.policy, Hybrid):
        return tuple(config.policy.rules)
    return (config.policy,)
