"""Rows of the report: one for each chain; which one to take; a picture."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.chains import parse_chains
from tierkv.errors import ConfigError, MissingDependencyError
from tierkv_adapters.hf.report.coding import code, speed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tierkv_adapters.hf.report.fidelity import Subject

__all__ = ["CHAINS", "Row", "check_plot", "listed", "measure", "plot", "recommend"]

CHAINS: Final = (
    "raw",
    "zstd",
    "planes",
    "int8",
    "int8+planes",
    "fp8",
    "int6",
    "int4",
    "int4+zstd",
    "rot4",
    "rot4+zstd",
    "ecq4+rans",
    "int3",
    "rot3",
    "ecq3+rans",
    "int2",
    "rot2",
    "ecq2+rans",
)
"""What is measured by default."""


_FORMS: Final = (".png", ".svg", ".pdf")


def listed(text: str) -> list[str]:
    """Chains of a list: separated by commas, or by semicolons, where rules have commas in them.

    >>> listed("int8, int4+zstd"), listed("K:int8,V:int4; planes")
    (['int8', 'int4+zstd'], ['K:int8,V:int4', 'planes'])
    """
    mark = ";" if ";" in text or ":" in text else ","
    return [chain.strip() for chain in text.split(mark) if chain.strip()]


class Row(NamedTuple):
    """What one chain costs and gives; fields that were not measured are None.

    Attributes:
        chain: The chain; ``exact_first`` says how many first blocks were kept exact.
        exact_first: Blocks of the prefix stored raw; they count in ``bits_per_element``.
        lossless: Whether every bit comes back.
        bits_per_element: Stored bits a number, scales included.
        ratio: Raw bytes over stored bytes.
        encode_GBps: GB of raw bytes a second of one core.
        decode_GBps: The same, decoding.
        encode_vs_memcpy: Against a copy of the same memory by one thread.
        decode_vs_memcpy: The same, decoding.
        kl: Mean KL divergence of the next-token distribution, in nats.
        top1: Share of positions with the same most likely token.
        dnll: Change of the mean negative log-likelihood, in nats.
        max_dlogit: Largest change of any logit.
        fallbacks: Sections that the codec refused.
    """

    chain: str
    exact_first: int
    lossless: bool
    bits_per_element: float
    ratio: float
    encode_GBps: float | None
    decode_GBps: float | None
    encode_vs_memcpy: float | None
    decode_vs_memcpy: float | None
    kl: float | None
    top1: float | None
    dnll: float | None
    max_dlogit: float | None
    fallbacks: int


def measure(
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
    chain: str,
    *,
    subject: Subject | None,
    exact_first: int = 0,
    timed: bool = True,
) -> Row:
    """Measure one chain.

    Args:
        kv: What is stored.
        chain: The chain.
        subject: Judges what comes back; None leaves its columns empty.
        exact_first: First blocks stored raw.
        timed: Measure speed as well.
    """
    done = code(kv, chain, exact_blocks=exact_first)
    pace = speed(kv, chain) if timed else None
    found = subject.compare(done.kv) if subject is not None else None
    return Row(
        chain=chain,
        exact_first=exact_first,
        lossless=parse_chains(chain).lossless,
        bits_per_element=done.bits,
        ratio=done.ratio,
        encode_GBps=pace and pace.encode,
        decode_GBps=pace and pace.decode,
        encode_vs_memcpy=pace and pace.encode_vs_memcpy,
        decode_vs_memcpy=pace and pace.decode_vs_memcpy,
        kl=found and found.kl,
        top1=found and found.top1,
        dnll=found and found.dnll,
        max_dlogit=found and found.max_dlogit,
        fallbacks=done.fallbacks,
    )


def recommend(rows: Sequence[Row], bound: float) -> Row | None:
    """Smallest chain whose KL is within ``bound``; None if there is none.

    >>> recommend([], 0.1) is None
    True
    """
    fit = [row for row in rows if row.kl is not None and row.kl <= bound]
    return min(fit, key=lambda row: (row.bits_per_element, row.kl or 0.0), default=None)


def _frontier(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other beats in both size and KL, by size."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.bits_per_element, row.kl or 0.0)):
        if row.kl is not None and (not best or row.kl < (best[-1].kl or 0.0)):
            best.append(row)
    return best


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured for it.

    Raises:
        ConfigError: if there is no such directory, or the name ends in no form of a picture.
        MissingDependencyError: if matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMS:
        raise ConfigError(f"--plot {str(path)!r}: a picture ends in {', '.join(_FORMS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no directory {str(path.parent)!r}")
    _figures()


def _figures() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingDependencyError(
            "--plot needs matplotlib: pip install -c constraints.txt -e '.[tune]'"
        ) from error


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw KL against bits a number, the Pareto frontier joined.

    Raises:
        MissingDependencyError: if matplotlib is not installed.
    """
    figure = _figures().Figure(figsize=(7, 5))
    axes = figure.add_subplot()
    known = [row for row in rows if row.kl is not None]
    floor = 1e-7  # lossless chains have none, and a logarithm none of that
    axes.scatter([r.bits_per_element for r in known], [max(r.kl or 0, floor) for r in known])
    for row in known:
        name = row.chain + (" *" if row.exact_first else "")
        axes.annotate(name, (row.bits_per_element, max(row.kl or 0, floor)))
    best = _frontier(known)
    axes.plot([r.bits_per_element for r in best], [max(r.kl or 0, floor) for r in best])
    axes.set(
        yscale="log",
        xlabel="bits a number",
        ylabel="KL of the next token (nats)",
        title=f"{title} (*: first block exact)",
    )
    figure.savefig(path)
