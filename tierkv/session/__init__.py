"""Sessions: named token histories whose KV is matched, loaded, stored and forgotten."""

from tierkv.mover.behind import FlushResult
from tierkv.session.handle import BlockReport, Session
from tierkv.session.match import LoadResult, Match
from tierkv.session.saving import BlockOutcome, StoreResult
from tierkv.session.table import SessionInfo, SessionTable

__all__ = [
    "BlockOutcome",
    "BlockReport",
    "FlushResult",
    "LoadResult",
    "Match",
    "Session",
    "SessionInfo",
    "SessionTable",
    "StoreResult",
]
