"""Views of a :class:`TierCache`: where a restore writes to, and where a store reads from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierkv.abc import View
from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tierkv_adapters.hf.cache import TierCache
    from tierkv_adapters.hf.layers import TierLayer

__all__ = ["CapturedView", "RestoreView"]


def _layer(cache: TierCache, index: int) -> TierLayer:
    if not 0 <= index < len(cache.tiers):
        raise LayoutError(f"the cache has {len(cache.tiers)} layers, there is no layer {index}")
    return cache.tiers[index]


def _sample(held: TierLayer, tensor: str) -> tuple[str, int, int]:
    # from the layout: token 0 of a sliding layer may have left the window
    if tensor not in ("k", "v"):
        raise LayoutError(f"a layer holds 'k' and 'v', not {tensor!r}")
    spec = held.spec.k if tensor == "k" else held.spec.v
    heads, dim = spec.shape
    return spec.dtype, heads, dim


def _anchor(cache: TierCache) -> torch.Tensor | None:
    """Any tensor of the cache; None for a model spread over devices, which is copied by torch."""
    found = [held.buffer.anchor for held in cache.tiers]
    known = [tensor for tensor in found if tensor is not None]
    return known[0] if len({tensor.device for tensor in known}) == 1 else None


class RestoreView(View):
    """Memory reserved by :meth:`TierCache.open_restore`.

    It belongs to the adapter, and nobody reads it before the cache declares it present. Token
    ranges below the window of a sliding layer are not backed by memory.
    """

    owned_by_engine = True

    def __init__(self, cache: TierCache, tokens: int) -> None:
        self.tokens = tokens
        self._cache = cache

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> tuple[tuple[int, torch.Tensor], ...]:
        """Memory of tokens ``[start, stop)``; see :meth:`View.pieces`."""
        if stop > self.tokens:
            raise LayoutError(f"tokens {start}..{stop}: this restore ends at {self.tokens}")
        return ((start, _layer(self._cache, layer).buffer.piece(tensor, start, stop)),)

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of a tensor."""
        return _sample(_layer(self._cache, layer), tensor)

    def anchor(self) -> torch.Tensor | None:
        """Any tensor of the cache: it tells on which device all of them are."""
        return _anchor(self._cache)

    def writing(self) -> AbstractContextManager[None]:
        """Inference mode: the buffers may be inference tensors, which only it can write."""
        return torch.inference_mode()


class CapturedView(View):
    """What the model has computed (and what was restored): tokens ``[0, captured)``."""

    owned_by_engine = True

    def __init__(self, cache: TierCache) -> None:
        self.tokens = cache.captured
        self._cache = cache

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> tuple[tuple[int, torch.Tensor], ...]:
        """Memory of tokens ``[start, stop)``; waits if the layer's restore is under way."""
        held = _layer(self._cache, layer)
        if stop > self.tokens:
            raise LayoutError(f"tokens {start}..{stop}: only {self.tokens} tokens were captured")
        held.resolve()
        return ((start, held.buffer.piece(tensor, start, stop)),)

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of a tensor."""
        return _sample(_layer(self._cache, layer), tensor)

    def anchor(self) -> torch.Tensor | None:
        """Any tensor of the cache: it tells on which device all of them are."""
        return _anchor(self._cache)
