"""Spaces of what is computed since a reset: keyed apart from all that was stored before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import AdapterId
    from tierkv.layout import Space
    from tierkv_adapters.serving.orders import RequestFacts

__all__ = ["EraSpaces", "Eras"]

_FACT = "tierkv.era"


class Eras:
    """Finds the space of an era; one thread.

    A reset may be because other weights were put in place, which no file tells: the keys of before
    and after must differ, also of what was on its way to a tier. An era is a space of its own, and
    not another salt, since sessions are known by space and name: whoever made a session finds,
    clears and destroys it as before.

    The spaces of the last era are remembered, as fingerprints take tens of microseconds.
    """

    __slots__ = ("_era", "_known")

    def __init__(self) -> None:
        self._era = b""
        self._known: dict[bytes, Space] = {}

    def within(self, space: Space, era: bytes) -> Space:
        """The space of KV that is computed in this era, where ``space`` is that of before any."""
        if not era:
            return space
        if era != self._era:
            self._era, self._known = era, {}
        found = self._known.get(space.fingerprint)
        if found is None:
            extra = (*space.identity.extra, (_FACT, era.hex()))
            found = replace(space, identity=replace(space.identity, extra=extra))
            self._known[space.fingerprint] = found
        return found


class EraSpaces:
    """The spaces of a rank's requests.

    Args:
        space: The space of requests with an adapter, or without, before any reset.
    """

    __slots__ = ("_era", "_eras", "_space")

    def __init__(self, space: Callable[[AdapterId | None], Space]) -> None:
        self._space = space
        self._eras = Eras()
        self._era = b""  # of the request that came last

    def of(self, facts: RequestFacts) -> Space:
        """The space of a request."""
        self._era = facts.era
        return self._eras.within(self._space(facts.adapter), facts.era)

    def now(self) -> Space:
        """The space of requests without an adapter, in the era of the request that came last."""
        return self._eras.within(self._space(None), self._era)
