"""Blocks that could not be loaded although they were said to be there: not offered again at once.

Without this memory a request whose load fails is offered the same blocks in its next step, and the
next: it never gets to compute them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierkv.blocks import BlockKey

__all__ = ["NegativeCache"]

_MOST: Final = 65536


class NegativeCache:
    """Keys that are not offered for a while. Pure: the caller tells the time; not thread-safe.

    Args:
        retry_after: Seconds for which a key that failed is not offered.
        most: Keys that are remembered; beyond it the oldest ones are forgotten.
    """

    def __init__(self, retry_after: float, most: int = _MOST) -> None:
        self.retry_after = retry_after
        self._most = most
        self._until: dict[BlockKey, float] = {}  # oldest first, hence the first ones end first

    def __len__(self) -> int:
        return len(self._until)

    def failed(self, keys: Iterable[BlockKey], now: float) -> None:
        """Remember that the load of these blocks failed."""
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = now + self.retry_after
        while self._until:
            oldest, until = next(iter(self._until.items()))
            if until > now and len(self._until) <= self._most:
                break
            del self._until[oldest]

    def blocked(self, key: BlockKey, now: float) -> bool:
        """Whether a block is not to be offered now."""
        until = self._until.get(key)
        return until is not None and now < until

    def came_back(self, key: BlockKey) -> None:
        """Hear that the block was stored anew: what failed is not what is there now."""
        self._until.pop(key, None)
