"""Agent sessions of WEKA's kv-cache-tester, delta-coded: one JSON object a session.

``{"id": ..., "requests": [{"t": s, "in": tokens, "out": tokens, "stop": ..., "api_time": s,
"keep": n, "new": [[first, count], ...]}, {"type": "subagent", "requests": [...]}]}``: the blocks
of a request are the first ``keep`` of the same agent's request before it (a sub-agent's requests
stand between two of its caller's) and the runs of ``new``. Ids stand for 64 tokens and are local
to a session.

The recording has no absolute times: sessions begin spread evenly over some hours, drawn with a
seed. Blocks may be joined into larger ones, of which the incomplete last one is left out.
"""

from __future__ import annotations

import json
import random
from hashlib import blake2b
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.errors import TraceError
from tierkv.traces.events import MASK, MOST_BLOCKS, TraceRequest
from tierkv.traces.lines import read_lines, wrong_as

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BLOCK_TOKENS", "read_weka"]

BLOCK_TOKENS: Final = 64
_WHAT: Final = "an agent session"
_ODD: Final = 0x9E3779B97F4A7C15  # spreads small numbers over 64 bits


class _Begun(NamedTuple):
    """The next request of a session that has begun; sorted by time, then by session."""

    time: float
    session: int
    request: TraceRequest
    rest: Iterator[TraceRequest]


def read_weka(
    path: str, block_tokens: int = BLOCK_TOKENS, hours: float = 24.0, seed: int = 0
) -> Iterator[TraceRequest]:
    """The requests of all sessions, in order of arrival. A session is decoded when it begins.

    Args:
        path: The file.
        block_tokens: Tokens of a block; a multiple of 64.
        hours: Hours over which the sessions begin.
        seed: Of the drawing.

    Raises:
        TraceError: if a line is not such a session, or the block size does not fit.
    """
    if block_tokens < BLOCK_TOKENS or block_tokens % BLOCK_TOKENS:
        why = f"its blocks hold {BLOCK_TOKENS} tokens and cannot be joined to {block_tokens}"
        raise TraceError(path, 0, why)
    draw = random.Random(seed)
    waiting = [(draw.random() * hours * 3600, n, line) for n, line in read_lines(path)]
    waiting.sort(key=lambda item: item[:2], reverse=True)
    begun: list[_Begun] = []
    while waiting or begun:
        if waiting and (not begun or waiting[-1][0] <= begun[0].time):
            start, number, line = waiting.pop()
            _queue(begun, number, iter(_decode(path, number, line, start, block_tokens)))
            continue
        _, number, request, rest = heappop(begun)
        yield request
        _queue(begun, number, rest)


def _queue(begun: list[_Begun], number: int, rest: Iterator[TraceRequest]) -> None:
    request = next(rest, None)
    if request is not None:
        heappush(begun, _Begun(request.time, number, request, rest))


def _decode(
    path: str, number: int, line: bytes, start: float, block_tokens: int
) -> list[TraceRequest]:
    with wrong_as(path, number, _WHAT):
        row = json.loads(line)
        session = _Session(str(row["id"]), start, block_tokens)
        session.walk(row["requests"], "main")
        session.requests.sort(key=lambda request: request.time)
        return session.requests
    raise AssertionError  # pragma: no cover - the block returns or raises


class _Session:
    """One session while it is decoded."""

    def __init__(self, name: str, start: float, block_tokens: int) -> None:
        self.requests: list[TraceRequest] = []
        self._name = name
        self._base = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        self._start = start
        self._size = block_tokens
        self._step = block_tokens // BLOCK_TOKENS

    def walk(self, rows: list[dict[str, Any]], agent: str) -> None:
        """Decode the requests of one agent, and of those that it calls."""
        ids: list[int] = []
        for row in rows:
            if row["type"] == "subagent":
                self.walk(row["requests"], str(row.get("agent_id") or "sub"))
                continue
            keep = int(row["keep"])
            if not 0 <= keep <= len(ids):
                raise ValueError(f"a request keeps {keep} of {len(ids)} blocks")
            ids = ids[:keep]
            for first, count in row["new"]:
                if not 0 <= count <= MOST_BLOCKS - len(ids):
                    raise ValueError(f"a request of {count} more blocks than {len(ids)}")
                ids += [(self._base + i * _ODD) & MASK for i in range(first, first + count)]
            # an id stands for everything up to it: the last one of a larger block names that
            keys = tuple(ids[self._step - 1 :: self._step])
            if keys:
                self.requests.append(self._request(row, keys, agent))

    def _request(self, row: dict[str, Any], keys: tuple[int, ...], agent: str) -> TraceRequest:
        took = row.get("api_time")
        return TraceRequest(
            time=self._start + float(row["t"]),
            session=f"{self._name}/{agent}",
            tenant="",
            keys=keys,
            tokens=len(keys) * self._size,
            output_tokens=int(row["out"]),
            block_tokens=self._size,
            stop_reason=row.get("stop") or None,
            duration=None if took is None else float(took),
        )
