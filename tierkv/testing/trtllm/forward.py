"""The model: reads the KV before its tokens, layer by layer, and writes that of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierkv.testing.trtllm.memory import POISON
from tierkv.testing.trtllm.violations import Violation

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.testing.trtllm.allocation import Allocation
    from tierkv.testing.trtllm.memory import Memory
    from tierkv.testing.trtllm.modes import Mode
    from tierkv.testing.trtllm.requests import Request

__all__ = ["Model", "Scheduled"]


class Scheduled(NamedTuple):
    """Tokens ``[start, stop)`` of a request, computed in one step."""

    request: Request
    start: int
    stop: int


class Model:
    """Attention without arithmetic: KV is right, or the step fails."""

    def __init__(self, mode: Mode, memory: Memory, allocation: Allocation) -> None:
        self._mode = mode
        self._memory = memory
        self._allocation = allocation

    def run_layer(self, layer: int, batch: list[Scheduled]) -> None:
        """Run one layer on every rank.

        Raises:
            Violation: ``kv-wrong``: what the tokens attend to is not there.
        """
        for request, start, stop in batch:
            first = self._allocation.attended(self._group(layer), start)
            for rank in range(self._mode.ranks):
                self._expect("kv-wrong", rank, layer, request, first, start)
                self._write(rank, layer, request, start, stop)

    def place(self, request: Request, stop: int) -> None:
        """Put the KV of the tokens before ``stop`` in place: the engine's own blocks had it."""
        for layer in range(self._mode.layers):
            for rank in range(self._mode.ranks):
                self._write(rank, layer, request, 0, stop)

    def expect_loaded(self, rank: int, request: Request) -> None:
        """A rank says that a load is over.

        Raises:
            Violation: ``load-incomplete``.
        """
        stop = request.device + request.honoured
        for layer in range(self._mode.layers):
            first = max(request.device, self._allocation.attended(self._group(layer), stop))
            self._expect("load-incomplete", rank, layer, request, first, stop)

    def _expect(
        self, rule: str, rank: int, layer: int, request: Request, first: int, stop: int
    ) -> None:
        if first >= stop:
            return
        pages = request.pages[self._group(layer)]
        found = self._memory.rows(rank, layer, pages, first, stop)
        wanted = request.sequence.rows[rank][first:stop, layer]
        wrong = (found != wanted).flatten(1).any(1)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            token = first + at
            block = token // self._mode.tokens_per_block
            where = f"request {request.id}, token {token} (block {block}, page {pages[block]})"
            what = _describe(found[at])
            raise Violation(rule, f"rank {rank}, layer {layer}, {where} has {what}")

    def _write(self, rank: int, layer: int, request: Request, start: int, stop: int) -> None:
        rows = request.sequence.rows[rank][start:stop, layer]
        self._memory.write(rank, layer, request.pages[self._group(layer)], start, rows)

    def _group(self, layer: int) -> int:
        return layer % len(self._mode.windows)


def _describe(row: Tensor) -> str:
    if bool((row == POISON).all()):
        return "what the page held before it was given to the request"
    return "the KV of something else"
