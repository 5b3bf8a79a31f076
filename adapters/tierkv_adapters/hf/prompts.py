"""From what a user passes to the token ids of a whole prompt.

A session's history is a list of token ids and is never rendered or tokenised again: new text is
tokenised alone and joined by ids. Otherwise a template that rewrites earlier turns, or a
tokenizer that merges across the seam, would silently invalidate the stored prefix.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from tierkv.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
) -> list[int]:
    """Return the ids of the whole prompt.

    Args:
        prompt: New text, or token ids (a sequence or a tensor of one row).
        history: Ids that the session has seen.
        tokenizer: Needed for text only.
        chat: Whether text is one user turn to be wrapped in the tokenizer's chat template.
        append: Whether the prompt goes on after ``history``; None: text does, token ids are the
            whole prompt.

    Raises:
        AttachError: if text comes without a tokenizer, a batch is passed, or nothing is.
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
    ids = history + new
    if not ids:
        raise AttachError("the prompt is empty: the model needs at least one token")
    return ids


def _ids(prompt: Any) -> list[int]:
    rows = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if rows and isinstance(rows[0], list | tuple):
        if len(rows) != 1:
            raise AttachError(
                f"a batch of {len(rows)} prompts is not supported yet: call generate once for each"
            )
        rows = list(rows[0])
    try:
        return [index(token) for token in rows]
    except TypeError as error:
        raise AttachError(f"token ids must be integers: {error}") from error


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
