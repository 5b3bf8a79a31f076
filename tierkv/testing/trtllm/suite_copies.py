"""Checks of how a connector loads and saves."""

from __future__ import annotations

from tierkv.testing.trtllm.bench import TOKENS, ConnectorBench
from tierkv.testing.trtllm.modes import Mode
from tierkv.testing.trtllm.requests import Prompt

__all__ = ["LoadTests", "SaveTests"]

_LONG = list(range(100, 141))


class LoadTests(ConnectorBench):
    """What comes back is what was there."""

    def test_round_trip(self) -> None:
        """In every mode: the same prompt, its continuation, and one that parts from it."""
        for mode in self.modes.values():
            if len(mode.windows) > 1 and not self.layer_groups:
                continue
            with self.replay(mode) as replay:
                first = self.stored(replay, Prompt(TOKENS, 9), 20)
                again = self.again(replay, Prompt(first.tokens, 3), 28)
                assert again.tokens[: len(first.tokens)] == first.tokens
                other = Prompt([*TOKENS[:10], *range(500, 520)], 2)
                assert self.store(replay, other).offered <= 8
                self.again(replay, other, 28)

    def test_loads_are_over_when_reported(self) -> None:
        """An id comes back from a rank once that rank's pages are filled."""
        with self.replay(Mode(ranks=2)) as replay:
            self.stored(replay, Prompt(_LONG), 40)

    def test_ranks_keep_their_own(self) -> None:
        """Each of four ranks gets back what it stored."""
        with self.replay(Mode(ranks=4)) as replay:
            self.stored(replay, Prompt(TOKENS, 3), 20)

    def test_layer_groups_are_kept_apart(self) -> None:
        """The same tokens have other KV in each layer group."""
        if self.layer_groups:
            with self.replay(Mode(pool="grouped", windows=(None, None))) as replay:
                self.stored(replay, Prompt(TOKENS, 3), 20)

    def test_pages_that_are_not_there(self) -> None:
        """Page -1 is never read or written: behind a window there is no memory."""
        if self.layer_groups:
            with self.replay(Mode(pool="grouped", windows=(None, 9))) as replay:
                first = self.stored(replay, Prompt(_LONG, 9), 40)
                self.again(replay, Prompt(first.tokens, 2), 48)

    def test_loads_in_one_step(self) -> None:
        """Several requests that begin at once get each their own."""
        prompts = [Prompt(range(at, at + 21), 2) for at in (1000, 2000, 3000)]
        with self.replay(Mode()) as replay:
            for prompt in prompts:
                self.stored(replay, prompt, 20)
            requests = replay.run_all(prompts)
            replay.settle()
            assert any(request.offered for request in requests)


class SaveTests(ConnectorBench):
    """What is stored is what was computed."""

    def test_decoded_blocks_are_saved(self) -> None:
        """Blocks that generated tokens filled are offered to the next turn."""
        with self.replay(Mode()) as replay:
            first = self.store(replay, Prompt(TOKENS, 20))
            self.again(replay, Prompt(first.tokens), 40)

    def test_only_what_is_computed_is_saved(self) -> None:
        """Tokens that are known are not yet computed: prefill comes in chunks."""
        with self.replay(Mode(chunk=8, overlap=True)) as replay:
            self.stored(replay, Prompt(_LONG, 4), 40)

    def test_pages_that_come_later(self) -> None:
        """With layer groups pages come chunk by chunk, in ``cached_requests``."""
        with self.replay(Mode(pool="grouped", chunk=8)) as replay:
            self.stored(replay, Prompt(_LONG, 4), 40)

    def test_cuda_graphs(self) -> None:
        """No layer hook fires while a graph is replayed; decoded blocks are saved all the same."""
        with self.replay(Mode(cuda_graphs=True)) as replay:
            first = self.store(replay, Prompt(TOKENS, 20))
            self.again(replay, Prompt(first.tokens), 40)

    def test_the_model_ends_by_itself(self) -> None:
        """Under overlap one more step was launched by then; its token is nobody's."""
        with self.replay(Mode(overlap=True)) as replay:
            first = self.store(replay, Prompt(TOKENS, 30, eos_after=12))
            assert len(first.tokens) == len(TOKENS) + 12
            self.again(replay, Prompt([*first.tokens, 9]), 32)

    def test_pages_are_held_while_saved(self) -> None:
        """``request_finished`` says that copies out of the pages are under way."""
        with self.replay(Mode()) as replay:
            self.stored(replay, Prompt(TOKENS), 20)

    def test_saves_are_over_when_reported(self) -> None:
        """An id comes back from a rank once nothing reads that rank's pages."""
        with self.replay(Mode(ranks=2)) as replay:
            self.stored(replay, Prompt(_LONG), 40)

    def test_idle_engines_finish_saves(self) -> None:
        """No metadata comes any more once the last request is over."""
        with self.replay(Mode()) as replay:
            self.store(replay, Prompt(TOKENS, 4))

    def test_pages_that_a_window_left(self) -> None:
        """They are given to others at once: a save out of them is over by the next step."""
        if not self.layer_groups:
            return
        mode = Mode(pool="grouped", windows=(None, 5), chunk=8)
        with self.replay(mode) as replay:
            prompts = [Prompt(range(at, at + 41), 5) for at in (1000, 2000)]
            replay.run_all(prompts)
            replay.settle()
            for prompt in prompts:
                self.again(replay, prompt, 40)
                self.again(replay, Prompt(prompt.tokens[:23]), 20)
