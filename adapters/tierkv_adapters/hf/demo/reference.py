"""What restored replies are compared with: the same model with Transformers' own cache.

Nothing of the store is used here, only ``generate`` and ``DynamicCache``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from tierkv.errors import LayoutError
from tierkv_adapters.hf.compat import cache_keyword, input_device, text_config

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Memory", "Recorder", "Run", "common_prefix", "plain_run"]


class Run(NamedTuple):
    """One plain ``generate``.

    Attributes:
        output: Prompt and reply.
        ttft_s: Seconds to the first new token.
        cpu_s: Processor seconds of this process to the first new token.
    """

    output: list[int]
    ttft_s: float
    cpu_s: float


class Recorder(DynamicCache):
    """A ``DynamicCache`` that also keeps what went into it.

    Sliding layers forget; a cache that is resumed elsewhere in the sequence needs all of it.

    Attributes:
        seen: Per layer, the keys and values of each update, ``[1, heads, tokens, dim]``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(config=text_config(model))
        self.seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record and pass on; see ``DynamicCache.update``."""
        self.seen[layer_idx].append((key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Memory:
    """The in-memory KV of one conversation, resumable after any number of its tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids: list[int] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return self._layers[0][0].shape[-2] if self._layers else 0

    def shared(self, ids: Sequence[int]) -> int:
        """Leading tokens of a prompt whose KV is held."""
        return min(self.tokens, common_prefix(ids, self._ids))

    def absorb(self, output: Sequence[int], cache: Recorder, start: int = 0) -> None:
        """Let what ``cache`` has recorded take the place of everything from token ``start`` on.

        Args:
            output: Prompt and reply of the run that it has recorded.
            cache: The cache of that run.
            start: Tokens that it was resumed after.
        """
        layers = []
        for index, parts in enumerate(cache.seen):
            kept = [pair for pair in self._upto(index, start) if start]
            keys = [k for k, _ in (*kept, *parts)]
            values = [v for _, v in (*kept, *parts)]
            layers.append((torch.cat(keys, dim=-2), torch.cat(values, dim=-2)))
        self._layers = layers
        self._ids = list(output)

    def resume(self, tokens: int) -> Recorder:
        """Return a cache that holds the first ``tokens`` tokens, and records from there on.

        Raises:
            LayoutError: if that many are not held.
        """
        if not 0 < tokens <= self.tokens:
            raise LayoutError(f"cannot resume after {tokens} tokens: {self.tokens} are in memory")
        cache = Recorder(self._model)
        layers: list[Any] = cache.layers
        with torch.no_grad():
            for index, layer in enumerate(layers):
                ((keys, values),) = self._upto(index, tokens)
                # by the layer's own rule: a sliding one keeps only its window, as it would have
                layer.update(keys, values)
        return cache

    def _upto(self, index: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not tokens:
            return []
        keys, values = self._layers[index]
        return [(keys[:, :, :tokens], values[:, :, :tokens])]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), shared)


class _FirstToken:
    """Notes when the first new token came; Transformers' streamer protocol."""

    def __init__(self) -> None:
        self._prompt = True
        self.at: tuple[float, float] | None = None

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt once, then one token per step."""
        if not self._prompt and self.at is None:
            self.at = time.perf_counter(), time.process_time()
        self._prompt = False

    def end(self) -> None:
        """Receive the end of the reply."""


def plain_run(model: Any, ids: Sequence[int], new_tokens: int, cache: Any = None) -> Run:
    """Answer a prompt greedily without a store.

    Args:
        model: A Transformers model.
        ids: The whole prompt.
        new_tokens: Most tokens of the reply.
        cache: A cache that holds a proper prefix of the prompt; None starts from nothing.
    """
    tensor = torch.tensor([list(ids)], dtype=torch.long, device=input_device(model))
    given = {} if cache is None else {cache_keyword(model): cache}
    first = _FirstToken()
    start = time.perf_counter(), time.process_time()
    with torch.no_grad():
        output = model.generate(
            input_ids=tensor,
            attention_mask=torch.ones_like(tensor),
            streamer=first,
            max_new_tokens=new_tokens,
            do_sample=False,
            **given,
        )
    at = first.at or (time.perf_counter(), time.process_time())
    return Run(output[0].tolist(), at[0] - start[0], at[1] - start[1])
