"""Chat logs in the style of the OpenAI API: one JSON object a request, no tokenizer needed.

A line holds ``messages`` (at the top, or in ``body`` or ``request``) and perhaps the answer
(``choices``, at the top or in ``response``, ``response.body``), a time (``timestamp``, ``created``,
``created_at`` or ``time``: seconds or ISO 8601) and a session (``session``, ``session_id``,
``conversation_id`` or ``user``). Without times requests arrive a second apart; without sessions
they are inferred (:mod:`tierkv.traces.lineage`).

*What a block is*: the messages are written one after the other as role and content, in UTF-8, and
cut every 256 bytes, which are counted as 64 tokens; the incomplete block at the end is left out.
A real tokenizer gives other numbers of tokens, while what is shared by whom stays about the same.
An id is a digest of all text up to the end of its block: whoever has the text can recognise it.
"""

from __future__ import annotations

import json
from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from tierkv.traces.events import TraceRequest
from tierkv.traces.lineage import Lineage
from tierkv.traces.lines import read_json, wrong_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["BLOCK_BYTES", "BLOCK_TOKENS", "read_chat_log"]

BLOCK_BYTES: Final = 256
BLOCK_TOKENS: Final = 64
_PER_TOKEN: Final = BLOCK_BYTES // BLOCK_TOKENS
_WHAT: Final = "a request of a chat log"
_TIMES: Final = ("timestamp", "created", "created_at", "time")
_SESSIONS: Final = ("session", "session_id", "conversation_id", "user")
_INSIDE: Final = ("body", "request", "response")


def read_chat_log(path: str) -> Iterator[TraceRequest]:
    """The requests of a chat log, in order of arrival.

    Raises:
        TraceError: if a line holds no messages, or malformed ones.
    """
    lineage, requests = Lineage(), []
    first: float | None = None
    for number, row in read_json(path, _WHAT):
        with wrong_as(path, number, _WHAT):
            when = _time(row)
            when = float(number) if when is None else when
            first = when if first is None else first
            request = _request(row, when - first, lineage)
        requests.append(request)
    requests.sort(key=lambda r: r.time)
    yield from requests


def _request(row: dict[str, Any], time: float, lineage: Lineage) -> TraceRequest:
    messages = _find(row, "messages")
    if not isinstance(messages, list):
        raise TypeError("it has no list of messages")
    prompt = _render(messages)
    choices = _find(row, "choices") or []
    answer = [choice["message"] for choice in choices[:1]]
    reply = _render(answer)
    all_keys = _blocks(prompt + reply)
    keys, more = all_keys[: len(prompt) // BLOCK_BYTES], all_keys[len(prompt) // BLOCK_BYTES :]
    usage = _find(row, "usage") or {}
    name = next((row[key] for key in _SESSIONS if row.get(key) is not None), None)
    return TraceRequest(
        time=time,
        session=str(name) if name is not None else lineage.session(all_keys),
        tenant="",
        keys=keys,
        tokens=len(keys) * BLOCK_TOKENS,
        output_tokens=int(usage.get("completion_tokens", len(reply) // _PER_TOKEN)),
        block_tokens=BLOCK_TOKENS,
        stop_reason=choices[0].get("finish_reason") if choices else None,
        reply_keys=more,
    )


def _find(row: dict[str, Any], name: str) -> Any:
    """Field of the line, or of what was sent or answered in it."""
    if row.get(name) is not None:
        return row[name]
    inner = [row[key] for key in _INSIDE if isinstance(row.get(key), dict)]
    return next((found for part in inner if (found := _find(part, name)) is not None), None)


def _time(row: dict[str, Any]) -> float | None:
    for key in _TIMES:
        value = _find(row, key)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
        if value is not None:
            return float(value)
    return None


def _render(messages: Sequence[dict[str, Any]]) -> bytes:
    out = []
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else _plain(content)
        calls = _plain(message.get("tool_calls"))
        out.append(f"\0{message['role']}\0{text}{calls}")
    return "".join(out).encode()


def _plain(value: object) -> str:
    return "" if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _blocks(text: bytes) -> tuple[int, ...]:
    keys, key = [], b""
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        key = blake2b(key + block, digest_size=8, person=b"tierkv chat log").digest()
        keys.append(int.from_bytes(key, "little"))
    return tuple(keys)
