"""Hints that requests bring: pin, prefetch and time to live, from either of two channels.

``request.kv_hints`` is vLLM's envelope for orchestrators: actions with a type, a version and a
payload. ``kv_transfer_params={"tierkv": {...}}`` says the same for one request of one's own::

    {"tierkv": {"pin": "10m", "ttl": "6h", "prefetch": {"session": "chat-42"}}}
    KvHintAction("1", "pin", "1", {"ttl": "10m"})
    KvHintAction("2", "prefetch", "1", {"token_ids": [...]})
    KvHintAction("3", "ttl", "1", {"ttl": "6h"})

What an action is about is the KV of its own request, or (prefetch) of the same tenant.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import ConfigError
from tierkv.units import parse_duration
from tierkv_adapters.serving.orders import HintOrder

if TYPE_CHECKING:
    from tierkv_adapters.serving.orders import RequestFacts

__all__ = ["Hinted", "Hinting", "Prefetch", "parse_prefetch"]

_VERSION: Final = "1"
_MOST_IDS: Final = 1 << 20
_MOST_ACTIONS: Final = 64


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What to bring early: a session's history, or the prefix of a prompt."""

    session: str | None = None
    token_ids: array[int] | None = None


@dataclass(slots=True)
class Hinted:
    """What a request hints at.

    Attributes:
        pin: Seconds for which its KV is to stay in memory.
        ttl: Seconds that its blocks live after their last use.
        prefetch: What to bring early.
    """

    pin: float | None = None
    ttl: float | None = None
    prefetch: tuple[Prefetch, ...] = ()


def parse_prefetch(value: object) -> Prefetch:
    """What to bring early, from plain data: ``{"session": name}`` or ``{"token_ids": [...]}``.

    Raises:
        ConfigError: if it is neither.
    """
    if isinstance(value, Mapping) and len(value) == 1:
        name, ids = value.get("session"), value.get("token_ids")
        if isinstance(name, str) and name:
            return Prefetch(session=name)
        if isinstance(ids, Sequence) and not isinstance(ids, str | bytes) and ids:
            try:
                if len(ids) <= _MOST_IDS:
                    return Prefetch(token_ids=array("I", ids))
            except (TypeError, OverflowError):
                pass
    # said without the value, which may be a prompt: this is logged
    found = f"a mapping of {sorted(map(str, value))}" if isinstance(value, Mapping) else ""
    raise ConfigError(
        "what to prefetch is {'session': name}, or {'token_ids': [...]} with at most "
        f"{_MOST_IDS} ids of 32 bits, not {found or type(value).__name__:.200}"
    )


def _seconds(payload: object) -> float:
    value = payload.get("ttl") if isinstance(payload, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"this action needs a payload {{'ttl': duration}}, not {payload!r:.80}")
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ConfigError("a ttl is longer than nothing")
    return seconds


class Hinting:
    """Reads hints on the scheduler's side and gives them to the ranks with the next step.

    Attributes:
        unknown: Actions of a type or version that means nothing here; ignored.
        unreadable: Actions that were meant for this, and whose payload made no sense; ignored.
    """

    def __init__(self) -> None:
        self.unknown = 0
        self.unreadable = 0
        self._orders: list[HintOrder] = []

    def read(self, request: Any, pin: float | None, prefetch: Prefetch | None) -> Hinted | None:
        """What a request hints at, or None; its envelope is read leniently.

        Args:
            request: vLLM's request.
            pin: What its own settings say.
            prefetch: What its own settings say.
        """
        hinted = Hinted(pin, None, () if prefetch is None else (prefetch,))
        envelope = getattr(request, "kv_hints", None)
        for action in list(getattr(envelope, "actions", None) or ())[:_MOST_ACTIONS]:
            self._action(hinted, action)
        return None if hinted == Hinted() else hinted

    def _action(self, hinted: Hinted, action: Any) -> None:
        kind = str(getattr(action, "action_type", ""))
        version = str(getattr(action, "action_version", ""))
        if kind not in {"pin", "prefetch", "ttl"} or version.split(".")[0] != _VERSION:
            self.unknown += 1
            return
        payload = getattr(action, "payload", None)
        try:
            if kind == "pin":
                hinted.pin = max(hinted.pin or 0.0, _seconds(payload))
            elif kind == "ttl":
                hinted.ttl = _seconds(payload)
            else:
                hinted.prefetch += (parse_prefetch(payload),)
        except ConfigError:
            self.unreadable += 1

    def came(self, hinted: Hinted, facts: RequestFacts, tokens: Sequence[int]) -> None:
        """A request with hints is known to the planner now.

        Args:
            hinted: What it hints at.
            facts: What its keys depend on.
            tokens: Its token ids.
        """
        for wanted in hinted.prefetch:
            order = HintOrder(facts, "prefetch", wanted.token_ids, wanted.session)
            self._orders.append(order)
        if hinted.pin is not None:
            ids = array("I", tokens)
            self._orders.append(HintOrder(facts, "pin", ids, seconds=hinted.pin))

    def take(self) -> list[HintOrder]:
        """Orders since the last call."""
        orders, self._orders = self._orders, []
        return orders
