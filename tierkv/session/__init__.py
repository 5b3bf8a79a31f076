"""Sessions: named token histories whose KV is matched, loaded, stored and forgotten."""

from tierkv.mover.behind import FlushResult
from tierkv.session.explaining import BlockReport
from tierkv.session.handle import Session
from tierkv.session.layerwise import LayerStore
from tierkv.session.match import LoadResult, Match
from tierkv.session.saving import BlockOutcome, StoreResult
from tierkv.session.table import SessionInfo, SessionState, SessionTable

__all__ = [
    "BlockOutcome",
    "BlockReport",
    "FlushResult",
    "LayerStore",
    "LoadResult",
    "Match",
    "Session",
    "SessionInfo",
    "SessionState",
    "SessionTable",
    "StoreResult",
]
