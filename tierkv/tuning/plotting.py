"""Miss-ratio curves as a picture."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierkv.errors import ConfigError, MissingDependencyError
from tierkv.outputs import put

if TYPE_CHECKING:
    from tierkv.tuning.sweeping import Sweep

__all__ = ["check_picture", "plot"]

_FORMS: Final = (".png", ".svg", ".pdf")
_GIB: Final = 1 << 30


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that could not be drawn, before anything is computed for it.

    Raises:
        ConfigError: if the name ends in no known form.
        MissingDependencyError: if matplotlib is not installed.
    """
    if os.path.splitext(path)[1].lower() not in _FORMS:
        raise ConfigError(f"{os.fspath(path)!r}: a picture ends in {', '.join(_FORMS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "a picture needs matplotlib: pip install -c constraints.txt -e '.[tune]'"
        ) from error


def plot(sweep: Sweep, path: str | os.PathLike[str], title: str = "") -> None:
    """Draw the share of tokens that is missed over the bytes of the first tier, a line a policy.

    Sweeps of several slower tiers get a line for each set of their sizes.

    Raises:
        ConfigError: as :func:`check_picture`, or if there is nothing to draw, or the file cannot
            be written.
        MissingDependencyError: if matplotlib is not installed.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[float, float, float]]] = {}
    for point in sweep.points:
        rest = [f"{name} {size / _GIB:.3g} GiB" for name, size in list(point.tiers.items())[1:]]
        line = " + ".join([point.policy, *rest])
        lines.setdefault(line, []).append(
            (point.fastest / _GIB, 1 - point.token_hit_ratio, point.error)
        )
    if not lines:
        raise ConfigError("there is nothing to draw: the sweep has no points")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        x, y, error = zip(*sorted(points), strict=True)
        axes.errorbar(x, y, yerr=error if any(error) else None, marker="o", label=name)
    axes.set(xscale="log", xlabel="first tier, GiB", ylabel="tokens missed", ylim=(0, 1))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    out = BytesIO()
    figure.savefig(out, format=os.path.splitext(path)[1][1:].lower())
    put(Path(path), out.getvalue())
