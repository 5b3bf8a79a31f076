"""What the checks of connectors share: how a connector is made, run and asked again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from tierkv.testing.trtllm.modes import MODES, Mode
from tierkv.testing.trtllm.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierkv.testing.trtllm.connector import Connector
    from tierkv.testing.trtllm.requests import Prompt, Request

__all__ = ["TOKENS", "ConnectorBench"]

TOKENS = list(range(1, 22))
"""A prompt of five blocks, of four tokens each, and one token."""


class ConnectorBench:
    """How a subclass says what is tested."""

    modes: ClassVar[Mapping[str, Mode]] = MODES
    """Modes the round trip is made in; every other check has a mode of its own."""
    layer_groups: ClassVar[bool] = True
    """Whether the connector claims to run with several layer groups."""
    block_tokens: ClassVar[int] = 4
    """Tokens of the connector's own blocks: a multiple of four, offers are multiples of it."""
    patience: ClassVar[int] = 20_000
    """Polls without progress after which a transfer counts as lost."""
    pause: ClassVar[float] = 0.002
    """Seconds between polls."""
    tries: ClassVar[int] = 400
    """How often a stored prompt is asked for before it counts as not stored."""
    schedules: ClassVar[int] = 3
    """Random schedules that are run."""
    match_calls: ClassVar[int] = 60
    """Most function calls that matching makes for each block of the prompt."""

    def make(self) -> Connector:
        """A connector that holds nothing yet."""
        raise NotImplementedError

    def replay(self, mode: Mode) -> Replay:
        """An engine with a new connector in it."""
        return Replay(self.make(), mode, patience=self.patience, pause=self.pause)

    def store(self, replay: Replay, prompt: Prompt) -> Request:
        """Run a request and let its saves end."""
        request = replay.run(prompt)
        replay.settle()
        return request

    def again(self, replay: Replay, prompt: Prompt, expected: int) -> Request:
        """Run a request that must be offered this many tokens, sooner or later.

        What was stored need not be ready to be loaded at once: it is asked for again, without
        being computed (so that nothing is stored by asking, where the API has room for that).
        """
        expected = expected // self.block_tokens * self.block_tokens
        for _ in range(self.tries):
            if self._asked(replay, prompt) >= expected:
                break
            time.sleep(self.pause)
        request = self.store(replay, prompt)
        seen = request.offered
        assert seen == expected, f"{seen} tokens offered of {expected} that are there"
        return request

    def _asked(self, replay: Replay, prompt: Prompt) -> int:
        if replay.mode.api == "first":
            return self.store(replay, prompt).offered
        request = replay.submit(replace(prompt, defer=1))
        replay.step()
        replay.abort(request)
        return request.offered

    def stored(self, replay: Replay, prompt: Prompt, expected: int) -> Request:
        """Store a prompt, and see that it is offered."""
        first = self.store(replay, prompt)
        self.again(replay, prompt, expected)
        return first
