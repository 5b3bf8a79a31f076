"""Random schedules: requests that share prefixes come and go while pages are scarce."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tierkv.testing.serving.objects import Feature, Lora, Place, Prompt

if TYPE_CHECKING:
    from tierkv.testing.serving.replay import Replay

__all__ = ["Storm"]


class Storm:
    """A seeded run of many requests.

    Args:
        replay: What is driven.
        seed: Of all choices.
        longest: Most tokens of a prompt.
        aborts: Share of steps in which some request is aborted.
        resets: Share of steps in which the prefix cache is reset, running requests included.
        secrets: Whether requests differ in salt, adapter and media too.
    """

    def __init__(
        self,
        replay: Replay,
        seed: int,
        *,
        longest: int = 80,
        aborts: float = 0.05,
        resets: float = 0.01,
        secrets: bool = True,
    ) -> None:
        self._replay = replay
        self._random = random.Random(seed)
        self._longest = longest
        self._aborts = aborts
        self._resets = resets
        self._secrets = secrets
        self._stems = [[self._random.randrange(1000) for _ in range(longest)] for _ in range(3)]
        self.made = 0
        self.prompts: dict[str, Prompt] = {}

    def prompt(self) -> Prompt:
        """Another prompt: a stem's prefix and a tail of its own."""
        dice = self._random
        stem = dice.choice(self._stems)
        tokens = stem[: dice.randrange(1, self._longest)]
        tokens += [dice.randrange(1000) for _ in range(dice.choice((0, 0, 1, 9)))]
        tokens = tokens[: self._longest]
        salt, lora = None, None
        media: tuple[Feature, ...] = ()
        if self._secrets:
            salt = dice.choice((None, None, "a", "b"))
            lora = dice.choice((None, None, None, Lora("x"), Lora("y", 2, "/adapters/two")))
            if dice.random() < 0.2:
                name = dice.choice(("cat", "dog"))
                media = (Feature(name, Place(dice.randrange(len(tokens)), 1)),)
        return Prompt(
            tuple(tokens),
            max_tokens=dice.randrange(1, 12),
            salt=salt,
            lora=lora,
            media=media,
            skip_reading=dice.random() < 0.05,
        )

    def run(self, requests: int, *, together: int = 6) -> None:
        """Serve so many requests, ``together`` of them at a time, and drain.

        Raises:
            Violation: if the connector misbehaves.
        """
        replay, dice = self._replay, self._random
        while self.made < requests or replay.busy:
            alive = [
                name
                for name, request in replay.scheduler.requests.items()
                if request.status not in {"finished", "aborted"}
            ]
            if self.made < requests and len(alive) < together and dice.random() < 0.7:
                name = f"r{self.made}"
                self.made += 1
                self.prompts[name] = self.prompt()
                replay.add(name, self.prompts[name])
                alive.append(name)
            if alive and dice.random() < self._aborts:
                replay.abort(dice.choice(alive))
            loading = any(r.status == "loading" for r in replay.scheduler.requests.values())
            if not loading and dice.random() < self._resets:
                replay.reset(connector=dice.random() < 0.2)
            replay.step()
        replay.drain()
