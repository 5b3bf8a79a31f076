"""The prefetch lines of a decision log: replayed exactly, as the others are.

They stand between the lines of the decision object, in the order of time, where an engine has
predictors. Keys are named by their first eight bytes, for which a predictor knows no difference.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tierkv.abc import Arrival, Departure
from tierkv.blocks import BlockKey, PartId
from tierkv.decisions.lines import LineLog
from tierkv.decisions.predict.brought import NAMED_BYTES
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tierkv.decisions.prefetching import Plan, Prefetching

__all__ = ["PREFETCH_LINE", "replay_prefetching"]

PREFETCH_LINE: Final = b'{"op":"prefetch.'
"""How each of these lines begins."""


def replay_prefetching(lines: Iterable[bytes], prefetching: Prefetching) -> Iterator[bytes]:
    """Feed the calls of a log to a fresh object and yield the lines that it writes.

    The lines equal the log's byte for byte: equal events make equal wishes.

    Args:
        lines: A decision log of one run; lines of the decision object are passed over.
        prefetching: An object of the same configuration that has not been used.

    Raises:
        ConfigError: if the object is configured differently from the one that wrote the log, or
            a line is malformed.
    """
    log = LineLog()
    prefetching.attach(log)
    plans: dict[int, Plan] = {}
    written = 0
    began = False
    for number, line in enumerate(lines):
        if not line.startswith(PREFETCH_LINE):
            continue
        if not began and line != log.lines[0]:
            raise ConfigError(
                "the log was written by predictors of another configuration:\n"
                f"log: {line!r}\nhere: {log.lines[0]!r}"
            )
        if began:
            try:
                call = json.loads(line)
                _call(prefetching, call["op"].partition(".")[2], call["now"], call["args"], plans)
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise ConfigError(
                    f"line {number + 1} is not one of a prefetch log: {error!r}"
                ) from error
        began = True
        yield from log.lines[written:]
        written = len(log.lines)


def _call(
    prefetching: Prefetching, op: str, now: float, args: Sequence[Any], plans: dict[int, Plan]
) -> None:
    made: list[Plan] = []
    if op == "arrived":
        made = prefetching.arrived(Arrival(args[0], _keys(args[1])), now)
    elif op == "ended":
        made = prefetching.ended(Departure(args[0], _keys(args[1]), args[2], args[3]), now)
    elif op == "due":
        made = prefetching.due(now)
    elif op == "asked":
        made = [prefetching.asked(_keys(args[0]), now, guess=args[1])]
    elif op == "grant":
        parts = [(_part(part), tier, nbytes) for part, tier, nbytes in args[2]]
        prefetching.grant(plans[args[0]], parts, now)
    elif op == "finish":
        prefetching.finish(plans.pop(args[0]), now)
    elif op == "landed":
        prefetching.landed([_part(part) for part in args[0]], now)
    elif op == "refused":
        prefetching.refused([_part(part) for part in args[0]], now)
    elif op == "demand":
        prefetching.demand([(_part(part), tier) for part, tier in args[0]], now)
    elif op == "dropped":
        prefetching.dropped(_part(args[0]), args[1], now)
    else:
        raise ValueError(f"unknown operation {op!r}")
    plans.update((plan.id, plan) for plan in made)


def _keys(text: str) -> tuple[BlockKey, ...]:
    raw = bytes.fromhex(text)
    return tuple(BlockKey(raw[i : i + NAMED_BYTES]) for i in range(0, len(raw), NAMED_BYTES))


def _part(text: str) -> PartId:
    return PartId(bytes.fromhex(text))
