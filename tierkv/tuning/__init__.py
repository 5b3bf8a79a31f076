"""Finding a configuration offline: sweeps over sizes, and a search over everything that can be set.

Both replay a workload trace through :mod:`tierkv.replay`, that is through the decisions of the live
engine. :func:`sweep` tells what each size and policy would find, and which is the cheapest that is
good enough; :func:`tune` searches policies, admission, prefetch and sizes on the first half of a
trace and says what the result is worth on the second.
"""

from tierkv.tuning.sampling import sampled
from tierkv.tuning.searching import Tuned, tune
from tierkv.tuning.space import OBJECTIVES, Choices, shipped
from tierkv.tuning.sweeping import PRICES, Point, Sweep, sweep
from tierkv.tuning.writing import settings_text

__all__ = [
    "OBJECTIVES",
    "PRICES",
    "Choices",
    "Point",
    "Sweep",
    "Tuned",
    "sampled",
    "settings_text",
    "shipped",
    "sweep",
    "tune",
]
