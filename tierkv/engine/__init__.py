"""The engine: composition and lifecycle."""

from tierkv.engine.engine import BoundSpace, Engine, open
from tierkv.engine.stats import CloseReport, EngineStats
from tierkv.engine.watching import Residency

__all__ = ["BoundSpace", "CloseReport", "Engine", "EngineStats", "Residency", "open"]
