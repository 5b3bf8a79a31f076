"""Prompts: history is joined by ids and never rendered again; arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.errors import AttachError
from tierkv_adapters.chat.prompts import Deltas, encode_prompt
from tierkv_adapters.hf.arguments import expected_new_tokens

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = "<s>user\n{{ messages[-1]['content'] }}<e>\n<s>assistant\n"


def make_tokenizer(template: str | None = CHATML) -> Any:
    """Byte-level tokenizer with a beginning token and chat marks."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(["<b>", "<s>", "<e>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<b>", "<s>", "<e>")])
    inner.post_processor = processors.TemplateProcessing("<b> $A", special_tokens=[("<b>", 0)])
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=inner, bos_token="<b>", eos_token="<e>", additional_special_tokens=["<s>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def test_text_is_tokenised_alone_and_joined_by_ids() -> None:
    tokenizer = make_tokenizer()
    first = encode_prompt("ab", [], tokenizer)
    assert tokenizer.decode(first) == "<b>ab"
    second = encode_prompt("cd", first, tokenizer)
    assert second[: len(first)] == first
    assert tokenizer.decode(second) == "<b>abcd"
    assert encode_prompt("cd", first, tokenizer, append=False) == encode_prompt("cd", [], tokenizer)


def test_ids_are_the_whole_prompt_unless_appended() -> None:
    assert encode_prompt([7, 8], [1, 2], None) == [7, 8]
    assert encode_prompt([7, 8], [1, 2], None, append=True) == [1, 2, 7, 8]
    assert encode_prompt((7, 8), [], None) == [7, 8]


def test_a_chat_goes_on_exactly_as_the_template_would_render_it() -> None:
    tokenizer = make_tokenizer()
    first = encode_prompt("Hi", [], tokenizer, chat=True)
    assert tokenizer.decode(first) == "<s>user\nHi<e>\n<s>assistant\n"
    reply = tokenizer("Yo<e>", add_special_tokens=False)["input_ids"]
    cut = tokenizer("Yo", add_special_tokens=False)["input_ids"]  # stopped by max_new_tokens
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "More"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for said in (reply, cut):
        second = encode_prompt("More", first + said, tokenizer, chat=True)
        assert second[: len(first + said)] == first + said
        assert tokenizer.decode(second) == whole


@pytest.mark.parametrize("text", ["x", "assistant", "<e>", "tierkvmark"])
def test_chat_text_may_look_like_anything(text: str) -> None:
    tokenizer = make_tokenizer()
    history = encode_prompt("Hi", [], tokenizer, chat=True)
    ids = encode_prompt(text, history, tokenizer, chat=True)
    expected = f"<e>\n<s>user\n{text}<e>\n<s>assistant\n"
    assert tokenizer.decode(ids[len(history) :]) == expected


def test_templates_that_cannot_continue_are_refused() -> None:
    history = [5, 6]
    with pytest.raises(AttachError, match="drops earlier turns"):
        encode_prompt("x", history, make_tokenizer(FORGETFUL), chat=True)
    with pytest.raises(AttachError, match="no chat template"):
        encode_prompt("x", history, make_tokenizer(None), chat=True)
    with pytest.raises(AttachError, match="taken as they are"):
        encode_prompt([1], history, make_tokenizer(), chat=True)


def test_deltas_join_to_the_text_and_hold_back_half_characters() -> None:
    tokenizer = make_tokenizer()
    text = "né\nà la 🙂 ok"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    deltas = Deltas(tokenizer)
    pieces = [deltas.push(token) for token in [*ids, 2]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces
    assert Deltas(None).push(3) == ""


def test_memory_reserved_for_the_reply(llama: Any) -> None:
    assert expected_new_tokens(llama, {"max_new_tokens": 12}, 100) == 12
    assert expected_new_tokens(llama, {"max_new_tokens": 10**9}, 100) == 1024
    assert expected_new_tokens(llama, {"max_length": 130}, 100) == 30
    assert expected_new_tokens(llama, {"max_length": 50}, 100) == 0
