"""What the demo asks: a chat that grows turn by turn, and a document that two readers ask about.

All text is drawn from a seed and grown to a length in tokens, so that prompts are as long as
intended whatever the tokenizer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CHAT_TOKENS", "DOCUMENT_TOKENS", "Ask", "Script", "write_script"]

CHAT_TOKENS = 1000
"""Least length of the first message of the chat."""
DOCUMENT_TOKENS = 1600
"""Least length of the document."""

_PLACES = ("harbour", "library", "orchard", "mill", "station", "museum", "quarry", "bakery")
_PEOPLE = ("Ada", "Bruno", "Chioma", "Dmitri", "Elif", "Farid", "Greta", "Hana", "Ines", "Jonas")
_THINGS = ("lamps", "chairs", "maps", "boats", "barrels", "books", "tools", "bells", "ladders")
_STATES = ("was repaired", "was lost", "was sold", "was painted", "was counted again", "was moved")
_TIMES = ("before noon", "after the storm", "in the first week", "at night", "during the fair")

_QUESTIONS = (
    "Thank you. Which of these places has to be visited first, and whom should I ask there?",
    "Good. Now I would like a short note for the people who could not come to the meeting. What "
    "should its first sentence say?",
    "One of them will be away for two weeks. Who could take over, and what do they have to know?",
    "Please compare the first two entries of the list: what do they have in common?",
    "Last point for today: which of the open questions can wait until the spring?",
)
_RETURNING = "I am back. What did we decide to do first?"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the demo.

    Attributes:
        label: How the table calls it.
        conversation: Requests that share a beginning have the same one.
        session: Session that it is asked in.
        text: New text.
    """

    label: str
    conversation: str
    session: str
    text: str


@dataclass(frozen=True, slots=True)
class Script:
    """Everything that is asked.

    Attributes:
        asks: In order, before the restart.
        returning: After the restart, as the next turn of the chat.
    """

    asks: tuple[Ask, ...]
    returning: Ask


def write_script(tokenizer: Any, seed: int, plain: bool) -> Script:
    """Write the script for one tokenizer.

    Args:
        tokenizer: Decides how much text makes a token.
        seed: Facts are drawn from it: the same seed gives the same script.
        plain: Whether to mark the speakers in the text, for models without a chat template.
    """
    draw = random.Random(seed)
    first = "Here are the notes of our meeting. " + _grow(tokenizer, _notes(draw), CHAT_TOKENS)
    chat = [first + " Which place is named first?", *_QUESTIONS]
    turns = [
        Ask(f"chat {number}", "chat", "chat", _say(text, plain, number > 1))
        for number, text in enumerate(chat, start=1)
    ]
    document = _grow(tokenizer, _chapters(draw), DOCUMENT_TOKENS)
    readers = [
        Ask(
            f"document {who}",
            "document",
            f"reader {who}",
            _say(f"{document}\n\n{question}", plain, False),
        )
        for who, question in (
            (1, "What is this book about?"),
            (2, "Who is named in the first chapter?"),
        )
    ]
    # the document in the middle pushes the chat out of memory, and the chat the document
    asks = (*turns[:3], readers[0], *turns[3:], readers[1])
    return Script(asks, Ask("after restart", "chat", "chat", _say(_RETURNING, plain, True)))


def _say(text: str, plain: bool, later: bool) -> str:
    return f"{chr(10) if later else ''}Question: {text}\nAnswer:" if plain else text


def _grow(tokenizer: Any, sentences: Iterator[str], tokens: int) -> str:
    """Join sentences until they make at least ``tokens`` tokens."""
    text, estimate = "", 0
    while estimate < tokens:
        sentence = next(sentences)
        text += sentence
        estimate += _count(tokenizer, sentence)
        if estimate >= tokens:  # counted apart they may be more tokens than together
            estimate = _count(tokenizer, text)
    return text


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _fact(draw: random.Random) -> str:
    amount = draw.randint(2, 90)
    return (
        f"{draw.choice(_PEOPLE)} reported that a part of the {amount} {draw.choice(_THINGS)} at "
        f"the {draw.choice(_PLACES)} {draw.choice(_STATES)} {draw.choice(_TIMES)}."
    )


def _notes(draw: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"({number}) {_fact(draw)} {draw.choice(_PEOPLE)} will look after it. "


def _chapters(draw: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        place = draw.choice(_PLACES)
        yield f"\n\nChapter {number}. Of the {place}.\n"
        for _ in range(6):
            yield f"{_fact(draw)} "
