"""Conformance suite for the connector of a serving engine.

A plug-in's test file subclasses it and says how to make the two sides over each rank's memory::

    class TestMine(ServingTests):
        def make(self, mode, memories):
            return MyScheduler(...), [MyWorker(memory) for memory in memories]

pytest then runs every check. What the checks must catch is shown by
:mod:`tierkv.testing.serving.mutants`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

from tierkv.testing.serving.objects import Feature, GroupSpec, Lora, Mode, Place, Prompt
from tierkv.testing.serving.replay import Replay
from tierkv.testing.serving.storms import Storm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.testing.serving.content import Memory

__all__ = ["ServingTests", "scarce"]


def _tokens(count: int, seed: int = 1) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(1000) for _ in range(count))


class ServingTests:
    """What every connector must do, whatever it stores."""

    modes: ClassVar[tuple[Mode, ...]] = (
        Mode(),
        Mode(ranks=2),
        Mode(chunk=12),
        Mode(overlap=True),
        Mode(drafts=2),
        Mode(groups=(GroupSpec(), GroupSpec(window=9))),
        Mode(prefix_caching=False),
    )
    """How the engine runs in the checks."""
    block: ClassVar[int] = 4
    """Tokens of a block: offers end at a multiple of it."""
    storms: ClassVar[int] = 3
    """Random schedules of each mode."""

    def make(self, mode: Mode, memories: Sequence[Memory]) -> tuple[Any, Sequence[Any]]:
        """Make the scheduler side and a worker side for each rank."""
        raise NotImplementedError

    def settle(self, replay: Replay) -> None:
        """Wait until what was saved can be found; the default: it can be at once."""

    def close(self, replay: Replay) -> None:
        """Take a replay's connector down."""

    def _replay(self, mode: Mode) -> Replay:
        return Replay(mode, lambda memories: self.make(mode, memories))

    def _again(self, mode: Mode, first: Prompt, second: Prompt) -> int:
        """Serve two prompts with the engine's own cache emptied between: tokens offered."""
        replay = self._replay(mode)
        try:
            replay.run(("first", first))
            self.settle(replay)
            replay.reset(connector=False)
            replay.run(("second", second))
            return replay.offered["second"]
        finally:
            self.close(replay)

    def test_a_prompt_comes_back(self) -> None:
        """In every mode, a prompt served before is offered up to its last whole block but one."""
        for mode in self.modes:
            tokens = _tokens(10 * self.block + 3)
            offered = self._again(mode, Prompt(tokens), Prompt(tokens))
            assert offered >= 9 * self.block, mode

    def test_a_prompt_of_whole_blocks_comes_back(self) -> None:
        """Where loads are asynchronous a prompt of whole blocks may be offered whole."""
        for mode in self.modes:
            tokens = _tokens(10 * self.block)
            assert self._again(mode, Prompt(tokens), Prompt(tokens)) >= 9 * self.block, mode

    def test_what_was_decoded_comes_back(self) -> None:
        """The next turn of a chat finds the reply of the last one."""
        mode, tokens = Mode(), _tokens(5 * self.block)
        replay = self._replay(mode)
        try:
            replay.run(("first", Prompt(tokens, max_tokens=3 * self.block)))
            turn = (*tokens, *replay.outputs["first"], *_tokens(5, seed=2))
            self.settle(replay)
            replay.reset(connector=False)
            replay.run(("second", Prompt(turn)))
            assert replay.offered["second"] >= 7 * self.block
        finally:
            self.close(replay)

    def test_an_own_hit_is_continued(self) -> None:
        """Where the engine holds the beginning of a prefix only the rest is loaded."""
        mode, tokens = Mode(), _tokens(10 * self.block)
        replay = self._replay(mode)
        try:
            replay.run(("first", Prompt(tokens)))
            self.settle(replay)
            replay.reset(connector=False)
            replay.run(("short", Prompt(tokens[: 4 * self.block + 1], skip_reading=True)))
            replay.run(("second", Prompt(tokens)))
            assert replay.scheduler.requests == {}
            assert 0 < replay.offered["second"] <= 6 * self.block
        finally:
            self.close(replay)

    def test_another_salt_finds_nothing(self) -> None:
        """``cache_salt`` reaches every key."""
        tokens = _tokens(10 * self.block)
        for salts in ((None, "a"), ("a", None), ("a", "b")):
            first, second = (Prompt(tokens, salt=salt) for salt in salts)
            assert self._again(Mode(), first, second) == 0

    def test_another_adapter_finds_nothing(self) -> None:
        """LoRA adapters reach every key: their names, and the content of their files."""
        tokens = _tokens(10 * self.block)
        one, two = Lora("one"), Lora("two", 2, "/adapters/two")
        newer = Lora("one", 3, "/adapters/one", version="2")
        for pair in ((None, one), (one, None), (one, two), (one, newer)):
            first, second = (Prompt(tokens, lora=lora) for lora in pair)
            assert self._again(Mode(), first, second) == 0

    def test_other_media_find_nothing_behind_them(self) -> None:
        """Images share placeholder tokens: blocks from the image on are found by content."""
        tokens, place = _tokens(10 * self.block), Place(4 * self.block, 2)
        cat, dog = (Prompt(tokens, media=(Feature(name, place),)) for name in ("cat", "dog"))
        assert self._again(Mode(), cat, dog) <= 4 * self.block
        assert self._again(Mode(), cat, cat) >= 9 * self.block

    def test_what_cannot_be_shared_is_not_offered(self) -> None:
        """Pooling requests, embeddings, and requests that skip reading."""
        tokens = _tokens(10 * self.block)
        for odd in (
            Prompt(tokens, pooling=True),
            Prompt(tokens, embeds=True),
            Prompt(tokens, skip_reading=True),
        ):
            assert self._again(Mode(), Prompt(tokens), odd) == 0

    def test_aborts_in_every_state(self) -> None:
        """Wherever a client goes away, pages come back and nothing is reported twice."""
        for mode in self.modes:
            for at in range(7):
                replay = self._replay(mode)
                try:
                    tokens = _tokens(10 * self.block)
                    replay.run(("first", Prompt(tokens)))
                    self.settle(replay)
                    replay.reset(connector=False)
                    replay.add("second", Prompt(tokens))
                    for _ in range(at):
                        replay.step()
                    replay.abort("second")
                    replay.run(("third", Prompt(tokens)))
                finally:
                    self.close(replay)

    def test_storms(self) -> None:
        """Random schedules with scarce pages: preemption, aborts, resets, shared prefixes."""
        for number, mode in enumerate(self.modes):
            for seed in range(self.storms):
                replay = self._replay(scarce(mode, self.block))
                try:
                    Storm(replay, 100 * number + seed, longest=20 * self.block).run(25)
                finally:
                    self.close(replay)


def scarce(mode: Mode, block: int) -> Mode:
    """The mode, with pages for about three of the longest requests of a storm of such blocks."""
    pages = 1 + 3 * len(mode.groups) * -(-(20 * block + 16) // mode.groups[0].page_tokens)
    return Mode(**{**mode.__dict__, "pages": pages, "chunk": min(mode.chunk, 6 * block)})
