"""The traces of "Mooncake" (Qin et al., FAST'25): one JSON object a request.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``; an id
stands for a block of 512 tokens and everything before it, the last block may be partial. Sessions
are not named: they are inferred (:mod:`tierkv.traces.lineage`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.traces.events import TraceRequest
from tierkv.traces.lineage import Lineage
from tierkv.traces.lines import read_json, wrong_as

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BLOCK_TOKENS", "read_mooncake"]

BLOCK_TOKENS: Final = 512
_WHAT: Final = "a request of a Mooncake trace"


def read_mooncake(path: str) -> Iterator[TraceRequest]:
    """The requests of a Mooncake trace.

    Raises:
        TraceError: if a line is not such a request, or earlier than the one before it.
    """
    lineage, last = Lineage(), 0.0
    for number, row in read_json(path, _WHAT):
        with wrong_as(path, number, _WHAT):
            keys = tuple(map(int, row["hash_ids"]))
            tokens = int(row["input_length"])
            if not (len(keys) - 1) * BLOCK_TOKENS < max(tokens, 1) <= len(keys) * BLOCK_TOKENS:
                raise ValueError(f"{tokens} tokens do not make {len(keys)} blocks")
            time = row["timestamp"] / 1000
            if time < last:
                raise ValueError(f"it arrives at {time} s, after one of {last} s: sort them")
            last = time
            request = TraceRequest(
                time=time,
                session=lineage.session(keys),
                tenant="",
                keys=keys,
                tokens=tokens,
                output_tokens=int(row["output_length"]),
                block_tokens=BLOCK_TOKENS,
            )
        yield request
