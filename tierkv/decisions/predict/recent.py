"""A bounded dict that keeps what was used lately, at the price of two plain dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Recent"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """Maps keys to values and forgets what was not looked at for long.

    Two generations: what is set or found goes into the young one; when that holds half of the
    limit it becomes the old one, and the old one is dropped. So what was used among the last
    ``limit / 2`` distinct keys is there, and never more than ``limit`` are. O(1), without the
    links of an order of use.

    Args:
        limit: Most entries; 2 at least.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[_K, _V] = {}
        self._old: dict[_K, _V] = {}

    def __len__(self) -> int:
        return len(self._young) + sum(key not in self._young for key in self._old)

    def __iter__(self) -> Iterator[_K]:
        yield from self._young
        yield from (key for key in self._old if key not in self._young)

    def peek(self, key: _K) -> _V | None:
        """The value, if it is remembered; counts as no use."""
        value = self._young.get(key)
        return self._old.get(key) if value is None else value

    def get(self, key: _K) -> _V | None:
        """The value, if it is remembered, which it is for longer then."""
        value = self._young.get(key)
        if value is None and self._old:
            value = self._old.pop(key, None)
            if value is not None:
                self.set(key, value)
        return value

    def set(self, key: _K, value: _V) -> None:
        """Remember a value, which is not None."""
        if key not in self._young and len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def drop(self, key: _K) -> None:
        """Forget a key. Idempotent."""
        self._young.pop(key, None)
        self._old.pop(key, None)
