"""Cache layers for Transformers that hold restored, pending and newly captured KV.

A sliding layer shows the model only the last ``window - 1`` tokens but keeps what it saw, so that
every block boundary can be stored. A layer may be *pending*: its length is known (masks and
positions are computed from it) while its bytes still travel. The first use of ``keys`` or
``values`` waits for its future. Thus layer 0 computes while layer n is being read.
"""

from __future__ import annotations

import copy
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tierkv.errors import AttachError, LayoutError
from tierkv_adapters.hf.buffer import KVBuffer, LayerKV
from tierkv_adapters.hf.compat import crop_is_absolute

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["TierLayer", "TierSlidingLayer", "make_layer"]


class TierLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Full-attention layer: growing buffer, pending restore, capture.

    Attributes:
        spec: Shape of this layer's KV.
        buffer: Its memory.
    """

    def __init__(self, spec: LayerKV, hint: int = 0, **kwargs: Any) -> None:
        """Make an empty layer; ``hint`` is how many tokens the first allocation holds at least."""
        self.spec = spec
        self.buffer = KVBuffer(spec, hint)
        self._length = 0
        self._pending: Future[None] | None = None
        self._stopped: Exception | None = None
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.device = spec.device
        self.dtype = getattr(torch, spec.k.dtype)

    # ------------------------------------------------------------- what Transformers reads

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys the next step attends to, ``[batch, heads, tokens, dim]``; waits for a restore."""
        return self._visible(0)

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._replace(0, tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """Values the next step attends to; waits for a restore."""
        return self._visible(1)

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._replace(1, tensor)

    def _first_visible(self) -> int:
        return 0

    def _visible(self, which: int) -> torch.Tensor | None:
        self.resolve()
        if not self.buffer.allocated:
            return None
        return self.buffer.span(which, self._first_visible(), self._length)

    def _replace(self, which: int, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.numel() == 0:
            if self._length:
                raise AttachError(
                    f"layer {self.spec.index}: remove tokens from this cache by reset() or crop()"
                )
            self.buffer.clear()
            return
        self.resolve()
        first = self._first_visible()
        if tensor.shape[-2] != self._length - first:
            raise AttachError(
                f"layer {self.spec.index}: this cache shows {self._length - first} tokens and "
                f"takes no tensor of shape {tuple(tensor.shape)}; use update() or crop()"
            )
        self.buffer.replace(which, first, self._length, tensor)

    # ------------------------------------------------------------- restore

    def restored(self, tokens: int, pending: Future[None] | None = None) -> None:
        """Declare tokens ``[.., tokens)`` present, now or once ``pending`` is done.

        Raises:
            LayoutError: if no memory was reserved for them, or tokens are held already.
        """
        if self._length or tokens > self.buffer.stop or not self.buffer.allocated:
            raise LayoutError(
                f"layer {self.spec.index}: cannot declare {tokens} tokens restored "
                f"(held {self._length}, room for {self.buffer.stop})"
            )
        self._length = tokens
        self._pending = pending
        self.is_initialized = True

    def resolve(self) -> None:
        """Wait until a pending restore is in place.

        Raises:
            Exception: whatever the future raised, unchanged, at every further use too; or the
                reason given to :meth:`stop`.
        """
        if self._stopped is not None:
            raise self._stopped
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def stop(self, reason: Exception) -> None:
        """Make every further use raise ``reason``: ends a forward pass at its next layer."""
        self._stopped = reason

    # ------------------------------------------------------------- what Transformers calls

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one step and return the keys and values that it attends to.

        Raises:
            LayoutError: if shape, dtype or device differ from what the layer holds.
            AttachError: if gradients are wanted.
        """
        self.resolve()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise AttachError("this cache keeps no gradients: run the model under torch.no_grad()")
        first = self._first_visible()
        past, stop = self._length, self._length + key_states.shape[-2]
        self.buffer.reserve(stop, held=past, batch=key_states.shape[0])
        self.buffer.write(0, past, key_states)
        self.buffer.write(1, past, value_states)
        self._length = stop
        self.is_initialized = True
        return self.buffer.span(0, first, stop), self.buffer.span(1, first, stop)

    def get_seq_length(self) -> int:
        """Tokens of the sequence so far; does not wait for a restore."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end; the argument means what this Transformers version says.

        Raises:
            ValueError: for a positive number where Transformers refuses it.
            RuntimeError: if a sliding layer no longer holds the window before the new end.
        """
        self.resolve()
        kept = self._length
        if crop_is_absolute() and tokens_to_remove >= 0:
            length = min(tokens_to_remove, kept)
        elif tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the tokens to remove as a negative number, not {tokens_to_remove}"
            )
        else:
            length = max(kept + tokens_to_remove, 0)
        self._length = length
        if self._first_visible() < self.buffer.base:
            self._length = kept
            raise RuntimeError(
                f"layer {self.spec.index}: cannot go back to token {length}: the window before it "
                f"starts below the first token held ({self.buffer.base})"
            )

    def reset(self) -> None:
        """Forget everything; waits for a pending restore, whose outcome no longer matters."""
        if self._pending is not None:
            wait([self._pending])
            self._pending = None
        self.buffer.clear()
        self._length = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the sequences for beam search."""
        self.resolve()
        self.buffer.each(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        self.resolve()
        self.buffer.each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some sequences."""
        self.resolve()
        self.buffer.each(lambda tensor: tensor[indices, ...])

    def __deepcopy__(self, memo: dict[int, Any]) -> TierLayer:
        self.resolve()  # a future cannot be copied, and the copy must not share its bytes
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin


class TierSlidingLayer(TierLayer, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Sliding-window layer: the model sees ``window - 1`` past tokens, the store sees them all."""

    def __init__(self, spec: LayerKV, hint: int = 0) -> None:
        if spec.window is None:
            raise LayoutError(f"layer {spec.index} has no sliding window")
        super().__init__(spec, hint, sliding_window=spec.window)

    @property
    def cumulative_length(self) -> int:
        """Tokens seen so far, also those outside the window."""
        return self._length

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        if value != self._length:
            raise AttachError("the length of this cache changes through update() and crop() only")

    def _first_visible(self) -> int:
        return max(0, self._length - self.sliding_window + 1)


def make_layer(spec: LayerKV, hint: int = 0) -> TierLayer:
    """Return the empty cache layer for one layer of a model; ``hint``: tokens to expect."""
    return TierLayer(spec, hint) if spec.window is None else TierSlidingLayer(spec, hint)
