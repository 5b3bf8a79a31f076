"""Checks of what a connector offers."""

from __future__ import annotations

from tierkv.testing.trtllm.bench import TOKENS, ConnectorBench
from tierkv.testing.trtllm.modes import Mode
from tierkv.testing.trtllm.requests import Item, Prompt
from tierkv.testing.trtllm.violations import Violation

__all__ = ["OfferTests"]


class OfferTests(ConnectorBench):
    """``get_num_new_matched_tokens``."""

    def test_nothing_is_not_loaded_asynchronously(self) -> None:
        """Where nothing is stored the offer is ``(0, False)``."""
        with self.replay(Mode()) as replay:
            assert self.store(replay, Prompt(TOKENS)).offered == 0

    def test_one_token_is_left(self) -> None:
        """A prompt that is stored whole is offered up to its last block: a token is computed."""
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS, 4), 20)
            self.again(replay, Prompt(TOKENS[:20]), 16)

    def test_offers_are_whole_blocks(self) -> None:
        """Behind a half block that the engine found itself, nothing is offered."""
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS), 20)
            assert self.store(replay, Prompt(TOKENS, on_device=6)).offered == 0

    def test_offers_are_behind_what_is_computed(self) -> None:
        """Blocks that the engine found itself are not offered again."""
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS), 20)
            device = 2 * self.block_tokens
            self.again(replay, Prompt(TOKENS, on_device=device), 20 - device)

    def test_offers_are_there(self) -> None:
        """Where another prompt parts from the stored one, the offer ends."""
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS), 20)
            self.again(replay, Prompt([*TOKENS[:10], *range(500, 520)]), 8)

    def test_salts_are_kept_apart(self) -> None:
        """Neither another salt nor none shares a block, in either API."""
        for api in ("first", "second"):
            with self.replay(Mode(api=api)) as replay:
                self.stored(replay, Prompt(TOKENS, salt="a"), 20)
                for salt in ("b", None):
                    assert self.store(replay, Prompt(TOKENS, salt=salt)).offered == 0

    def test_adapters_are_kept_apart(self) -> None:
        """Another LoRA adapter, or none, shares no block."""
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS), 20)
            assert self.store(replay, Prompt(TOKENS, lora=7)).offered == 0

    def test_media_are_kept_apart(self) -> None:
        """Equal placeholder tokens of another picture share no block from there on."""
        one, two = (Item(content, 5, 6) for content in (b"cat", b"dog"))
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS, media=(one,)), 20)
            other = self.store(replay, Prompt(TOKENS, media=(two,)))
            assert other.offered <= 4, "blocks with the picture in them"

    def test_matching_does_no_io(self) -> None:
        """The engine's tree of blocks is locked meanwhile: no I/O, no sleep, no waiting."""
        with self.replay(Mode()) as replay:
            replay.hooks.guarded = True
            self.stored(replay, Prompt(TOKENS), 20)
            self.store(replay, Prompt([*TOKENS, *range(700, 730)]))

    def test_matching_is_cheap(self) -> None:
        """A long prompt costs little more a block than a short one."""
        costs = []
        blocks = (32, 256)
        mode = Mode(layers=1, pages=1000)
        with self.replay(mode) as replay:
            replay.hooks.guarded = True
            for count in blocks:
                prompt = Prompt([7 + at % 11 for at in range(count * 4 + 1)])
                self.store(replay, prompt)
                self.store(replay, prompt)
                costs.append(max(replay.hooks.match_calls))
        each = (costs[1] - costs[0]) / (blocks[1] - blocks[0])
        if each > self.match_calls:
            raise Violation("match-cost", f"{each:.0f} calls a block, {self.match_calls} are fine")
