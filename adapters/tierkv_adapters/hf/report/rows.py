"""Rows of the report: one for each chain; which one to take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierkv.chains import parse_chains
from tierkv_adapters.hf.report.coding import code, speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv_adapters.hf.report.fidelity import Subject

__all__ = ["Row", "measure", "recommend"]


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
