"""Workloads on which each predictor of prefetch has something to predict, or nothing."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.traces import Trace, TraceHeader, TraceRequest, open_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["agents", "books", "conversation", "questions", "shuffled"]

_BLOCK = 256
_CONVERSATION = "mooncake_fast25_conversation.jsonl.zst"


def conversation() -> Trace | None:
    """The conversation trace of Mooncake (FAST'25); None where it is not at hand.

    Looked for in ``$TIERKV_TRACES``, or in ``../shared/traces``.
    """
    folder = os.environ.get("TIERKV_TRACES") or "../shared/traces"
    path = Path(folder) / _CONVERSATION
    return open_trace(path).loaded() if path.exists() else None


def _request(
    time: float, session: str, keys: tuple[int, ...], stop_reason: str | None = None
) -> TraceRequest:
    return TraceRequest(time, session, "", keys, len(keys) * _BLOCK, 64, _BLOCK, stop_reason)


def _keys(owner: int, blocks: int) -> tuple[int, ...]:
    return tuple((owner << 20) + block for block in range(blocks))


def _trace(origin: str, requests: list[TraceRequest]) -> Trace:
    return Trace.of(TraceHeader(_BLOCK, origin=origin), requests)


def agents(sessions: int, turns: int, seed: int = 0) -> Trace:
    """Agents: after a tool call they come back soon, after the end of a turn late or never.

    Gaps are log-normal, with the medians and deciles of public traces of coding agents: 17 s (8 to
    90 s) after a tool call; 221 s (17 s to 50 min) after the end of a turn.
    """
    draw = random.Random(seed)
    out = []
    for number in range(sessions):  # about as many at a time, whatever their number
        now, blocks = draw.uniform(0, 48.0 * sessions), draw.randrange(16, 48)
        for _ in range(turns):
            tool = draw.random() < 0.85
            blocks += draw.randrange(1, 4)
            reason = "tool_use" if tool else "end_turn"
            out.append(_request(now, f"agent-{number}", _keys(number, blocks), reason))
            median, spread = (17.0, 0.7) if tool else (221.0, 1.9)
            now += median * math.exp(draw.gauss(0.0, spread))
    return _trace("agents", out)


def _store(count: int, blocks: int) -> Iterator[TraceRequest]:
    for book in range(count):
        yield _request(book * 0.5, f"store-{book}", _keys(1000 + book, blocks))


def books(count: int, blocks: int, readers: int, seed: int = 0) -> Trace:
    """Documents are stored; later each reader reads one of them, eight blocks at a time."""
    draw = random.Random(seed)
    out = list(_store(count, blocks))
    for reader in range(readers):
        book, now = draw.randrange(count), 600.0 + draw.uniform(0, 600)
        for upto in range(8, blocks + 1, 8):
            out.append(_request(now, f"reader-{reader}", _keys(1000 + book, upto)))
            now += draw.uniform(1.0, 3.0)
    return _trace("books", out)


def questions(count: int, blocks: int, askers: int, seed: int = 0) -> Trace:
    """Documents are stored; later each asker shows the beginning of one, and then all of it."""
    draw = random.Random(seed)
    out = list(_store(count, blocks))
    for asker in range(askers):
        book, now = draw.randrange(count), 600.0 + draw.uniform(0, 600)
        out.append(_request(now, f"asker-{asker}", _keys(1000 + book, 2)))
        now += draw.uniform(1.0, 3.0)
        out.append(_request(now, f"asker-{asker}", _keys(1000 + book, blocks)))
    return _trace("questions", out)


def shuffled(count: int, blocks: int, requests: int, seed: int = 0) -> Trace:
    """Requests for random lengths of random documents: there is nothing to predict."""
    draw = random.Random(seed)
    out = list(_store(count, blocks))
    for number in range(requests):
        keys = _keys(1000 + draw.randrange(count), draw.randrange(1, blocks + 1))
        out.append(_request(600.0 + number * 0.7, f"session-{draw.randrange(50)}", keys))
    return _trace("shuffled", out)
