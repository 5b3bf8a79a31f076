"""A chain for every layer and tensor: few bits where a model does not mind, more where it does.

Each part of a model's KV (some consecutive layers, keys or values) is stored by every candidate
chain while all the rest stays exact, and the KL of the next token is measured. Small errors of
different parts hardly meet, so that their KLs nearly add up (as sensitivities do in mixed-precision
quantisation of weights, e.g. HAWQ, Dong et al., arXiv 1905.03696): parts are then given fewer bits,
always where that costs the least KL for each bit, as long as the sum stays within the bound. What
comes out is measured as a whole, and tightened if it does more harm than the sum had told.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv_adapters.hf.report.coding import code
from tierkv_adapters.hf.report.rows import Row, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv_adapters.hf.report.fidelity import Subject

__all__ = ["CANDIDATES", "Choice", "Part", "allocate", "assign", "parts_of", "rules"]

CANDIDATES: Final = ("int8", "int6", "int4", "rot4", "rot3", "rot2")
"""Chains that parts are given by default."""
_TRIES: Final = 4
_MARGIN: Final = 0.9  # of what was asked for, when a sum turns out to have been too small

Pairs = list[tuple["torch.Tensor", "torch.Tensor"]]


class Part(NamedTuple):
    """Consecutive layers, and one of their tensors."""

    first: int
    last: int
    tensor: str


class Choice(NamedTuple):
    """What a chain does to one part: stored bits a number, and the KL that it causes alone."""

    chain: str
    bits: float
    kl: float


def parts_of(layers: int, pieces: int) -> list[Part]:
    """At most ``pieces`` runs of layers, as equal as they can be, keys and values apart."""
    count = min(pieces, layers)
    edges = [layers * i // count for i in range(count + 1)]
    return [
        Part(first, end - 1, tensor) for first, end in itertools.pairwise(edges) for tensor in "kv"
    ]


def assign(options: Sequence[Sequence[Choice]], sizes: Sequence[int], bound: float) -> list[Choice]:
    """One choice for each part: the fewest bits that greedy steps find within ``bound``.

    Args:
        options: Choices of each part.
        sizes: Numbers of each part.
        bound: Most sum of KLs; where even the truest choices exceed it, those are taken.
    """
    taken = [min(part, key=lambda c: (c.kl, c.bits)) for part in options]
    total = sum(choice.kl for choice in taken)
    while True:
        best: tuple[float, int, Choice] | None = None
        for i, part in enumerate(options):
            for choice in part:
                saved = (taken[i].bits - choice.bits) * sizes[i]
                harm = choice.kl - taken[i].kl
                if saved > 0 and total + harm <= bound:
                    worth = saved / max(harm, 1e-12)
                    if best is None or worth > best[0]:
                        best = worth, i, choice
        if best is None:
            return taken
        _, i, choice = best
        total += choice.kl - taken[i].kl
        taken[i] = choice


def rules(parts: Sequence[Part], chosen: Sequence[str]) -> str:
    """The rule chain that gives each part its chain; neighbours that agree are one rule.

    >>> rules([Part(0, 1, "k"), Part(2, 3, "k")], ["int8", "int8"])
    '0-3:K:int8'
    """
    texts: list[str] = []
    for tensor in sorted({part.tensor for part in parts}):
        runs: list[tuple[int, int, str]] = []
        for part, chain in zip(parts, chosen, strict=True):
            if part.tensor != tensor:
                continue
            if runs and runs[-1][2] == chain and runs[-1][1] + 1 == part.first:
                runs[-1] = runs[-1][0], part.last, chain
            else:
                runs.append((part.first, part.last, chain))
        texts += [f"{first}-{last}:{tensor.upper()}:{chain}" for first, last, chain in runs]
    return ",".join(texts)


def _try(kv: Pairs, subject: Subject, part: Part, chain: str) -> Choice:
    """Store one part by a chain, all the rest exactly."""
    place = "kv".index(part.tensor)
    tensors = [pair[place] for pair in kv[part.first : part.last + 1]]
    # a codec is told which tensor it has: the other place of each pair is stored raw
    done = code([(t, t) for t in tensors], f"{part.tensor}:{chain},*:raw")
    mixed = list(kv)
    for layer, pair in enumerate(done.kv, part.first):
        k, v = kv[layer]
        mixed[layer] = (pair[0], v) if place == 0 else (k, pair[1])
    raw_bits = 8 * tensors[0].dtype.itemsize
    return Choice(chain, 2 * done.bits - raw_bits, subject.compare(mixed).kl)


def allocate(
    kv: Pairs,
    subject: Subject,
    bound: float,
    *,
    candidates: Sequence[str] = CANDIDATES,
    pieces: int = 6,
) -> Row | None:
    """Find rules whose KL is within ``bound``, and measure them.

    Reads the scored text once for each part and candidate: ``2 * pieces * len(candidates)`` times.

    Args:
        kv: What is stored.
        subject: Judges what comes back.
        bound: Most KL of the next-token distribution, in nats.
        candidates: Chains that parts may get.
        pieces: Runs of layers that are told apart.

    Returns:
        The row of the rules; None if none was found within the bound.

    Raises:
        ConfigError: if there is no such chain.
    """
    parts = parts_of(len(kv), pieces)
    sizes = [
        sum(kv[i]["kv".index(p.tensor)].numel() for i in range(p.first, p.last + 1)) for p in parts
    ]
    options = [[_try(kv, subject, part, chain) for chain in candidates] for part in parts]
    asked = bound
    for _ in range(_TRIES):
        chosen = assign(options, sizes, asked)
        text = rules(parts, [c.chain for c in chosen])
        row = measure(kv, text, subject=subject, timed=False)
        if row.kl is not None and row.kl <= bound:
            return measure(kv, text, subject=subject)
        asked *= _MARGIN * bound / max(row.kl or bound, bound)
    return None
