"""The decision log: every call that changed a decision object, replayable byte for byte.

One JSON line a call: operation, time, arguments, and the result (its digest when it is long). The
first line describes the object. Keys are digests already; no token id, tensor or secret is in it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tierkv.abc import StoredPart
from tierkv.blocks import KEY_BYTES, BlockKey, PartId
from tierkv.decisions import compressed
from tierkv.decisions.cost import Run
from tierkv.decisions.lines import DecisionLog, LineLog
from tierkv.decisions.types import (
    Demote,
    EvictReason,
    GroupRule,
    Query,
    SkipReason,
    StoreItem,
)
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tierkv.decisions.core import Decisions
    from tierkv.decisions.lookup import Lookup

__all__ = ["DecisionLog", "LineLog", "replay", "runs"]

_HEADER: Final = b'{"op":"header"'
_OTHERS: Final = "prefetch."
_DERIVED: Final = ("header", "resize")  # lines that the object writes of its own accord


# --------------------------------------------------------------------------- reading


def _query(plain: dict[str, Any]) -> Query:
    raw = bytes.fromhex(plain["keys"])
    keys = tuple(BlockKey(raw[i : i + KEY_BYTES]) for i in range(0, len(raw), KEY_BYTES))
    groups = tuple(GroupRule(GroupKind(g["kind"]), g["window"]) for g in plain["groups"])
    rest = {k: v for k, v in plain.items() if k not in ("keys", "groups")}
    return Query(keys=keys, groups=groups, **rest)


def _part(text: str) -> PartId:
    return PartId(bytes.fromhex(text))


def _key(text: str | None) -> BlockKey | None:
    return None if text is None else BlockKey(bytes.fromhex(text))


def _item(plain: list[Any]) -> StoreItem:
    part, parent, root, *rest = plain
    return StoreItem(
        _part(part), None if parent is None else _part(parent), BlockKey(bytes.fromhex(root)), *rest
    )


def _stored(plain: dict[str, Any]) -> StoredPart:
    rest = {k: v for k, v in plain.items() if k not in ("part", "parent", "root")}
    root = BlockKey(bytes.fromhex(plain["root"]))
    return StoredPart(part=_part(plain["part"]), parent=_key(plain["parent"]), root=root, **rest)


def _pairs(plain: list[list[Any]]) -> list[tuple[PartId, int]]:
    return [(_part(part), generation) for part, generation in plain]


def _runs(plain: list[list[Any]]) -> list[Run]:
    return [Run(blocks, tokens, tuple((t, n) for t, n in load)) for blocks, tokens, load in plain]


def _reserve(d: Decisions, now: float, a: list[Any]) -> object:
    tier, items, tenant, session, session_bytes, demand, source, ahead = a
    return d.reserve(
        tier,
        [_item(i) for i in items],
        tenant=tenant,
        now=now,
        session=session,
        session_bytes=session_bytes,
        demand=demand,
        source=source,
        ahead=ahead,
    )


_CALLS: Final[dict[str, Callable[[Decisions, float, list[Any]], object]]] = {
    "lookup": lambda d, now, a: d.lookup(_query(a[0]), now),
    "hint": lambda d, now, a: d.hint(
        [BlockKey(bytes.fromhex(k)) for k in a[0]], a[1], now, stop_reason=a[2], next_in=a[3]
    ),
    "score": lambda d, now, a: d.score([_part(p) for p in a[0]], a[1], now),
    "release": lambda d, now, a: d.release(a[0], now),
    "reserve": _reserve,
    "commit": lambda d, now, a: d.commit(a[0], a[1], now, a[2], a[3]),
    "rollback": lambda d, now, a: d.rollback(a[0], a[1], now, SkipReason(a[2])),
    "make_room": lambda d, now, a: d.make_room(a[0], a[1], tenant=a[2], now=now),
    "dropped": lambda d, now, a: d.dropped(_pairs(a[0]), a[1], EvictReason(a[2]), now),
    "cancel_demote": lambda d, now, a: d.cancel_demote(
        [Demote(_part(x[0]), *x[1:]) for x in a[0]], now
    ),
    "invalidate": lambda d, now, a: d.invalidate(_part(a[0]), a[1], a[2], EvictReason(a[3]), now),
    "tick": lambda d, now, a: d.tick(now),
    "recover": lambda d, now, a: d.recover(a[0], [_stored(s) for s in a[1]], a[2], now, a[3], a[4]),
    "set_capacity": lambda d, now, a: d.set_capacity(a[0], a[1], now),
    "hold_part": lambda d, now, a: d.hold_part(_part(a[0]), now, a[1], a[2]),
    "admit": lambda d, now, a: d.admit(a[0], a[1], now),
    "sample": lambda d, now, a: d.sample(a[0], a[1], a[2], a[3], now),
    "failed": lambda d, now, a: d.failed(a[0], a[1], now, hung=a[2]),
    "alive": lambda d, now, a: d.alive(a[0], now),
    "untried": lambda d, now, a: d.untried(a[0], a[1], now),
    "computed": lambda d, now, a: d.computed(bytes.fromhex(a[0]), a[1], a[2], now),
    "coded": lambda d, now, a: d.coded(a[0], a[1], a[2], a[3], now),
    "choose_chain": lambda d, now, a: d.choose_chain(a[0], a[1], a[2], now),
    "plan_load": lambda d, now, a: d.plan_load(bytes.fromhex(a[0]), _runs(a[1]), a[2], now),
    "forget": lambda d, now, a: d.forget([_part(p) for p in a[0]], EvictReason(a[1]), now),
    **compressed.CALLS,
}


def _sliced(d: Decisions, op: str, now: float, args: list[Any], open_: dict[int, Lookup]) -> None:
    if op == "begin_lookup":
        look = d.begin_lookup(_query(args[0]), now)
        open_[look.id] = look
    elif op == "advance":
        d.advance(open_[args[0]], now)
    elif op == "finish":
        d.finish(open_.pop(args[0]), now)
    else:
        d.abandon(open_.pop(args[0]), now)


def replay(lines: Iterable[bytes], decisions: Decisions) -> Iterator[bytes]:
    """Feed the calls of a log to a fresh object and yield the lines that it writes.

    The lines equal the log byte for byte: the object holds no clock, no randomness and nothing
    else that a call does not bring along.

    Args:
        lines: A decision log, header first.
        decisions: An object of the same configuration that has not been used.

    Raises:
        ConfigError: if the object is configured differently from the one that wrote the log, or
            a line is not one of a decision log.
    """
    log = LineLog()
    decisions.attach(log)
    written = 0
    open_: dict[int, Lookup] = {}
    for number, line in enumerate(lines):
        try:
            call = json.loads(line)
            op, now, args = str(call["op"]), call["now"], call["args"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"line {number + 1} is not one of a decision log: {error}") from error
        if number == 0 and (op != "header" or line != log.lines[0]):
            raise ConfigError(
                "the log was written by a decision object of another configuration:\n"
                f"log: {line!r}\nhere: {log.lines[0]!r}"
            )
        if number and op == "header":
            raise ConfigError(f"line {number + 1} begins another run: cut the log with runs()")
        if op.startswith(_OTHERS):
            yield line  # another object's, which writes into the same log
        elif op in _CALLS:
            _CALLS[op](decisions, now, args)
        elif op in ("begin_lookup", "advance", "finish", "abandon"):
            _sliced(decisions, op, now, args, open_)
        elif op not in _DERIVED:
            raise ConfigError(f"line {number + 1}: unknown operation {op!r}")
        yield from log.lines[written:]
        written = len(log.lines)


def runs(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Cut a log to which several engines wrote, one after the other, into the log of each."""
    run: list[bytes] = []
    for line in lines:
        if run and line.startswith(_HEADER):
            yield run
            run = []
        run.append(line)
    if run:
        yield run
