"""How much a model's predictions change when its prefix comes back from a lossy chain.

A prefix is computed once; then the model reads on over further text, once on its own KV and once
on what came back, and the two distributions of the next token are compared at every position.
"""

from __future__ import annotations

import pydoc_data.topics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from tierkv.errors import LayoutError
from tierkv_adapters.hf.compat import cache_keyword, input_device

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Fidelity", "Subject", "default_text"]

_SLICE = 64  # positions compared at once: vocabularies are large


class Fidelity(NamedTuple):
    """Change of the next-token distribution, over all scored positions.

    Attributes:
        kl: Mean Kullback-Leibler divergence from the exact distribution, in nats.
        top1: Share of positions whose most likely token is the same.
        dnll: Change of the mean negative log-likelihood of the text, in nats.
        max_dlogit: Largest change of any logit.
    """

    kl: float
    top1: float
    dnll: float
    max_dlogit: float


def default_text() -> str:
    """English prose that every Python carries: the reference documentation behind ``help()``."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


class Subject:
    """A model, the KV of a prefix, and its exact predictions for the text after it.

    Attributes:
        kv: One pair a layer, ``[heads, prefix, dim]``, in the model's dtype, on the CPU.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, ids: Sequence[int], prefix: int) -> None:
        """Compute the prefix and the reference.

        Raises:
            LayoutError: if no text is left to score.
        """
        if not 0 < prefix < len(ids) - 1:
            raise LayoutError(f"a prefix of {prefix} tokens leaves nothing of {len(ids)} to score")
        self.model = model
        self._keyword = cache_keyword(model)
        self._ids = torch.tensor([list(ids)], device=input_device(model))
        self._prefix = prefix
        cache = DynamicCache()  # keeps all tokens, also of sliding layers
        self._forward(self._ids[:, :prefix], cache)
        layers: list[Any] = cache.layers
        self.kv = [(layer.keys[0].cpu().clone(), layer.values[0].cpu().clone()) for layer in layers]
        self._exact = self._scored(self.kv)

    def _forward(self, ids: torch.Tensor, cache: DynamicCache) -> Any:
        return self.model(ids, use_cache=True, **{self._keyword: cache})

    def _scored(self, kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        cache = DynamicCache()
        for index, (k, v) in enumerate(kv):
            own = self.kv[index][0]
            cache.update(
                k.to(own.dtype).to(self._ids.device)[None],
                v.to(own.dtype).to(self._ids.device)[None],
                index,
            )
        logits: torch.Tensor = self._forward(self._ids[:, self._prefix :], cache).logits[0].float()
        return logits

    @torch.inference_mode()
    def compare(self, kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Fidelity:
        """Read on from other KV of the same prefix and compare."""
        found = self._scored(kv)
        following = self._ids[0, self._prefix + 1 :]
        kl = same = nll = largest = 0.0
        for at in range(0, len(found), _SLICE):
            exact, other = (t[at : at + _SLICE] for t in (self._exact, found))
            largest = max(largest, float((exact - other).abs().max()))
            same += float((exact.argmax(-1) == other.argmax(-1)).sum())
            p, q = exact.log_softmax(-1), other.log_softmax(-1)
            kl += float((p.exp() * (p - q)).sum())
            index = following[at : at + _SLICE, None]
            change = p[: len(index)].gather(1, index) - q[: len(index)].gather(1, index)
            nll += float(change.sum())
        return Fidelity(kl / len(found), same / len(found), nll / len(following), largest)
