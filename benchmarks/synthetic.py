"""KV that looks like a model's, without a model."""

from __future__ import annotations

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, ``[heads, tokens, dim]``."""


def synthetic(layers: int = 16, heads: int = 8, tokens: int = 1024, dim: int = 128) -> Pairs:
    """KV with outlier channels in K and outlier tokens in V, as published models have them.

    64 MiB by default, more than caches hold: a copy of it runs at the speed of memory.
    """
    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source)

    pairs = []
    for _ in range(layers):
        scale = (0.7 * normal(heads, 1, dim)).exp()
        offset = normal(heads, 1, dim) * scale
        outlier = torch.rand((heads, 1, dim), generator=source) < 0.02
        offset = torch.where(outlier, offset * 20, offset)
        k = normal(heads, tokens, dim) * scale + offset
        v = normal(heads, tokens, dim) * (0.5 * normal(heads, tokens, 1)).exp()
        pairs.append((k.bfloat16(), v.bfloat16()))
    return pairs
