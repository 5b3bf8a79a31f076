"""How calls of a decision object are written down: one JSON line each."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

from tierkv.decisions.types import Query

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LOG_VERSION", "DecisionLog", "LineLog", "format_line"]

LOG_VERSION: Final = 2
_INLINE: Final = 512  # a longer result is written as its digest


class DecisionLog(Protocol):
    """Takes the lines of a decision log; called on the loop, must be quick."""

    def write(self, line: bytes) -> object:
        """Take one line, newline included."""


class LineLog:
    """A decision log in memory."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        """Keep one line."""
        self.lines.append(line)


def _plain(value: Any) -> Any:
    """Turn values of :mod:`types` into what JSON knows."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Query):
        plain = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name != "keys"}
        if not value.start:  # logs of before there was one stay as they are
            del plain["start"]
        return {"keys": b"".join(value.keys).hex(), **plain}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"a decision log cannot hold {type(value).__name__}")


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def format_line(op: str, now: float, args: Sequence[Any], result: Any) -> bytes:
    """Write one call as a line."""
    outcome = _plain(result)
    text = _dump(outcome)
    if len(text) > _INLINE:
        outcome = {"digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}
    return (_dump({"op": op, "now": now, "args": _plain(args), "result": outcome}) + "\n").encode()
