"""Which policy orders which tier: frozen specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.config.fields import NONE, check_types, set_field
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Hybrid", "Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule about who leaves a tier: an eviction policy, and what becomes of its victims.

    Attributes:
        name: Name of a policy: ``"lru"``, ``"lrfu"``, ...
        tier: Tier it is for; None means every tier.
        unit: What leaves at once: a ``"part"``, or all of a ``"session"`` that is in nobody's use:
            the coldest branch of a conversation, up to where a session that was used later, or is
            leased, holds on to what they share.
        action: ``"evict"``: copies are let go; what is in no slower tier is first demoted to the
            next one that takes it. ``"demote"``: they go to the tier ``to``.
        to: Tier that demoted parts go to.
    """

    name: str
    tier: str | None = None
    unit: str = "part"
    action: str = "evict"
    to: str | None = None

    def __post_init__(self) -> None:
        check_types(
            self, "policy", name=str, tier=(str, NONE), unit=str, action=str, to=(str, NONE)
        )
        if self.unit not in ("part", "session"):
            raise ConfigError(f"policy {self.name!r}: unit must be 'part' or 'session'")
        if self.action not in ("evict", "demote"):
            raise ConfigError(f"policy {self.name!r}: action must be 'evict' or 'demote'")
        if (self.to is not None) != (self.action == "demote"):
            raise ConfigError(f"policy {self.name!r}: 'to' belongs to action='demote', and only it")


@dataclass(frozen=True, slots=True)
class Hybrid:
    """An ordered list of rules; all that match a tier apply to it, one after the other.

    A rule gets its turn when those before it are exhausted. So that there is something to be
    exhausted, a rule that evicts lets go only of what slower tiers hold already while another
    rule follows it::

        Hybrid([
            Policy("size_aware", tier="device"),
            Policy("lru", unit="session", action="demote", to="host"),
        ])

    lets the largest copies go first that the host has too, and when there are none left, swaps
    the coldest sessions out to the host, one whole session after the other.
    """

    rules: Sequence[Policy]

    def __post_init__(self) -> None:
        one = not hasattr(self.rules, "__iter__")
        set_field(self, "rules", () if one else tuple(self.rules))
        if not self.rules or not all(isinstance(rule, Policy) for rule in self.rules):
            raise ConfigError("a Hybrid needs one tierkv.Policy or more, e.g. [Policy('lru')]")
