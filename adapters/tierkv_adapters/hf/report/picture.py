"""What chains take against what they change, as a picture."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_adapters.hf.report.rows import Row

__all__ = ["frontier", "picture"]

_LEAST_KL = 1e-7  # lossless chains have none, and a logarithm none of that


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other beats in both size and KL, by size.

    >>> frontier([])
    []
    """
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.bits_per_element, row.kl or 0.0)):
        if row.kl is not None and (not best or row.kl < (best[-1].kl or 0.0)):
            best.append(row)
    return best


def picture(rows: Sequence[Row], title: str, form: str) -> bytes:
    """Draw KL against bits a number, the Pareto frontier joined.

    Args:
        rows: The rows of the report; those without a KL are left out.
        title: Title of the picture.
        form: ``"png"``, ``"svg"`` or ``"pdf"``.

    Raises:
        ImportError: if matplotlib is not installed; see
            :func:`tierkv.tuning.plotting.check_picture`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5))
    axes = figure.add_subplot()
    known = [row for row in rows if row.kl is not None]
    axes.scatter([r.bits_per_element for r in known], [_height(r) for r in known])
    for row in known:
        name = row.chain + (" *" if row.exact_first else "")
        axes.annotate(name, (row.bits_per_element, _height(row)))
    best = frontier(known)
    axes.plot([r.bits_per_element for r in best], [_height(r) for r in best])
    axes.set(
        yscale="log",
        xlabel="bits a number",
        ylabel="KL of the next token (nats)",
        title=f"{title} (*: first block exact)",
    )
    out = BytesIO()
    figure.savefig(out, format=form)
    return out.getvalue()


def _height(row: Row) -> float:
    return max(row.kl or 0.0, _LEAST_KL)
