"""Construction of a decision object, and the log of what it is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierkv.decisions.cost import Costs
from tierkv.decisions.evicting import TICK_PARTS, Evictor
from tierkv.decisions.figures import Figures
from tierkv.decisions.lines import LOG_VERSION, format_line
from tierkv.decisions.matching import Matcher
from tierkv.decisions.placement import Placement
from tierkv.decisions.storing import Storer
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.abc import Policy
    from tierkv.decisions.lines import DecisionLog
    from tierkv.decisions.types import TenantLimits, TierLimits

__all__ = ["Recorded"]


class Recorded(Figures):
    """The parts that decide, put together, and the decision log of their owner.

    Attributes:
        costs: What is known of costs, to be read; it is told through the recorded calls.
    """

    def __init__(
        self,
        tiers: Sequence[TierLimits],
        *,
        policy: Callable[[], Policy] | Sequence[Callable[[], Policy]],
        tenants: Mapping[str, TenantLimits] | None = None,
        default_limits: TenantLimits | None = None,
        history: int = 65536,
        log: DecisionLog | None = None,
    ) -> None:
        policies = (policy,) * len(tiers) if callable(policy) else tuple(policy)
        if len(policies) != len(tiers):
            raise ConfigError(f"{len(tiers)} tiers need as many policies, not {len(policies)}")
        self._at = Placement(tiers, policies, tenants, default_limits, history)
        self.costs = Costs([tier.name for tier in tiers])
        self._matcher = Matcher(self._at)
        self._evictor = Evictor(self._at)
        self._storer = Storer(self._at, self._evictor)
        self._header = {
            "version": LOG_VERSION,
            "tiers": list(tiers),
            "policies": [partitions[0][1].name for partitions in self._at.partitions],
            "tenants": dict(tenants or {}),
            "default_limits": default_limits,
            "history": history,
        }
        self._debug = os.environ.get("TIERKV_DEBUG") == "1"  # checks itself after every call
        self._log: DecisionLog | None = None
        if log is not None:
            self.attach(log)

    def attach(self, log: DecisionLog | None) -> None:
        """Write every further call to ``log``, a header first; None stops it."""
        self._log = log
        if log is not None:
            log.write(format_line("header", 0.0, (self._header,), None))

    def _record(self, op: str, now: float, args: tuple[Any, ...], result: Any) -> None:
        if self._log is not None:
            self._log.write(format_line(op, now, args, result))

    def _settle(self, now: float) -> None:
        """Carry consequences on: holes, and the policies' idea of how much a tier holds."""
        at = self._at
        at.spread(TICK_PARTS)
        for tier in at.tiers:
            parts = at.measure(tier)
            if parts is not None:
                self._record("resize", now, (tier, parts), None)
        if self._debug:
            self.check()

    def _tier(self, tier: int) -> int:
        if not 0 <= tier < len(self._at.tiers):
            raise ConfigError(f"there is no tier {tier}; the engine has {len(self._at.tiers)}")
        return tier
