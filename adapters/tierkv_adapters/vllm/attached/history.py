"""What each session has seen, as token ids, for a handle whose engine keeps no conversations."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocking import CacheManager
    from tierkv.blocking.names import SessionFacts

__all__ = ["Histories", "Spoken"]

_SWEEP = 64


class Spoken(NamedTuple):
    """A session as a turn begins on it.

    Attributes:
        facts: What it was created with.
        token_ids: What it has seen.
    """

    facts: SessionFacts
    token_ids: list[int]


class Histories:
    """Token ids of a manager's sessions. Thread-safe.

    A session that was cleared, reset, or destroyed and created again begins anew; a turn that was
    under way meanwhile leaves nothing behind. Kept beside the manager, because the engine stores
    whole blocks a while after they were said.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._said: dict[str, tuple[int, list[int]]] = {}
        self._guard = threading.Lock()
        self._sweep_at = _SWEEP

    def begin(self, name: str) -> Spoken:
        """A session as it is now.

        Raises:
            ConfigError: if there is none of this name.
        """
        facts = self._manager.session_facts(name)
        with self._guard:
            epoch, ids = self._said.get(name, (0, []))
        return Spoken(facts, list(ids) if epoch == facts.epoch else [])

    def remember(self, facts: SessionFacts, token_ids: Sequence[int]) -> None:
        """A turn is over: this is what the session has seen, unless it began anew meanwhile."""
        if not self._lives(facts.name, facts.epoch):
            return
        with self._guard:
            self._said[facts.name] = facts.epoch, list(token_ids)
            full = len(self._said) >= self._sweep_at
        if full:
            self._sweep()

    def _sweep(self) -> None:
        """Forget sessions that are gone: once in a while, so that it costs next to nothing."""
        with self._guard:
            known = {name: epoch for name, (epoch, _) in self._said.items()}
        gone = [name for name, epoch in known.items() if not self._lives(name, epoch)]
        with self._guard:
            for name in gone:
                if self._said[name][0] == known[name]:
                    del self._said[name]
            self._sweep_at = max(_SWEEP, 2 * len(self._said))

    def _lives(self, name: str, epoch: int) -> bool:
        try:
            return self._manager.session_facts(name).epoch == epoch
        except ConfigError:  # destroyed meanwhile
            return False
