"""Agent traces derived from LMCache's agent traces: one JSON object a request.

``{"session": n, "t": s, "in_chars": n, "out_chars": n, "hash_ids": [...]}``; a block is 256
characters of the prompt, which are counted as 64 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.traces.events import TraceRequest
from tierkv.traces.lines import read_json, wrong_as

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BLOCK_TOKENS", "read_magagent"]

BLOCK_TOKENS: Final = 64
_CHARS: Final = 4  # counted as one token
_WHAT: Final = "a request of an agent trace"


def read_magagent(path: str) -> Iterator[TraceRequest]:
    """The requests, in order of arrival; the file lists them session by session.

    Raises:
        TraceError: if a line is not such a request.
    """
    requests = []
    for number, row in read_json(path, _WHAT):
        with wrong_as(path, number, _WHAT):
            keys = tuple(map(int, row["hash_ids"]))
            request = TraceRequest(
                time=float(row["t"]),
                session=str(row["session"]),
                tenant="",
                keys=keys,
                tokens=len(keys) * BLOCK_TOKENS,
                output_tokens=int(row["out_chars"]) // _CHARS,
                block_tokens=BLOCK_TOKENS,
            )
        requests.append(request)
    requests.sort(key=lambda r: r.time)
    yield from requests
