"""Prefetch: bring a prefix into the fastest tier that takes it, before it is loaded.

What is worth bringing is decided in :mod:`tierkv.decisions.prefetching`; here it is done. A guess
evicts nothing hotter than what it brings and counts as no use; a request that has arrived is a
use, and what was used before it gives way. A prefetch belongs to the engine: nobody has to wait
for it. It works in a lane of its own, behind everything that somebody waits for and behind
write-behind.
"""

from __future__ import annotations

from tierkv.prefetch.hearing import Prefetcher, SessionLike, prefix_query, session_number
from tierkv.prefetch.holding import Hold, Holder

__all__ = ["Hold", "Holder", "Prefetcher", "SessionLike", "prefix_query", "session_number"]
