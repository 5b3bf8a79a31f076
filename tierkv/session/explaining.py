"""Why a block of a prompt would be loaded from where it is, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.decisions.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import PartState
    from tierkv.mover.core import Core
    from tierkv.session.table import SessionState

__all__ = ["BlockReport", "explain"]


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Where one block of a prompt is, or why it is nowhere.

    Attributes:
        index: Number of the block.
        start_token: Its first token.
        end_token: One past its last token.
        tier: Fastest tier in which a prefix load would find it, or None.
        chain: Codec chain of that copy, e.g. ``"raw"``, ``"int8+zstd"``.
        exact: Whether its KV is exact.
        reason: Why it would not be loaded; None if it would.
        about: Tier that the reason is about, if it is about one.
        ago: Seconds since the reason arose, if known.
    """

    index: int
    start_token: int
    end_token: int
    tier: str | None
    chain: str | None
    exact: bool
    reason: MissReason | None
    about: str | None = None
    ago: float | None = None

    def __str__(self) -> str:
        if self.reason is None:
            return f"block {self.index}: {self.tier}, {self.chain}"
        where = f" in {self.about}" if self.about else ""
        when = f" {self.ago:.0f} s ago" if self.ago is not None else ""
        return f"block {self.index}: {self.reason.value}{when}{where}"


def explain(
    core: Core, session: SessionState, token_ids: Sequence[int] | None, *, lossy: bool
) -> list[BlockReport]:
    """Tell, per block of a prompt (or of the session's history), where it is; changes nothing."""
    chain = session.chain
    if token_ids is not None:
        chain = chain.fork()
        chain.follow(token_ids)
    groups, size = len(session.space.layout.groups), session.space.block_tokens
    spans: list[tuple[BlockKey | None, int, int]] = [
        (key, index * size, (index + 1) * size) for index, key in enumerate(chain.keys)
    ]
    done = len(chain.keys) * size
    if done < len(chain.tokens):
        tail = session.tail
        ours = tail is not None and tail.tokens == chain.tokens[done:].tobytes()
        key = tail.key if tail is not None and ours else None
        spans.append((key, done, len(chain.tokens)))
    return [
        _report(core, index, *span, groups=groups, lossy=lossy) for index, span in enumerate(spans)
    ]


def _report(
    core: Core,
    index: int,
    key: BlockKey | None,
    start: int,
    end: int,
    *,
    groups: int,
    lossy: bool,
) -> BlockReport:
    if key is None:
        return BlockReport(index, start, end, None, None, True, MissReason.NEVER_STORED)
    now = core.clock()
    worst: tuple[PartId, PartState] | None = None
    for group in range(groups):
        part = part_id(key, group)
        state = core.decisions.state(part, now)
        if worst is None or _slower(state, worst[1]):
            worst = (part, state)
    assert worst is not None
    part, state = worst
    usable = [
        tier
        for tier, lossless in zip(state.tiers, state.lossless, strict=True)
        if lossy or (lossless and state.exact)
    ]
    if not usable:
        reason = MissReason.FIDELITY if state.tiers else state.reason
        about = core.levels[state.tier].name if state.tier is not None else None
        return BlockReport(index, start, end, None, None, state.exact, reason, about, state.ago)
    level = core.levels[usable[0]]
    chain = core.chain_of(level, part, state.generation) or level.chain
    return BlockReport(index, start, end, level.name, chain, state.exact, None)


def _slower(state: PartState, than: PartState) -> bool:
    return (not state.tiers, state.tiers[:1]) > (not than.tiers, than.tiers[:1])
