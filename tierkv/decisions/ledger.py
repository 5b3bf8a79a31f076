"""Byte accounts: per tier and per tenant, never below zero, never silently corrected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierkv.decisions.types import TenantLimits, TierLimits

__all__ = ["Ledger"]


class Ledger:
    """Who uses how many bytes of what.

    Attributes:
        tiers: Limits of each tier.
        capacity: Bytes of each tier; follows :meth:`Decisions.set_capacity`.
        used: Bytes of resident copies, those included whose drop waits for a lease.
        reserved: Bytes of copies being written.
        pinned: The part of ``used`` that leases and copies under way keep from being evicted.
        leaving: The part of ``used`` that is proposed for demotion.
        entries: Resident copies.
        names: Names of the tenants seen, by number.
        tenants: Number of each tenant seen.
        unlimited: Whether no tenant has any limits.
    """

    __slots__ = (
        "_default",
        "_limits",
        "_usage",
        "capacity",
        "entries",
        "leaving",
        "names",
        "pinned",
        "reserved",
        "tenants",
        "tiers",
        "unlimited",
        "used",
    )

    def __init__(
        self,
        tiers: Sequence[TierLimits],
        tenants: Mapping[str, TenantLimits] | None,
        default: TenantLimits | None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.capacity = [t.capacity for t in tiers]
        self.used = [0] * len(tiers)
        self.reserved = [0] * len(tiers)
        self.pinned = [0] * len(tiers)
        self.leaving = [0] * len(tiers)
        self.entries = [0] * len(tiers)
        self.names: list[str] = []
        self.tenants: dict[str, int] = {}
        self._limits = dict(tenants or {})
        self._default = default
        self.unlimited = not self._limits and default is None
        self._usage: list[list[int]] = []
        self._check_limits()

    def _check_limits(self) -> None:
        known = [t.name for t in self.tiers]
        if len(set(known)) != len(known):
            raise ConfigError(f"tier names must be unique: {known}")
        for tenant, limits in {**self._limits, "(default)": self._default}.items():
            for name in (*limits.quota, *limits.reserved) if limits else ():
                if name not in known:
                    raise ConfigError(
                        f"limits of tenant {tenant!r} name a tier {name!r}; the tiers are {known}"
                    )
        for tier in self.tiers:
            promised = sum(x.reserved.get(tier.name, 0) for x in self._limits.values())
            if promised > tier.capacity:
                raise ConfigError(
                    f"tier {tier.name!r}: tenants have {promised} bytes reserved, more than its"
                    f" capacity of {tier.capacity}; lower their shares"
                )

    # ------------------------------------------------------------------ tenants

    def tenant(self, name: str) -> int:
        """Number of a tenant; a new one gets the next."""
        number = self.tenants.get(name)
        if number is None:
            number = self.tenants[name] = len(self.names)
            self.names.append(name)
            self._usage.append([0] * len(self.tiers))
        return number

    def limits(self, tenant: int) -> TenantLimits | None:
        """Limits of a tenant, if any apply."""
        return self._limits.get(self.names[tenant], self._default)

    def quota(self, tenant: int, tier: int) -> int | None:
        """Most bytes that a tenant may use in a tier, or None."""
        if self.unlimited:
            return None
        limits = self.limits(tenant)
        return limits.quota.get(self.tiers[tier].name) if limits else None

    def protected(self, tenant: int, tier: int) -> int:
        """Bytes of a tenant that others cannot push out of a tier."""
        limits = self.limits(tenant)
        return limits.reserved.get(self.tiers[tier].name, 0) if limits else 0

    def separate(self, tenant: int, tier: int) -> bool:
        """Whether a tenant's parts in a tier are ordered apart from everybody else's."""
        return self.quota(tenant, tier) is not None or self.protected(tenant, tier) > 0

    def usage(self, tenant: int, tier: int) -> int:
        """Bytes that a tenant uses in a tier, pending ones included."""
        return self._usage[tenant][tier]

    # ------------------------------------------------------------------ movements

    def room(self, tier: int) -> int:
        """Free bytes; negative after the tier was made smaller."""
        return self.capacity[tier] - self.used[tier] - self.reserved[tier]

    def reserve(self, tier: int, tenant: int, nbytes: int) -> None:
        """Set bytes aside for a copy about to be written."""
        self.reserved[tier] += nbytes
        self._usage[tenant][tier] += nbytes

    def give_back(self, tier: int, tenant: int, nbytes: int) -> None:
        """Undo :meth:`reserve`."""
        self.reserved[tier] -= nbytes
        self._usage[tenant][tier] -= nbytes
        if self.reserved[tier] < 0 or self._usage[tenant][tier] < 0:
            self._negative(tier, tenant)

    def charge(self, tier: int, tenant: int, copies: int, nbytes: int, reserved: int) -> None:
        """Count copies that became resident, for which ``reserved`` bytes were set aside."""
        self.used[tier] += nbytes
        self.entries[tier] += copies
        left = self.reserved[tier] = self.reserved[tier] - reserved
        if nbytes != reserved:
            self._usage[tenant][tier] += nbytes - reserved
        if left < 0:
            self._negative(tier, tenant)

    def discharge(self, tier: int, tenant: int, nbytes: int) -> None:
        """Uncount the bytes of a copy that is gone (its entry is uncounted when it is unlisted)."""
        used = self.used[tier] = self.used[tier] - nbytes
        usage = self._usage[tenant]
        usage[tier] = theirs = usage[tier] - nbytes
        if used < 0 or theirs < 0:
            self._negative(tier, tenant)

    def _negative(self, tier: int, tenant: int) -> None:
        raise AssertionError(
            f"accounts of tier {self.tiers[tier].name!r} went below zero: used {self.used[tier]},"
            f" reserved {self.reserved[tier]}, tenant {self.names[tenant]!r}"
            f" {self._usage[tenant][tier]}; something was given back twice"
        )
