"""How the KV that a session stores came about: behind which loads it was computed.

What is computed behind lossy KV is derived, and no exact session may get it. The engine does not
see the model: it goes by what callers match, load and store, and where that leaves both open, KV
counts as derived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.mover.load import UNKNOWN, Progress

if TYPE_CHECKING:
    from tierkv.session.base import Handle

__all__ = ["begin", "resume"]


def begin(session: Handle, first: int, tokens: int) -> bool:
    """Note that a match was opened.

    Args:
        session: The handle that opened it.
        first: Block that it starts at: what is before it is in place.
        tokens: Tokens that it found.

    Returns:
        Whether the first load of it, from the first token on, puts everything else aside.
    """
    afresh = not (first or session.matches)
    known = list(session.behind)
    if not session.matches:  # those loads are over
        known = [load for load in known if load.derived][:1]
    if afresh and not tokens:
        # what follows is computed from the first token on, unless a store tells otherwise
        session.lineage = []
        session.aside = known
        return afresh
    # until something is loaded, the caller may go on with what is in place, and only look
    if first and session.lossy and not any(load.derived for load in known):
        known.append(Progress(derived=UNKNOWN))
    session.lineage = known
    return afresh


def resume(session: Handle, start: int, end: int) -> None:
    """Note that KV of tokens ``start`` to ``end`` is to be stored.

    Where what is before it was neither stored nor loaded by this session, as far as this engine
    knows of it, nobody tells how it came about.
    """
    if session.aside and start > session.covered:
        session.lineage = session.aside
    unseen = start > session.state.kept * session.space.block_tokens
    if session.lossy and unseen and not (session.matched or session.state.lineage):
        session.lineage = [Progress(derived=UNKNOWN)]
    session.covered = max(session.covered, end)
