"""What a rank counts: plain numbers that only grow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

__all__ = ["RankCounters"]


@dataclass(slots=True)
class RankCounters:
    """What became of a rank's orders. Bytes are raw bytes in the engine's pages.

    Attributes:
        loads: Loads that have ended.
        loads_short: Those that brought less than they were to, to requests that went on.
        load_tokens: Tokens brought.
        load_bytes: Bytes of them.
        load_seconds: From order to end, summed over the loads.
        saves: Saves that have ended.
        saves_skipped: Those that were dropped before they began: their pages went to others, or
            the request lost them.
        saves_failed: Those that began and did not store all of their blocks.
        save_tokens: Tokens stored, or found to be there.
        save_blocks: Blocks newly stored.
        save_bytes: Bytes of them.
        save_seconds: From order to end, summed over the saves.
        deadline_misses: Loads that their deadline cut short.
        corrupt: Loads that damaged bytes cut short.
        fence_waits: Steps that waited for copies out of pages that they were about to write.
        fence_seconds: For how long, in all.
        fence_gave_up: Copies that were cut short because such a step waited too long for them.
        hints: Hints that were followed, at least in part.
        hints_refused: Hints that were not, or not to their end: no room, or a failure.
        errors: Orders that made no sense, and failures that nobody foresaw.
    """

    loads: int = 0
    loads_short: int = 0
    load_tokens: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    saves: int = 0
    saves_skipped: int = 0
    saves_failed: int = 0
    save_tokens: int = 0
    save_blocks: int = 0
    save_bytes: int = 0
    save_seconds: float = 0.0
    deadline_misses: int = 0
    corrupt: int = 0
    fence_waits: int = 0
    fence_seconds: float = 0.0
    fence_gave_up: int = 0
    hints: int = 0
    hints_refused: int = 0
    errors: int = 0
    _told: dict[str, int | float] = field(default_factory=dict, repr=False)

    def snapshot(self) -> dict[str, int | float]:
        """All of them by name."""
        return {name: getattr(self, name) for name in _NAMES}

    def take(self) -> dict[str, int | float]:
        """What was added since the last call."""
        now = self.snapshot()
        added = {name: value - self._told.get(name, 0) for name, value in now.items()}
        self._told = now
        return added


_NAMES = [f.name for f in dataclasses.fields(RankCounters) if not f.name.startswith("_")]
