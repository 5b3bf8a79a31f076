"""What moving bytes costs, learned from what it cost: tiers, codecs, prefill, and broken tiers.

Pure: every number comes in through a call, so that the decision log replays it. No clock, no I/O.
"""

from tierkv.decisions.cost.book import CodecFigures, Costs
from tierkv.decisions.cost.breaker import Breaker, BreakerState
from tierkv.decisions.cost.planning import LoadChoice, Run, choose, profile
from tierkv.decisions.cost.rates import Line, Speed

__all__ = [
    "Breaker",
    "BreakerState",
    "CodecFigures",
    "Costs",
    "Line",
    "LoadChoice",
    "Run",
    "Speed",
    "choose",
    "profile",
]
