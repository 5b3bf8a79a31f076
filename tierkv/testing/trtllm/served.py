"""A TensorRT-LLM connector as the adapter suite sees it: an engine that answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tierkv.testing.adapters import Answer, Ask
from tierkv.testing.trtllm.requests import Item, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.testing.trtllm.replay import Replay

__all__ = ["ServedReplay"]


class ServedReplay:
    """Serves the adapter suite's requests through the replay driver.

    The driver's own checks stay on: KV that is wrong fails where it is read.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Run requests side by side."""
        requests = self.replay.run_all([_prompt(ask) for ask in asks])
        return [
            Answer(tuple(request.tokens[len(ask.tokens) :]), request.offered)
            for ask, request in zip(asks, requests, strict=True)
        ]

    def expect(self, ask: Ask) -> None:
        """Ask what can be loaded, and drop the request before it has pages (second API)."""
        if self.replay.mode.api == "second":
            request = self.replay.submit(replace(_prompt(ask), defer=1))
            self.replay.step()
            self.replay.abort(request)

    def give_up(self, ask: Ask, steps: int) -> None:
        """Begin a request, and give it up after so many steps."""
        request = self.replay.submit(_prompt(ask))
        for _ in range(steps):
            self.replay.step()
        self.replay.abort(request)
        self.replay.finish([request])

    def settle(self) -> None:
        """Wait for saves, and for the connector to know of them."""
        self.replay.settle()

    def close(self) -> None:
        """Let go of the connector, once nothing is under way."""
        try:
            self.replay.settle()
        finally:
            self.replay.close()


def _prompt(ask: Ask) -> Prompt:
    media = (Item(ask.media, 4, 4),) if ask.media else ()
    return Prompt(ask.tokens, ask.max_tokens, ask.salt, ask.adapter or None, media)
