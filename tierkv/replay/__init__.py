"""Offline replay: the decisions of a live engine, driven by a trace under a virtual clock.

:func:`replay` runs a workload trace through :class:`tierkv.decisions.core.Decisions` (and the
predictors) as an engine would, :func:`belady` gives the bound that no policy can beat, and
:func:`replay_log` checks a recorded decision log byte for byte. What is evicted, admitted or
prefetched is decided by the live classes alone; here bytes are counted and time is added up.
"""

from tierkv.replay.bound import Bound, belady
from tierkv.replay.logs import LogReport, replay_log
from tierkv.replay.report import Distribution, Report, TierReport
from tierkv.replay.running import replay
from tierkv.replay.setup import CostModel, Setup

__all__ = [
    "Bound",
    "CostModel",
    "Distribution",
    "LogReport",
    "Report",
    "Setup",
    "TierReport",
    "belady",
    "replay",
    "replay_log",
]
