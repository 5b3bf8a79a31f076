"""Reads that the engine makes for itself: does a broken tier answer again, is a slow one faster?

Nobody waits for them, and they take only memory that is free right now.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tierkv.abc import ReadRequest
from tierkv.errors import ClosedError
from tierkv.frame import page_round
from tierkv.mover.staged import stage_nowait
from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.types import FoundPart
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level

__all__ = ["probe", "refresh"]

_PAGE = 4096
_STALE_S = 5.0  # a tier is read for its cost alone once in this time, at most
_PARTS = 8
_LOST_S = 60.0  # one that has not come back by then keeps nobody from trying again
_BYTES = 8 << 20


def probe(core: Core, level: Level) -> None:
    """Try a read of a tier whose breaker is open, if it is time for it. Called at every tick."""
    now, breaker = core.clock(), core.decisions.costs.breaker(level.index, "read")
    if level.memory is not None or breaker.closed or not breaker.admits(now):
        return
    if level.probing and now - level.probed < _LOST_S:
        return
    # not the same part each time: it may be just the one that cannot be read
    parts = list(islice(core.decisions.parts(level.index), _PARTS))
    found = parts[level.probes % len(parts)] if parts else None
    if found is None:
        # nothing to read: nobody can come to harm
        if core.decisions.admit(level.index, "read", now):
            core.decisions.sample(level.index, "read", 0, 0.0, now)
            core.watch.tell(level)
        return
    part, generation, _ = found
    _start(core, level, [ReadRequest(part, generation, 0, _PAGE)])


def refresh(core: Core, level: Level, parts: Sequence[FoundPart]) -> None:
    """Read a few parts of a slow tier, if its last read was a while ago.

    At most 8 parts and 8 MiB every 5 s and tier. They need no lease: what is being read is not
    deleted.
    """
    last = core.decisions.costs.sampled(level.index)
    if level.probing or not core.usable(level) or core.clock() - last < _STALE_S:
        return
    requests: list[ReadRequest] = []
    total, most = 0, min(_BYTES, core.window_bytes)
    for found in parts[:_PARTS]:
        length = page_round(level.backend.longest(found.nbytes))
        if requests and total + length > most:
            break
        requests.append(ReadRequest(found.part, found.generation, 0, length))
        total += length
    if requests:
        _start(core, level, requests)


def _start(core: Core, level: Level, requests: Sequence[ReadRequest]) -> None:
    level.probing, level.probes, level.probed = True, level.probes + 1, core.clock()
    try:
        core.workers.spawn(_read, core, level, requests, name="probe", lane=Lane.PREFETCH)
    except ClosedError:
        level.probing = False


async def _read(core: Core, level: Level, requests: Sequence[ReadRequest]) -> None:
    try:
        slices = stage_nowait(core.staging, [request.length for request in requests])
        if slices is None:
            return  # memory is short: another time
        try:
            into = [piece.padded[: r.length] for piece, r in zip(slices, requests, strict=True)]
            await core.read(level, requests, into)
        finally:
            for piece in slices:
                piece.release()
    finally:
        level.probing = False
