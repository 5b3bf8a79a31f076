"""The cache object that is handed to ``forward`` and ``generate``; the model stays untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.cache_utils import Cache, DynamicCache

from tierkv.errors import LayoutError
from tierkv_adapters.hf.layers import make_layer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from tierkv_adapters.hf.buffer import LayerKV

__all__ = ["TierCache"]


class TierCache(DynamicCache):
    """KV of one sequence: restored from a store, then grown by the model.

    Life of one request: :meth:`open_restore` reserves memory, a view writes into it, then
    :meth:`restored` (everything in place) or :meth:`restoring` (one future per layer) makes it
    count. A failed restore leaves an untouched, empty cache in the first case; in the second the
    first use of the layer raises and the whole object must be dropped.

    Attributes:
        prefix: Tokens that came from the store.
        tiers: The layers again, under their own type.
    """

    def __init__(self, specs: Sequence[LayerKV], reserve: int = 0) -> None:
        """Make an empty cache.

        Args:
            specs: One entry per layer.
            reserve: Tokens for which memory is taken at once, when it is first needed.
        """
        if [spec.index for spec in specs] != list(range(len(specs))):
            raise LayoutError("layer specs must be complete and in the model's order")
        layers = [make_layer(spec, reserve) for spec in specs]
        # DynamicCache builds its own layers from a config; only its type is wanted here, because
        # Transformers tests for it before it crops or repeats a cache
        Cache.__init__(self, layers=list(layers))
        self.tiers = layers
        self.prefix = 0

    def open_restore(self, tokens: int, block_tokens: int) -> None:
        """Reserve memory for a prefix; nothing counts as present yet.

        Sliding layers get memory for their last ``window - 1`` tokens, rounded down to a block.

        Raises:
            LayoutError: if the cache is not empty.
        """
        if self.get_seq_length():
            raise LayoutError("a prefix can be restored into an empty cache only")
        for layer in self.tiers:
            base = 0
            if layer.spec.window is not None:
                needed = max(0, tokens - layer.spec.window + 1)
                base = needed // block_tokens * block_tokens
            layer.buffer.reserve(tokens, base=base)

    def restored(self, tokens: int) -> None:
        """Declare the prefix verified and in place."""
        for layer in self.tiers:
            layer.restored(tokens)
        self.prefix = tokens

    def restoring(self, tokens: int, arrivals: Mapping[int, Future[None]]) -> None:
        """Declare the prefix's length; each layer waits for its own arrival at its first use."""
        for layer in self.tiers:
            layer.restored(tokens, arrivals[layer.spec.index])
        self.prefix = tokens

    def stop(self, reason: Exception) -> None:
        """Make every further use raise ``reason``; the way to end a generation from outside."""
        for layer in self.tiers:
            layer.stop(reason)

    @property
    def captured(self) -> int:
        """Tokens that every layer holds: what can be stored is ``[prefix, captured)``."""
        return min((layer.get_seq_length() for layer in self.tiers), default=0)
