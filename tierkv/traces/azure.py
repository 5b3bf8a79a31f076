"""The Azure LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens``, one row a request.

They tell arrivals and lengths only. No two requests share a block here: such a trace says what a
load of that rhythm costs, and nothing about hits.
"""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from tierkv.traces.events import MOST_BLOCKS, TraceRequest
from tierkv.traces.lines import read_lines, wrong_as

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HEADER", "read_azure"]

HEADER: Final = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_WHAT: Final = "a row of an Azure trace"


def read_azure(path: str, block_tokens: int = 64) -> Iterator[TraceRequest]:
    """The rows as requests, in order of arrival, each with blocks of its own.

    Raises:
        TraceError: if a row is malformed.
    """
    requests = []
    first: datetime | None = None
    for number, line in read_lines(path):
        if number == 1 and line.startswith(HEADER):
            continue
        with wrong_as(path, number, _WHAT):
            stamp, context, generated = next(csv.reader([line.decode()]))
            when = _parse(stamp)
            first = when if first is None else first
            tokens = int(context)
            blocks = -(-tokens // block_tokens)
            if tokens < 0 or blocks >= MOST_BLOCKS:
                raise ValueError(f"a prompt of {tokens} tokens")
            request = TraceRequest(
                time=(when - first).total_seconds(),
                session=str(number),
                tenant="",
                keys=tuple(range(number * MOST_BLOCKS, number * MOST_BLOCKS + blocks)),
                tokens=tokens,
                output_tokens=int(generated),
                block_tokens=block_tokens,
            )
        requests.append(request)
    requests.sort(key=lambda r: r.time)
    yield from requests


def _parse(stamp: str) -> datetime:
    # seven digits of a second, one more than the parser takes
    whole, _, digits = stamp.partition(".")
    when = datetime.fromisoformat(f"{whole}.{digits[:6]:0<6}" if digits.isdigit() else stamp)
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
