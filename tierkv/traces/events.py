"""What a workload trace consists of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["BYTES_PER_TOKEN", "MASK", "MOST_BLOCKS", "Trace", "TraceHeader", "TraceRequest"]

BYTES_PER_TOKEN: Final = 128 * 1024
"""KV of one token of an 8B-class model with grouped-query attention in 16 bits."""

MASK: Final = (1 << 64) - 1
"""Ids of blocks are unsigned 64-bit numbers."""

MOST_BLOCKS: Final = 1 << 20
"""Most blocks of a request; a short line that claims more is no request but an attack on memory."""

_MOST_TOKENS: Final = 1 << 53
_MOST_BYTES: Final = 1 << 30  # of a block: as many blocks as a tier may have still have a size


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: a chain of blocks that is looked up, and stored when its turn is over.

    Attributes:
        time: Arrival, in seconds since the trace began.
        session: Conversation that it is a turn of; empty if unknown.
        tenant: Whose it is; empty if there is but one.
        keys: Ids of the blocks of the prompt, from the first. Equal ids mean equal prefixes: an
            id stands for all tokens up to the end of its block.
        tokens: Tokens of the prompt that ``keys`` cover; the last block may be a partial one.
        output_tokens: Tokens that were generated.
        block_tokens: Tokens of a full block.
        stop_reason: Why the generation ended, e.g. ``"tool_use"``, if it was told.
        next_in: Seconds to the session's next request, if it was told.
        duration: Seconds from arrival to the end of the turn, if known.
        reply_keys: Ids of the blocks behind ``keys`` that the reply filled and that were stored
            at the end of the turn. Public traces have none: there a reply is part of the next
            prompt.

    Raises:
        ValueError: if a number is out of its range, or not finite.
    """

    time: float
    session: str
    tenant: str
    keys: tuple[int, ...]
    tokens: int
    output_tokens: int
    block_tokens: int
    stop_reason: str | None = None
    next_in: float | None = None
    duration: float | None = None
    reply_keys: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isfinite(self.time):
            raise ValueError(f"it arrives at {self.time}")
        for keys in (self.keys, self.reply_keys):
            if keys and not 0 <= min(keys) <= max(keys) <= MASK:
                raise ValueError("an id of a block is no unsigned number of 64 bits")
            if len(keys) > MOST_BLOCKS:
                raise ValueError(f"it has {len(keys)} blocks; {MOST_BLOCKS} is the most")
        for tokens in (self.tokens, self.output_tokens, self.block_tokens - 1):
            if not 0 <= tokens <= _MOST_TOKENS:
                raise ValueError("a number of tokens is negative or beyond all measure")
        for seconds in (self.next_in, self.duration):
            if seconds is not None and not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"a time of {seconds} seconds")
        if not isinstance(self.stop_reason, str | None):
            raise TypeError(f"a stop reason {self.stop_reason!r:.40}")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What holds for a whole trace.

    Attributes:
        block_tokens: Tokens of a full block.
        bytes_per_token: Bytes of KV of one token, as stored raw; 0: it does not tell, as where a
            model keeps nothing but states.
        origin: Where it comes from, in words.
    """

    block_tokens: int
    bytes_per_token: int = BYTES_PER_TOKEN
    origin: str = ""

    def __post_init__(self) -> None:
        tokens, nbytes = self.block_tokens, self.bytes_per_token
        if tokens < 1 or nbytes < 0 or max(tokens, tokens * nbytes) > _MOST_BYTES:
            raise ValueError(f"no block has {tokens} tokens of {nbytes} bytes each")


class Trace:
    """A header and the requests in order of arrival; may be iterated any number of times.

    Attributes:
        header: What holds for all of it.
        lost: Requests that the recording engine could not write; known once iterated.
    """

    def __init__(self, header: TraceHeader, make: Callable[[], Iterable[TraceRequest]]) -> None:
        self.header = header
        self.lost = 0
        self._make = make

    def __repr__(self) -> str:
        return f"<Trace of {self.header.origin or 'unknown origin'}>"

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._make())

    @classmethod
    def of(cls, header: TraceHeader, requests: Iterable[TraceRequest]) -> Trace:
        """A trace in memory; ``requests`` are put in order of arrival."""
        kept = sorted(requests, key=lambda request: request.time)
        return cls(header, lambda: kept)

    def loaded(self) -> Trace:
        """This trace, read into memory: for who iterates it often."""
        kept = list(self)
        trace = Trace(self.header, lambda: kept)
        trace.lost = self.lost
        return trace

    def between(self, start: float, end: float) -> Trace:
        """The requests that arrive from ``start`` to before ``end``, e.g. a held-out half."""
        header = replace(self.header, origin=f"{self.header.origin} [{start:g} s, {end:g} s)")
        return Trace(header, lambda: (r for r in self if start <= r.time < end))
