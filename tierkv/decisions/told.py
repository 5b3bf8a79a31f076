"""What callers tell of the future and of worth: hints of a next turn, importance of parts."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from tierkv.decisions.compressed import Compressed
from tierkv.decisions.index import NO_ROW
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.hinting import HintClass

__all__ = ["Told"]

_LONGEST_REASON = 64


class Told(Compressed):
    """The recorded calls by which callers pass on what they know."""

    def hint(
        self,
        keys: Sequence[BlockKey],
        groups: int,
        now: float,
        *,
        stop_reason: str | None = None,
        next_in: float | None = None,
    ) -> None:
        """Take a session's hint about its next turn, at the end of a turn.

        Moves the session's parts in the order of policies that go by recency, as far as hints of
        this class have proved to tell anything; see :mod:`tierkv.decisions.hinting`. Handles 256
        blocks at once, leaves first, and the rest in later calls. The next use undoes it.

        Args:
            keys: Keys of the session's blocks, in order.
            groups: Layer groups of its space.
            now: Time.
            stop_reason: Why the turn ended; any short text.
            next_in: Seconds until the next turn, as expected; it then names the class.

        Raises:
            ConfigError: if neither is given, or one of them makes no sense.
        """
        if stop_reason is None and next_in is None:
            raise ConfigError("a hint needs a stop_reason, or next_in, or both")
        told: object = stop_reason
        if told is not None and not (isinstance(told, str) and 0 < len(told) <= _LONGEST_REASON):
            raise ConfigError(
                f"stop_reason is a text of 1 to {_LONGEST_REASON} characters, not {told!r:.80}"
            )
        if next_in is not None and not (isfinite(next_in) and next_in >= 0):
            raise ConfigError(f"next_in is a number of seconds from 0, not {next_in!r}")
        self._hints.told(keys, groups, stop_reason, next_in, now)
        self._record("hint", now, (keys, groups, stop_reason, next_in), None)
        self._settle(now)

    def score(self, parts: Sequence[PartId], value: float | Sequence[float], now: float) -> None:
        """Tell how important parts are, for policies and codec rules that go by it.

        A part keeps what was said last while it is anywhere, in whichever tier. Unknown parts are
        passed over. What is due for another codec chain by it is put in line.

        Args:
            parts: The parts.
            value: Importance from 0 (may go first) to 1; one for all, or one each.
            now: Time.

        Raises:
            ConfigError: if a value is outside 0 to 1, or there are more or fewer than parts;
                nothing is then changed.
        """
        values = [float(value)] * len(parts) if isinstance(value, int | float) else list(value)
        if len(values) != len(parts):
            raise ConfigError(f"{len(parts)} parts need as many scores, not {len(values)}")
        wrong = next((v for v in values if not 0 <= v <= 1), None)
        if wrong is not None:
            raise ConfigError(f"importance is a number from 0 to 1, not {wrong!r}")
        rows = self._at.index.rows
        for part, worth in zip(parts, values, strict=True):
            row = rows.get(part, NO_ROW)
            if row >= 0:
                self._at.score(row, worth)
        if self._rules is not None:
            self._rules.recheck(parts, now)
        self._record("score", now, (parts, value), None)

    def importance(self, part: PartId) -> float | None:
        """Importance that a part was given, from 0 to 1; None if nobody gave it any."""
        return self._at.scores.get(self._at.index.rows.get(part, NO_ROW))

    def hint_classes(self) -> list[HintClass]:
        """What has been learned of each class of hints."""
        return self._hints.classes()
