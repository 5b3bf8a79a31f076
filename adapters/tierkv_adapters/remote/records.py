"""What an engine tells about itself, and its errors, as JSON and back; a closed set of types."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from tierkv import errors
from tierkv.abc import BackendStats
from tierkv.decisions.guarding import Promotions
from tierkv.decisions.hinting import HintClass
from tierkv.decisions.predict import PrefetchFigures
from tierkv.decisions.types import MissReason
from tierkv.engine import EngineStats
from tierkv.errors import BackendError, ConfigError, TierKVError
from tierkv.metrics import TrafficSnapshot
from tierkv.session import BlockReport, FlushResult, SessionInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["READERS", "dump", "error_from", "error_to"]

_log = logging.getLogger("tierkv.remote")
_PLAIN: Final[dict[str, type[TierKVError]]] = {
    kind.__name__: kind
    for kind in (
        errors.AttachError,
        errors.CapacityError,
        errors.ClosedError,
        errors.CodecError,
        errors.IntegrityError,
        errors.LayoutError,
        errors.MissingDependencyError,
        errors.QuotaExceededError,
        errors.SessionBusyError,
        errors.TierKVError,
    )
}
_OF_TIERS: Final[dict[str, type[BackendError]]] = {
    kind.__name__: kind for kind in (errors.BackendError, errors.RootLockedError)
}


def error_to(error: BaseException) -> dict[str, Any]:
    """What a caller in another process is told of an error.

    A failure that is none of ours stays in this process's log: its text may hold anything.
    """
    kind = type(error).__name__
    if isinstance(error, BackendError) and kind in _OF_TIERS:
        text = str(error).removeprefix(f"tier {error.tier!r}: ")
        return {"kind": kind, "text": text, "tier": error.tier, "retryable": error.retryable}
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "text": str(error), "setting": error.setting}
    if kind in _PLAIN:
        return {"kind": kind, "text": str(error)}
    _log.error("a request from another process failed", exc_info=error)
    text = f"the engine failed with {kind}; its process has logged the details"
    return {"kind": "TierKVError", "text": text}


def error_from(told: object) -> TierKVError:
    """The error that :func:`error_to` told of, as the same type."""
    if not isinstance(told, dict) or not isinstance(text := told.get("text"), str):
        return TierKVError("the engine answered with an error that cannot be read")
    kind = told.get("kind")
    if kind == "ConfigError":
        setting = told.get("setting")
        return ConfigError(text, setting=setting if isinstance(setting, str) else None)
    if isinstance(kind, str) and (of_tier := _OF_TIERS.get(kind)) is not None:
        return of_tier(str(told.get("tier")), text, retryable=told.get("retryable") is True)
    return _PLAIN.get(str(kind), TierKVError)(text)


def dump(value: object) -> bytes:
    """A result as JSON; dataclasses become objects, named tuples lists, enums their values."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, MissReason):
        return value.value
    return value


def _stats(data: dict[str, Any]) -> EngineStats:
    known = dict(data)
    known["tiers"] = {name: BackendStats(**x) for name, x in data["tiers"].items()}
    known["traffic"] = {
        name: tuple(TrafficSnapshot(**way) for way in ways)
        for name, ways in data["traffic"].items()
    }
    known["prefetch"] = {name: PrefetchFigures(**x) for name, x in data["prefetch"].items()}
    known["promotions"] = {name: Promotions(*x) for name, x in data["promotions"].items()}
    known["hints"] = tuple(HintClass(*x) for x in data["hints"])
    return EngineStats(**known)


def _sessions(data: Sequence[dict[str, Any]]) -> list[SessionInfo]:
    return [SessionInfo(**x) for x in data]


def _reports(data: Sequence[dict[str, Any]]) -> list[BlockReport]:
    out = []
    for x in data:
        reason = None if x["reason"] is None else MissReason(x["reason"])
        out.append(BlockReport(**{**x, "reason": reason}))
    return out


def _flushed(data: dict[str, Any]) -> FlushResult:
    return FlushResult(**data)


READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "explain": _reports,
    "flush": _flushed,
    "sessions": _sessions,
    "stats": _stats,
}
"""By operation, what makes the result out of its JSON; others' results are JSON themselves."""
