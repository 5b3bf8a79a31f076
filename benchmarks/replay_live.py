"""A live engine that is asked for what a trace asks for, and records it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import tierkv

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv.traces import TraceRequest

__all__ = ["TRACE", "Live", "run_live"]

TRACE: Final = "trace.jsonl.zst"
_SIZE: Final = 16  # tokens of a block here, whatever they are in the trace
_LAYOUT: Final = tierkv.Layout.uniform(layers=1, heads=1, dim=8, dtype="float32")
_FRAME: Final = 8192  # bytes that a block takes in the first tier


class Live(NamedTuple):
    """What came of it.

    Attributes:
        tokens: Tokens found.
        near: Tokens found in the first tier.
        high: Used share of a tier above which the engine makes room.
        low: Used share down to which it does.
    """

    tokens: int
    near: int
    high: float
    low: float


def _tokens(request: TraceRequest) -> list[int]:
    """Token ids of the same prefixes: each block of the trace gives the ids of one block here."""
    return [(key * _SIZE + i) & 0x7FFFFFFF for key in request.keys for i in range(_SIZE)]


async def run_live(requests: Sequence[TraceRequest], blocks: int, folder: Path) -> Live:
    """Look up, load and store request by request, with RAM for so many blocks above NVMe.

    Args:
        requests: What is asked for.
        blocks: Blocks that the first tier holds.
        folder: Where the second tier and the recorded trace (:data:`TRACE`) go.
    """
    import torch

    most = max(len(request.keys) for request in requests) * _SIZE
    kv = tierkv.views.dense([(torch.zeros(1, most, 8), torch.zeros(1, most, 8))])
    space = tierkv.Space(tierkv.Identity(model="m", weights="1"), _LAYOUT, block_tokens=_SIZE)
    tiers = [
        tierkv.Tier("host", blocks * _FRAME),
        tierkv.Tier("nvme", "2GiB", path=str(folder / "nvme")),
    ]
    found = near = 0
    async with tierkv.open(tiers=tiers, space=space, trace=folder / TRACE) as engine:
        for request in requests:
            ids = _tokens(request)
            async with engine.session(request.session) as session:
                async with session.match(ids) as match:
                    loaded = await match.load(into=kv)
                    found += match.tokens
                    near += loaded.by_tier.get("host", 0)
                await session.store(ids, kv, start=loaded.tokens)
        tier = engine.config.tiers[0]
    return Live(found, near, tier.high, tier.low)
