"""From a configuration to tiers, decisions and limits."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from tierkv.abc import DirectBackend
from tierkv.config import later_rules, resolve_policies, tier_chain
from tierkv.decisions.coding_rules import Rule
from tierkv.decisions.core import Decisions
from tierkv.decisions.ruling import Rule as TierRule
from tierkv.decisions.ruling import Ruled
from tierkv.decisions.types import TenantLimits, TierLimits
from tierkv.errors import ConfigError
from tierkv.mover.levels import Level
from tierkv.pipeline import parse_chains
from tierkv.registry import factory, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.abc import Backend, Policy
    from tierkv.chains import Chain, Chains
    from tierkv.config import EngineConfig, Tier
    from tierkv.mover.core import Core

__all__ = ["describe", "make_decisions", "make_levels", "open_level", "tenant_limits"]


_log = logging.getLogger("tierkv")


def _parsed(where: str, text: str) -> Chain | Chains:
    """Read a chain, and warn of one that takes more room than its reader expects."""
    chain = parse_chains(text)
    for name in chain.uncoded:
        _log.warning(
            "%s: %r alone takes up to a byte for each number: write '%s+rans' or '%s+zstd'",
            *(where, name, name, name),
        )
    return chain


def tenant_limits(config: EngineConfig) -> dict[str, TenantLimits]:
    """Byte limits of each tenant that has any."""
    return {
        name: TenantLimits(
            quota=dict(limits.get("quota", {})),
            reserved=dict(limits.get("reserved", {})),
            session_quota=limits.get("session_quota"),
        )
        for name, limits in config.tenants.items()
    }


def make_levels(config: EngineConfig, backends: Sequence[Backend] | None) -> list[Level]:
    """Make the tiers (or take ready backends), fastest first.

    Raises:
        ConfigError: if a kind, codec or option is unknown or cannot be honoured.
    """
    if backends is None:
        backends = [resolve("backends", tier.kind)(tier) for tier in config.tiers]
    if len(backends) != len(config.tiers):
        raise ConfigError(f"{len(backends)} backends were given for {len(config.tiers)} tiers")
    levels = []
    for index, (tier, backend) in enumerate(zip(config.tiers, backends, strict=True)):
        # an unknown codec is found at start, not at the first store
        chain = _parsed(f"tier {tier.name!r}", tier_chain(config, tier))
        if tier.candidate is None:
            levels.append(Level(index, backend, chain.name, tier.write_through))
            continue
        if not chain.lossless:
            raise ConfigError(
                f"tier {tier.name!r}: codec {tier.codec!r} would turn lossy by itself; 'auto' "
                f"takes lossless chains such as 'planes', a lossy one is named outright"
            )
        levels.append(Level(index, backend, "raw", tier.write_through, chain.name))
    return levels


def make_decisions(config: EngineConfig, levels: Sequence[Level]) -> Decisions:
    """Make the decision object for these tiers.

    Raises:
        ConfigError: if a policy is unknown or cannot be honoured.
    """
    policies = _policies(config)
    admission = [factory("admissions", tier.admission) for tier in config.tiers]
    tiers = [
        TierLimits(
            name=tier.name,
            capacity=_usable(level, tier.capacity_bytes),
            high=tier.high,
            low=tier.low,
            durable=level.backend.durable,
            write_through=tier.write_through,
        )
        for tier, level in zip(config.tiers, levels, strict=True)
    ]
    decisions = Decisions(
        tiers,
        policy=policies,
        admission=admission,
        tenants=tenant_limits(config),
        history=config.history,
    )
    places = [level.memory is not None or level.resident is not None for level in levels]
    decisions.compress([_rules(config, tier) for tier in config.tiers], places)
    return decisions


def _rules(config: EngineConfig, tier: Tier) -> list[Rule]:
    """The rules of compression that copies in a tier may come to meet."""
    rules = later_rules(config, tier)
    for rule in rules:
        _parsed("compression", rule.chain)  # an unknown codec is found at start
    return [
        Rule(
            chain=rule.chain,
            steps=rule.steps,
            seconds=rule.seconds,
            sinks=rule.sinks,
            below=rule.importance_below,
            in_place=rule.when == "in_place",
        )
        for rule in rules
    ]


def _policies(config: EngineConfig) -> list[Callable[[], Policy]]:
    """What makes the policy of each tier; rules side by side where there are several."""
    names = [tier.name for tier in config.tiers]
    made: list[Callable[[], Policy]] = []
    for specs in resolve_policies(config).values():
        rules = [
            TierRule(
                factory("policies", spec.name),
                sessions=spec.unit == "session",
                target=None if spec.to is None else names.index(spec.to),
            )
            for spec in specs
        ]
        plain = len(rules) == 1 and not rules[0].sessions and rules[0].target is None
        made.append(rules[0].make if plain else partial(Ruled, rules))
    return made


def _usable(level: Level, capacity: int) -> int:
    """Bytes of a tier that frames can count on: a medium needs some for its own records."""
    usable = int(level.backend.stats().details.get("usable_bytes", 0))
    return usable or capacity  # memory is not mapped yet: then the whole of it counts


async def open_level(core: Core, level: Level) -> None:
    """Open one tier and learn what it holds; what has no room or no use is deleted.

    Raises:
        BackendError: if the tier cannot be used.
    """
    found = await level.backend.open(core.workers)
    charges = [level.backend.charge(part.nbytes) for part in found]
    wall = core.wall()
    # Microseconds since 1970 outrun any number of stores, so that no run reuses a generation of
    # another one: a frame that a crash left behind without its record can never pass for a new one.
    floor = max(0, int(wall * 1e6))
    core.free(core.decisions.recover(level.index, found, charges, core.clock(), wall, floor=floor))
    core.peaks[level.index] = core.decisions.used(level.index)
    await core.purge(level)


def _for_whom(chains: Iterable[str]) -> str:
    """That sessions have to want lossy copies, where there may be some: else they are misses."""
    lossless = all(parse_chains(chain).lossless for chain in chains)
    return "" if lossless else ", lossy: for sessions with fidelity='lossy'"


def describe(core: Core, level: Level) -> str:
    """How bytes travel to and from a tier, for the start-up line: path, codec, direct I/O."""
    text = f"{level.name}={level.backend.stats().mode}"
    if level.candidate is not None:
        text += f" (raw, {level.candidate} where it pays)"
    elif rules := core.decisions.rule_chains(level.index):
        text += f" ({level.chain}, {', '.join(rules)} by rule{_for_whom((level.chain, *rules))})"
    elif level.chain != "raw":
        text += f" ({level.chain}{_for_whom([level.chain])})"
    backend = level.backend
    for other in core.levels:
        device = other.resident.device if other.resident is not None else None
        direct = None
        if device is not None and isinstance(backend, DirectBackend):
            direct = backend.direct(device)
        if device is not None and direct is not None:
            text += f" ({direct.mode} with {device.name})"
    return text
