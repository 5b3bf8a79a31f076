"""The texts of the demo: long enough, mostly old, and the same for the same seed."""

from __future__ import annotations

from typing import Any

from tierkv_adapters.chat.prompts import encode_prompt
from tierkv_adapters.hf.demo.script import CHAT_TOKENS, DOCUMENT_TOKENS, write_script


def test_lengths(tokenizer: Any) -> None:
    script = write_script(tokenizer, 0, plain=True)
    chat = [ask for ask in script.asks if ask.conversation == "chat"]
    documents = [ask for ask in script.asks if ask.conversation == "document"]

    assert len(chat) >= 5
    assert len(tokenizer(chat[0].text)["input_ids"]) >= CHAT_TOKENS
    assert len(documents) == 2
    for ask in documents:
        assert len(tokenizer(ask.text)["input_ids"]) >= DOCUMENT_TOKENS
    assert len({ask.session for ask in documents}) == 2
    # something else is asked between the two, or the second would find it in RAM
    assert script.asks.index(documents[1]) - script.asks.index(documents[0]) > 2

    history: list[int] = []
    for ask in chat:
        ids = encode_prompt(ask.text, history, tokenizer)
        if history:
            assert len(ids) >= 1024
            assert len(ids) - len(history) < 0.2 * len(ids), "bytes: a fifth; words: a tenth"
        history = ids


def test_a_seed_gives_one_script(tokenizer: Any) -> None:
    one, same, other = (write_script(tokenizer, seed, plain=False) for seed in (3, 3, 4))

    assert one == same
    assert one.asks[0].text != other.asks[0].text
    assert one.asks[3].text[:80] != one.asks[0].text[:80]
