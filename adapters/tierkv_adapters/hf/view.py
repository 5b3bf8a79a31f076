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


def _piece(
    held: TierLayer, tensor: str, start: int, stop: int
) -> tuple[tuple[int, torch.Tensor], ...]:
    if (start, stop) == (0, 1) and held.buffer.base > 0 and tensor in ("k", "v"):
        # Token 0 of a sliding layer may have left the window. Its shape can be asked for (a view
        # is checked against the layout that way), its bytes cannot: there are none.
        spec = held.spec.k if tensor == "k" else held.spec.v
        heads, dim = spec.shape
        dtype = getattr(torch, spec.dtype)
        return ((0, torch.empty((heads, 1, dim), dtype=dtype, device="meta")),)
    return ((start, held.buffer.piece(tensor, start, stop)),)


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
        return _piece(_layer(self._cache, layer), tensor, start, stop)

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
        return _piece(held, tensor, start, stop)
