"""Storing a session's KV: from token ids and a view to parts, and back to outcomes per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.blocks import part_id, split_part, tail_key
from tierkv.decisions.types import EvictReason, SkipReason
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind
from tierkv.mover.plans import NewPart, StorePlan
from tierkv.session.table import Tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import View
    from tierkv.blocks import BlockKey
    from tierkv.session.handle import Session

__all__ = ["BlockOutcome", "StoreResult", "finish_store", "plan_store"]


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """What became of one block.

    Attributes:
        index: Number of the block in the prompt.
        state: ``"stored"``, ``"present"`` (it already was) or ``"skipped"``.
        reason: Why it was skipped.
        tier: Tier it was stored in, if it was.
    """

    index: int
    state: str
    reason: SkipReason | None = None
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of each block of a store, in order."""

    blocks: tuple[BlockOutcome, ...]

    @property
    def stored(self) -> int:
        """Blocks newly stored."""
        return sum(b.state == "stored" for b in self.blocks)

    @property
    def present(self) -> int:
        """Blocks that were there already."""
        return sum(b.state == "present" for b in self.blocks)

    @property
    def skipped(self) -> int:
        """Blocks that were not stored."""
        return sum(b.state == "skipped" for b in self.blocks)


def plan_store(
    session: Session, token_ids: Sequence[int], view: View, start: int, tail: bool
) -> StorePlan:
    """List the parts of a store, parents first. The session's chain must be up to date.

    Raises:
        LayoutError: if ``start`` is not inside the token ids.
    """
    state = session.state
    size = state.space.block_tokens
    if not 0 <= start <= len(token_ids):
        raise LayoutError(f"start must be from 0 to {len(token_ids)} (the token ids), not {start}")
    keys = state.chain.keys
    parts = [
        new
        for block in range(start // size, len(keys))
        for new in _block_parts(session, block, keys[block], size, len(token_ids))
    ]
    rest = len(token_ids) - len(keys) * size
    if tail and rest:
        parent = keys[-1] if keys else state.root
        tokens = state.chain.tokens[len(keys) * size :].tobytes()
        key = tail_key(parent, f"{state.tenant}\0{state.id}", tokens)
        parts += _block_parts(session, len(keys), key, rest, len(token_ids), private=True)
    derived = state.derived
    return StorePlan(
        space=state.space,
        root=state.root,
        view=view,
        parts=parts,
        tenant=state.tenant,
        session=state.id,
        session_parts=tuple(state.parts()) if session.quota else (),
        fidelity=f"derived:{derived}" if derived else "exact",
        ttl=state.ttl,
    )


def _block_parts(
    session: Session, block: int, key: BlockKey, tokens: int, total: int, *, private: bool = False
) -> list[NewPart]:
    state = session.state
    size = state.space.block_tokens
    keys = state.chain.keys
    out = []
    for number, group in enumerate(state.space.layout.groups):
        parent_key = keys[block - 1] if block else None
        if group.kind is GroupKind.STATE:
            if block * size + tokens != total:
                continue  # the view holds the state after the last token only
            parent_key = None  # a snapshot stands alone
        out.append(
            NewPart(
                part=part_id(key, number),
                parent=part_id(parent_key, number) if parent_key is not None else None,
                parent_key=parent_key,
                group=number,
                start=block * size,
                tokens=tokens,
                private=private,
            )
        )
    return out


def finish_store(session: Session, plan: StorePlan) -> StoreResult:
    """Sum up per block; replace the private tail if a new one was stored."""
    state, core = session.state, session.runtime.core
    size = state.space.block_tokens
    by_block: dict[int, BlockOutcome] = {}
    tail_key_stored: BlockKey | None = None
    for new, outcome in zip(plan.parts, plan.outcomes, strict=True):
        block = new.start // size
        tier = core.levels[outcome.tier].name if outcome.stored else None
        kind = "skipped" if outcome.skip else "stored" if outcome.stored else "present"
        known = by_block.get(block)
        if known is None or _worse(kind, known.state):
            by_block[block] = BlockOutcome(block, kind, outcome.skip, tier)
        if new.private and outcome.skip is None:
            tail_key_stored = split_part(new.part)[0]
    if tail_key_stored is not None:
        _replace_tail(session, tail_key_stored)
    return StoreResult(tuple(by_block[b] for b in sorted(by_block)))


def _replace_tail(session: Session, key: BlockKey) -> None:
    state, core = session.state, session.runtime.core
    if state.tail is not None and state.tail.key != key:
        core.free(core.decisions.forget(state.tail_parts(), EvictReason.REPLACED, core.clock()))
    keys = state.chain.keys
    begin = len(keys) * state.space.block_tokens
    state.tail = Tail(
        blocks=len(keys),
        parent=keys[-1] if keys else state.root,
        tokens=state.chain.tokens[begin:].tobytes(),
        key=key,
    )


_ORDER = ("present", "stored", "skipped")


def _worse(kind: str, than: str) -> bool:
    return _ORDER.index(kind) > _ORDER.index(than)
