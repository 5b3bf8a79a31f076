"""The predictors of an engine: made from its settings, tied to its books and its decision log."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from tierkv.decisions.predict import make_predictors
from tierkv.decisions.prefetching import Prefetching
from tierkv.prefetch import Prefetcher
from tierkv.registry import resolve

if TYPE_CHECKING:
    from tierkv.blocks import PartId
    from tierkv.config import EngineConfig
    from tierkv.decisions.lines import DecisionLog
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher

__all__ = ["make_prefetcher", "make_prefetching"]

_log = logging.getLogger("tierkv")


def make_prefetching(config: EngineConfig) -> Prefetching:
    """Make the object that decides what is fetched early.

    Raises:
        ConfigError: if a predictor is unknown, works offline only, or does not know an option.
    """
    predictors = make_predictors(config.prefetch, partial(resolve, "predictors"))
    budget = None if config.prefetch_budget is None else float(config.prefetch_budget)
    return Prefetching(predictors, budget=budget, floor=config.prefetch_floor)


def make_prefetcher(
    config: EngineConfig,
    core: Core,
    fetcher: Fetcher,
    behind: WriteBehind,
    log: DecisionLog | None,
) -> Prefetcher:
    """Make what carries it out, and let it hear of every copy that leaves a tier.

    With predictors, its calls go into the decision log beside those of the decision object: what
    is granted depends on when bytes arrived and left, which no list of requests could tell.

    Raises:
        ConfigError: as :func:`make_prefetching`.
    """
    books = make_prefetching(config)
    if books.predictors:
        books.attach(log)
        if len(core.levels) < 2:
            _log.warning("prefetch does nothing here: there is no slower tier to fetch from")

    def left(part: PartId, tier: int) -> None:
        if books.any_out:
            books.dropped(part, tier, core.clock())

    core.on_drop = left
    return Prefetcher(core, fetcher, behind, books)
