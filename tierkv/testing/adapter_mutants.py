"""Engines whose adapter is wrong, each in one way: the suite must tell.

Every mutant names the check that is there for it.
"""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierkv.testing.adapter_references import BLOCK, FileEngine
from tierkv.testing.adapters import AdapterTests, Answer, Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MUTANTS", "Mutant", "failing_checks"]


class Mutant(NamedTuple):
    """A wrong engine and the check that must catch it."""

    engine: type[FileEngine]
    check: str


def failing_checks(engine: type[FileEngine], only: str = "test_") -> dict[str, str]:
    """Run the checks whose names begin with ``only`` on an engine; those that fail, and why."""

    class Case(AdapterTests):
        def make(self, root: Path) -> FileEngine:
            return engine(root)

    case, failed = Case(), {}
    for name in sorted(name for name in dir(case) if name.startswith(only)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                getattr(case, name)(Path(folder))
            except AssertionError as error:
                failed[name] = str(error)
    return failed


class Boasting(FileEngine):
    """Counts every prompt's first token as reused."""

    def serve(self, ask: Ask) -> Answer:
        answer = super().serve(ask)
        return answer._replace(reused=answer.reused or 1)


class Forgetful(FileEngine):
    """Stores everything and looks for nothing."""

    def limit(self, ask: Ask) -> int:
        return 0


class Greedy(FileEngine):
    """Reuses a whole prompt, and computes its last token as if it came once more."""

    def limit(self, ask: Ask) -> int:
        return len(ask.tokens) // BLOCK

    def compute(self, ask: Ask, tokens: Sequence[int], before: list[bytes]) -> list[bytes]:
        if before and len(before) == len(tokens) == len(ask.tokens):
            return [*before[:-1], super().compute(ask, (*tokens, tokens[-1]), before)[-1]]
        return super().compute(ask, tokens, before)


class PromptsOnly(FileEngine):
    """Stores no reply."""

    def store(self, ask: Ask, tokens: Sequence[int], states: list[bytes]) -> None:
        super().store(ask, ask.tokens, states)


class Shortsighted(FileEngine):
    """Names a block by where it is and how the prompt began."""

    def key(self, ask: Ask, tokens: Sequence[int]) -> str:
        return super().key(ask, (*tokens[:8], len(tokens) % 256))


class Unsalted(FileEngine):
    """Leaves the salt out of keys."""

    def salt(self, ask: Ask) -> object:
        return None


class Unadapted(FileEngine):
    """Leaves the adapter out of keys."""

    def adapter(self, ask: Ask) -> object:
        return None


class Blind(FileEngine):
    """Leaves media out of keys."""

    def media(self, content: bytes) -> object:
        return None


class Confused(FileEngine):
    """Gives requests of a batch each other's answers."""

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        return super().answer(asks)[::-1]


class Hasty(FileEngine):
    """Stores all of a request that was given up, computed or not."""

    def give_up(self, ask: Ask, steps: int) -> None:
        states = self.compute(ask, ask.tokens[: BLOCK * steps], [])
        missing = [bytes(32)] * (len(ask.tokens) - len(states))
        self.store(ask, ask.tokens, states + missing)


class Volatile(FileEngine):
    """Keeps its files where nobody finds them again."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / uuid.uuid4().hex)


class Trusting(FileEngine):
    """Takes whatever is there."""

    def whole(self, data: bytes) -> bool:
        return bool(data)


MUTANTS = [
    Mutant(Boasting, "test_new_prompts_are_computed"),
    Mutant(Forgetful, "test_repeats_reuse_and_answer_alike"),
    Mutant(Greedy, "test_prompts_of_whole_blocks"),
    Mutant(PromptsOnly, "test_the_next_turn_reuses_the_reply"),
    Mutant(Shortsighted, "test_prompts_that_part"),
    Mutant(Unsalted, "test_salts_are_kept_apart"),
    Mutant(Unadapted, "test_adapters_are_kept_apart"),
    Mutant(Blind, "test_media_are_kept_apart"),
    Mutant(Confused, "test_side_by_side"),
    Mutant(Hasty, "test_requests_are_given_up"),
    Mutant(Volatile, "test_restarts"),
    Mutant(Trusting, "test_damaged_files"),
]
