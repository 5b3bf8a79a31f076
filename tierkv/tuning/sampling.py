"""A small trace that behaves like a large one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tierkv.errors import ConfigError
from tierkv.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.traces import TraceRequest

__all__ = ["mixed", "sampled"]

_MASK: Final = (1 << 64) - 1


def mixed(number: int) -> int:
    """A number whose bits all depend on all bits of ``number`` (splitmix64, Steele et al., 2014).

    >>> mixed(1) != mixed(2), mixed(0) < 1 << 64
    (True, True)
    """
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def sampled(trace: Trace, rate: float, part: int = 0) -> Trace:
    """Keep a share of the blocks, whoever asks for them (SHARDS: Waldspurger et al., FAST 2015).

    A block is kept by its id alone, so that each use of it is there, or none. What is left of a
    request is a chain still, of which a prefix is found where a prefix of the whole would be.
    A cache of ``rate`` times the size then finds about the same share of it.

    Args:
        trace: The trace.
        rate: Share of the blocks, in (0, 1].
        part: Number of the sample; samples of other numbers share no block with it.

    Raises:
        ConfigError: if there is no such sample.
    """
    if not 0 < rate <= 1 or part < 0 or (part + 1) * rate > 1 + 1e-9:
        raise ConfigError(f"no sample {part} of a share of {rate}: samples must fit into (0, 1]")
    low, high = int(part * rate * (_MASK + 1)), int((part + 1) * rate * (_MASK + 1))

    def kept(keys: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([key for key in keys if low <= mixed(key) < high])

    def requests() -> Iterator[TraceRequest]:
        for request in trace:
            keys, reply = kept(request.keys), kept(request.reply_keys)
            if keys or reply:
                tokens = len(keys) * request.block_tokens
                if keys and keys[-1] == request.keys[-1]:  # it may be a partial block
                    tokens -= len(request.keys) * request.block_tokens - request.tokens
                yield replace(request, keys=keys, reply_keys=reply, tokens=tokens)

    header = replace(trace.header, origin=f"{trace.header.origin} (sample of {rate:g})")
    return Trace(header, requests)
