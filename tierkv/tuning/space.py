"""What may be chosen, and what a choice is worth."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tierkv.config import EngineConfig, Tier
from tierkv.errors import ConfigError
from tierkv.replay import CostModel, Setup
from tierkv.tuning.sweeping import PRICES, price_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierkv.replay import Report

__all__ = ["OBJECTIVES", "Choices", "shipped", "sizes_of", "worth"]

OBJECTIVES: Final = ("ttft", "hit", "cost")
"""``ttft``: mean seconds to the first token; ``hit``: share of tokens found, in any tier;
``cost``: the cheapest sizes, of those given or less, at which the mean time to the first token
is no longer than the shipped settings' at the sizes given."""

_SMALLEST: Final = 1 / 16  # of a tier's size, in a search for the cheapest


def _default(spec: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(spec) if f.name == name)


def shipped(sizes: Mapping[str, int | None], model: CostModel | None = None) -> Setup:
    """The settings that an engine has if only its tiers are named.

    Args:
        sizes: Bytes of each tier by name, fastest first; None: it never fills up.
        model: What takes time.
    """
    return Setup(
        capacity_bytes=list(sizes.values()),
        names=tuple(sizes),
        policy=_default(EngineConfig, "policy"),
        admission=_default(Tier, "admission"),
        prefetch=_default(EngineConfig, "prefetch"),
        prefetch_budget=_default(EngineConfig, "prefetch_budget"),
        prefetch_floor=_default(EngineConfig, "prefetch_floor"),
        write_through=_default(Tier, "write_through"),
        high=_default(Tier, "high"),
        low=_default(Tier, "low"),
        model=model or CostModel(),
    )


def sizes_of(setup: Setup) -> dict[str, int]:
    """Bytes of each tier that can fill up, by name."""
    values = setup.capacity_bytes
    if isinstance(values, int | str) or values is None:
        raise ConfigError("a search needs the bytes of each tier: capacity_bytes=[...]")
    return {n: int(v) for n, v in zip(setup.tier_names(), values, strict=True) if v is not None}


@dataclass(frozen=True, slots=True)
class Choices:
    """What a search may choose from; one entry leaves no choice.

    Attributes:
        policies: Eviction policies, one for all tiers.
        admissions: What may enter the first tier.
        prefetches: Predictors.
        budgets: Bytes a second that they may move; None: no limit.
        floors: Least precision of a predictor.
        marks: ``(high, low)`` of each tier: from and down to which used share room is made.
    """

    policies: tuple[str, ...] = ("lru", "lrfu", "lru2", "arc", "adaptive", "gittins")
    admissions: tuple[str, ...] = ("all", "second_use", "second_use:when_full", "tinylfu")
    prefetches: tuple[str, ...] = ("", "arrival", "arrival,chain", "arrival,return_time")
    budgets: tuple[str | None, ...] = (None, "1GiB", "4GiB")
    floors: tuple[float, ...] = (0.1, 0.25, 0.5)
    marks: tuple[tuple[float, float], ...] = ((0.95, 0.85), (0.98, 0.95), (1.0, 1.0))

    def pick(self, suggest: Any, base: Setup, *, resize: bool) -> Setup:
        """The setup of one trial.

        Args:
            suggest: An optuna trial, or what suggests as one does.
            base: What is not chosen.
            resize: Whether sizes are chosen as well, up to those of ``base``.
        """
        prefetch = suggest.suggest_categorical("prefetch", list(self.prefetches))
        high, low = self.marks[suggest.suggest_categorical("marks", list(range(len(self.marks))))]
        admission = suggest.suggest_categorical("admission", list(self.admissions))
        chosen = replace(
            base,
            policy=suggest.suggest_categorical("policy", list(self.policies)),
            admission=[admission, *base.each(base.admission)[1:]],
            prefetch=prefetch,
            high=high,
            low=low,
        )
        if prefetch:  # asked for only where it matters, so that no trial is spent on it
            chosen = replace(
                chosen,
                prefetch_budget=suggest.suggest_categorical("budget", list(self.budgets)),
                prefetch_floor=suggest.suggest_categorical("floor", list(self.floors)),
            )
        if not resize:
            return chosen
        full = sizes_of(base)
        sizes: dict[str, int | None] = dict.fromkeys(base.tier_names())
        for name, size in full.items():
            share = suggest.suggest_float(f"share of {name}", _SMALLEST, 1.0, log=True)
            sizes[name] = int(size * share)
        return replace(chosen, capacity_bytes=list(sizes.values()))

    def nearest(self, setup: Setup) -> dict[str, Any]:
        """The choices that come to ``setup`` itself, as far as they are among these."""
        wanted: dict[str, tuple[object, tuple[Any, ...]]] = {
            "policy": (setup.each(setup.policy)[0], self.policies),
            "admission": (setup.each(setup.admission)[0], self.admissions),
            "prefetch": (setup.prefetch, self.prefetches),
            "budget": (setup.prefetch_budget, self.budgets),
            "floor": (setup.prefetch_floor, self.floors),
        }
        found = {name: value for name, (value, all_) in wanted.items() if value in all_}
        if (setup.high, setup.low) in self.marks:
            found["marks"] = self.marks.index((setup.high, setup.low))
        return found


def worth(
    objective: str,
    setup: Setup,
    report: Report,
    reference: Report,
    prices: Mapping[str, float] = PRICES,
) -> float:
    """What a search makes small.

    Args:
        objective: One of :data:`OBJECTIVES`.
        setup: What was replayed.
        report: What came of it.
        reference: What came of the shipped settings at the full sizes.
        prices: Price of a GiB of each tier.

    Raises:
        ConfigError: if there is no such objective.
    """
    if objective == "ttft":
        return report.ttft.mean
    if objective == "hit":
        return -report.token_hit_ratio
    if objective != "cost":
        raise ConfigError(f"an objective is one of {', '.join(OBJECTIVES)}, not {objective!r}")
    cost = price_of(sizes_of(setup), prices)
    late = report.ttft.mean / reference.ttft.mean - 1 if reference.ttft.mean else 0.0
    # too slow is worse than any that is quick enough, the slower the worse
    return cost if late <= 0 else 1e9 * (1 + late)
