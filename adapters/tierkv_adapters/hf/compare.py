"""Comparing replies: the one rule for when a differing token is excused.

A restored cache equals the in-memory cache bit for bit at the same split. Against *one single
pass* over the whole prompt it may differ by rounding (fp32: about 1e-5 in the logits), so a token
may flip where the two best logits are closer than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tierkv_adapters.hf.compat import input_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MARGIN", "Comparison", "compare_tokens"]

MARGIN = 1e-3
"""Top-2 logit margin of the reference below which a differing token is excused."""


class Comparison(NamedTuple):
    """Outcome of a comparison.

    Attributes:
        identical: Whether the two sequences are equal.
        excused: Whether they differ, but first at a token that the margin rule excuses.
        position: Index of the first differing token, or None.
        margin: Top-2 logit margin of the reference there, or None.
    """

    identical: bool
    excused: bool
    position: int | None = None
    margin: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the sequences count as the same."""
        return self.identical or self.excused


@torch.no_grad()
def compare_tokens(
    model: Any,
    reference: Sequence[int],
    other: Sequence[int],
    report: Callable[[str], None] = print,
) -> Comparison:
    """Compare a reply with a reference made by ``model``; says so when it excuses a difference.

    What follows the first differing token is not compared: it answers another text.

    Args:
        model: The model that made the reference; runs once over the shared prefix if needed.
        reference: Token ids, prompt and reply.
        other: Token ids to judge.
        report: Receives one line when a difference is excused.
    """
    if list(reference) == list(other):
        return Comparison(identical=True, excused=False)
    shared = min(len(reference), len(other))
    position = next((i for i in range(shared) if reference[i] != other[i]), shared)
    if position == shared or position == 0:
        # one ends where the other goes on, or nothing is shared: no logits could excuse that
        return Comparison(identical=False, excused=False, position=position)
    ids = torch.tensor([list(reference[:position])], device=input_device(model))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    best = logits[0, -1].float().topk(2)
    margin = float(best.values[0] - best.values[1])
    # the flip must be between the two best: anything else is not rounding
    pair = {int(token) for token in best.indices}
    excused = margin < MARGIN and {reference[position], other[position]} <= pair
    if excused:
        report(
            f"excused: token {position} is {other[position]} instead of {reference[position]}; "
            f"the reference's top-2 logit margin there is {margin:.1e} < {MARGIN:.0e}"
        )
    return Comparison(identical=False, excused=excused, position=position, margin=margin)
