"""From what a user passes to the token ids of a whole prompt.

A session's history is a list of token ids and is never rendered or tokenised again: new text is
tokenised alone and joined by ids. Otherwise a template that rewrites earlier turns, or a
tokenizer that merges across the seam, would silently invalidate the stored prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from tierkv.errors import AttachError

__all__ = ["Deltas", "encode_prompt"]

# stands for an earlier reply when a later turn is rendered; no template transforms it
_MARK = "tierkvmark"


def encode_prompt(
    prompt: str | Sequence[int],
    history: Sequence[int],
    tokenizer: Any,
    *,
    chat: bool = False,
    append: bool | None = None,
    vocabulary: int | None = None,
) -> list[int]:
    """Return the ids of the whole prompt.

    Args:
        prompt: New text, or token ids (a sequence or a tensor of one row).
        history: Ids that the session has seen.
        tokenizer: Needed for text only.
        chat: Whether text is one user turn to be wrapped in the tokenizer's chat template.
        append: Whether the prompt goes on after ``history``; None: text does, token ids are the
            whole prompt.
        vocabulary: Number of ids that the model knows; None does not check.

    Raises:
        AttachError: if text comes without a tokenizer, a batch is passed, or nothing is; if it is
            neither text nor ids, or an id is none of the model's.
    """
    text = isinstance(prompt, str)
    history = list(history) if (text if append is None else append) else []
    if isinstance(prompt, str):
        if tokenizer is None:
            raise AttachError("text needs a tokenizer: attach(model, engine, tokenizer=...)")
        new = (
            _encode_chat(prompt, history, tokenizer) if chat else _plain(prompt, history, tokenizer)
        )
    elif chat:
        raise AttachError("chat=True renders text; token ids are taken as they are")
    else:
        new = _ids(prompt)
    _check_range(new, vocabulary, text)
    ids = history + new
    if not ids:
        raise AttachError("the prompt is empty: the model needs at least one token")
    return ids


def _ids(prompt: Any) -> list[int]:
    rows = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(rows, Sequence) or isinstance(rows, bytes | bytearray | memoryview):
        # a set has no order, a generator can be read once only, bytes are some encoding's
        hint = "; pass its 'input_ids'" if hasattr(prompt, "keys") else ""
        raise AttachError(
            f"a prompt is text, or a list or tensor of token ids, not {type(prompt).__name__}{hint}"
        )
    if rows and isinstance(rows[0], list | tuple):
        if len(rows) != 1:
            raise AttachError(
                f"a batch of {len(rows)} prompts is not supported yet: call generate once for each"
            )
        rows = rows[0]
    return [_id(token, place) for place, token in enumerate(rows)]


def _id(token: Any, place: int) -> int:
    # True is an int to Python: a mask passed for ids would go unnoticed
    if not isinstance(token, bool):
        try:
            return index(token)
        except TypeError:
            pass
    raise AttachError(f"token ids must be integers, not {token!r} (at index {place})")


def _check_range(ids: Sequence[int], vocabulary: int | None, text: bool) -> None:
    if not ids or vocabulary is None or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    place = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
    hint = "; is this the model's own tokenizer?" if text else ""
    raise AttachError(
        f"token id {ids[place]} (at index {place}) is none of this model's: it knows 0 to "
        f"{vocabulary - 1}{hint}"
    )


def _plain(text: str, history: Sequence[int], tokenizer: Any) -> list[int]:
    # a beginning-of-text token belongs to the first turn only
    ids: list[int] = tokenizer(text, add_special_tokens=not history)["input_ids"]
    return list(ids)


def _encode_chat(text: str, history: Sequence[int], tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise AttachError("this tokenizer has no chat template: pass chat=False, or set one")
    user = {"role": "user", "content": text}
    if not history:
        whole = _render(tokenizer, [user])
        return list(tokenizer(whole, add_special_tokens=False)["input_ids"])
    # what a template puts between the end of a reply and the next reply, whatever came before
    mark = _MARK
    while mark in text:
        mark += "x"
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
    _, found, rest = _render(tokenizer, [*before, user]).rpartition(mark)
    if not found or text not in rest:
        raise AttachError("this chat template drops earlier turns and cannot continue a session")
    ids: list[int] = list(tokenizer(rest, add_special_tokens=False)["input_ids"])
    # the reply's own end token is in the history already if the model emitted it
    if ids and ids[0] == history[-1] and ids[0] in tokenizer.all_special_ids:
        ids = ids[1:]
    return ids


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    rendered: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return rendered


class Deltas:
    """Turns tokens into pieces of text as they come; holds back what is not yet a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """Return the text that ``token`` adds; empty while a character is incomplete."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        if text.endswith("\n"):  # nothing later can change a finished line: keeps decoding short
            self._ids, self._shown = [], 0
        return piece
