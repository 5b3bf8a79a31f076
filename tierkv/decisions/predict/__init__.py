"""Predictors: what each one bets on, in a file of its own; sans-IO (:class:`tierkv.abc.Predictor`).

:mod:`tierkv.decisions.prefetching` grants their wishes and judges them.
"""

from __future__ import annotations

from tierkv.decisions.predict.books import PrefetchFigures
from tierkv.decisions.predict.naming import make_predictors

__all__ = ["PrefetchFigures", "make_predictors"]
