"""Construction of a decision object, and the log of what it is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from tierkv.decisions.cost import Costs
from tierkv.decisions.evicting import TICK_PARTS, Evictor
from tierkv.decisions.figures import Figures
from tierkv.decisions.hinting import Hints
from tierkv.decisions.lines import LOG_VERSION, format_line
from tierkv.decisions.matching import Matcher
from tierkv.decisions.placement import Placement
from tierkv.decisions.ruling import Ruled
from tierkv.decisions.storing import Storer
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.abc import Admission, Policy
    from tierkv.decisions.lines import DecisionLog
    from tierkv.decisions.types import TenantLimits, TierLimits

__all__ = ["Recorded"]

_STEPS: Final = {"leaf_first": -1, "root_first": 1}


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
        admission: Callable[[], Admission] | Sequence[Callable[[], Admission] | None] | None = None,
        touch_order: str = "leaf_first",
        history: int = 65536,
        log: DecisionLog | None = None,
    ) -> None:
        policies = (policy,) * len(tiers) if callable(policy) else tuple(policy)
        if len(policies) != len(tiers):
            raise ConfigError(f"{len(tiers)} tiers need as many policies, not {len(policies)}")
        if touch_order not in _STEPS:
            raise ConfigError(f"touch_order is one of {', '.join(_STEPS)}, not {touch_order!r}")
        gates = _gates(admission, len(tiers))
        step = _STEPS[touch_order]
        self._at = Placement(tiers, policies, tenants, default_limits, history, gates, step)
        self.costs = Costs([tier.name for tier in tiers])
        self._hints = Hints(self._at)
        self._matcher = Matcher(self._at, self._hints)
        self._evictor = Evictor(self._at)
        self._storer = Storer(self._at, self._evictor)
        self._header = {
            "version": LOG_VERSION,
            "tiers": list(tiers),
            "policies": [_describe(partitions[0][1]) for partitions in self._at.partitions],
            "tenants": dict(tenants or {}),
            "default_limits": default_limits,
            "history": history,
            "admission": [None if gate is None else f"{gate.name}:{gate.option}" for gate in gates],
            "touch_order": touch_order,
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
        if self._hints.busy:
            self._hints.carry()
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


def _describe(policy: Policy) -> str:
    return policy.describe() if isinstance(policy, Ruled) else policy.name


def _gates(
    admission: Callable[[], Admission] | Sequence[Callable[[], Admission] | None] | None, tiers: int
) -> list[Admission | None]:
    """Make the admission of each tier; who admits everything is left out: that costs nothing."""
    if admission is None:
        return [None] * tiers
    makers = [admission] * tiers if callable(admission) else list(admission)
    if len(makers) != tiers:
        raise ConfigError(f"{tiers} tiers need as many admissions, not {len(makers)}")
    made = [None if make is None else make() for make in makers]
    return [None if gate is None or gate.name == "all" else gate for gate in made]
