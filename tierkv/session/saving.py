"""Storing a session's KV: from token ids and a view to parts, and back to outcomes per block."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.blocks import part_id, tail_key
from tierkv.decisions.coding_rules import Age
from tierkv.decisions.types import EvictReason, SkipReason
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind
from tierkv.mover.plans import NewPart, StorePlan
from tierkv.mover.slices import SLICE, sliced
from tierkv.session.lineage import resume
from tierkv.session.table import Tail

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import Device, Event, View
    from tierkv.blocks import BlockKey, KeyChain, PartId
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.session.handle import Session

__all__ = [
    "BlockOutcome",
    "Saving",
    "Source",
    "StoreResult",
    "finish_store",
    "plan_store",
    "replan_store",
    "source_of",
]

_STRICT = (GroupKind.FULL, GroupKind.LATENT)
_new: Final = tuple.__new__  # a named tuple's own constructor takes twice as long


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


class Source(NamedTuple):
    """The caller's memory.

    Attributes:
        view: The KV.
        device: Device whose memory it is in; None: plain host memory.
        ready: Behind the work that fills it; None: it is filled.
    """

    view: View
    device: Device | None = None
    ready: Event | None = None


def source_of(core: Core, view: View, ready: Event | None = None) -> Source:
    """Find where a view is, and what has to be done before it can be read.

    Args:
        core: Knows the devices.
        view: The KV.
        ready: What has to be done, if the caller knows; None: whatever the calling thread has
            submitted to the device by now.

    Raises:
        ConfigError: if no plug-in knows such memory.
    """
    tensor = view.anchor()
    tiers = [level.resident.device for level in core.levels if level.resident is not None]
    own = (device for device in tiers if tensor is not None and device.owns(tensor))
    device = next(own, None) or core.devices.of(view)
    if device is not None and ready is None:
        ready = device.current().record()
    return Source(view, device, ready)


class Saving(NamedTuple):
    """One store of one session, planned.

    Attributes:
        plan: What to store.
        keys: Keys of the full blocks of the history, as it was then.
        total: Tokens of the history.
        first: Block at which the store starts.
        tail: The private partial block, if it is stored too.
    """

    plan: StorePlan
    keys: Sequence[BlockKey]
    total: int
    first: int
    tail: Tail | None


def plan_store(
    session: Session,
    chain: KeyChain,
    source: Source,
    start: int,
    *,
    tail: bool = False,
) -> Saving:
    """Describe a store. Looks at the chain now only; the parts are listed as they are taken.

    Args:
        session: Whose KV it is.
        chain: Key chain of the tokens in the view.
        source: The KV.
        start: First token to store; rounded down to a block.
        tail: Whether a partial block at the end is stored too.

    Raises:
        LayoutError: if ``start`` is not inside the token ids.
    """
    state = session.state
    size = state.space.block_tokens
    total = len(chain.tokens)
    if not 0 <= start <= total:
        raise LayoutError(f"start must be from 0 to {total} (the token ids), not {start}")
    resume(session, start, total // size * size)
    keys = tuple(chain.keys)
    if state.chain is chain:  # else it was cleared meanwhile
        state.kept = len(keys)
    rest = total - len(keys) * size
    partial = None
    if tail and rest:
        parent = keys[-1] if keys else state.root
        tokens = chain.tokens[len(keys) * size :].tobytes()
        media = chain.media_in(len(keys) * size, total)
        key = tail_key(parent, f"{state.tenant}\0{state.id}", tokens, media)
        partial = Tail(len(keys), parent, tokens, media, key)
    return _saving(session, source, keys, total, start // size, partial)


def _saving(
    session: Session,
    source: Source,
    keys: Sequence[BlockKey],
    total: int,
    first: int,
    tail: Tail | None,
) -> Saving:
    state = session.state
    derived = session.derived
    plan = StorePlan(
        space=state.space,
        root=state.root,
        view=source.view,
        parts=_parts(session, source.view, keys, total, first, tail),
        tenant=state.tenant,
        session=state.id,
        session_parts=tuple(state.parts()) if session.quota else (),
        fidelity=f"derived:{derived}" if derived else "exact",
        ttl=state.ttl,
        device=source.device,
        ready=source.ready,
        nbytes=_bytes_of(state.space, len(keys) - first),
        resets=session.runtime.core.resets,
    )
    return Saving(plan, keys, total, first, tail)


def _bytes_of(space: Space, blocks: int) -> int:
    per_block = [g.raw_bytes(space.block_tokens) for g in space.layout.groups if g.per_token]
    return sum(per_block) * max(0, blocks)


def _parts(
    session: Session,
    view: View,
    keys: Sequence[BlockKey],
    total: int,
    first: int,
    tail: Tail | None,
) -> Iterator[NewPart]:
    size = session.state.space.block_tokens
    for block in range(first, len(keys)):
        yield from _block_parts(session, view, keys, block, keys[block], size, total)
    if tail is not None:
        rest = total - len(keys) * size
        key, block = tail.key, len(keys)
        yield from _block_parts(session, view, keys, block, key, rest, total, private=True)


async def replan_store(session: Session, saving: Saving) -> Saving | None:
    """Start earlier where blocks that a store counted on have gone; None if they have not.

    The view holds all tokens from the first, so that what was evicted or lost meanwhile can be
    stored again.
    """
    plan, keys = saving.plan, saving.keys
    if plan.resets != session.runtime.core.resets:
        return None
    if not saving.first or not any(o.skip is SkipReason.NO_PARENT for _, o in plan.done):
        return None
    core = session.runtime.core
    strict = [n for n, group in enumerate(plan.space.layout.groups) if group.kind in _STRICT]
    async for block in sliced(range(saving.first)):
        states = [core.decisions.state(part_id(keys[block], n), core.clock()) for n in strict]
        if not all(state.tiers or state.pending for state in states):
            source = Source(plan.view, plan.device, plan.ready)
            return _saving(session, source, keys, saving.total, block, saving.tail)
    return None


def _block_parts(
    session: Session,
    view: View,
    keys: Sequence[BlockKey],
    block: int,
    key: BlockKey,
    tokens: int,
    total: int,
    *,
    private: bool = False,
) -> list[NewPart]:
    state = session.state
    size = state.space.block_tokens
    aging = session.runtime.core.decisions.compressing
    start = block * size
    before = keys[block - 1] if block else None
    out = []
    for number, group in enumerate(state.space.layout.groups):
        suffix, parent_key = number.to_bytes(2, "little"), before
        if group.kind is GroupKind.STATE and start + tokens != total:
            continue  # the view holds the state after the last token only
        if group.kind not in _STRICT:
            if not view.backs(group.layers[0].index, start, start + tokens):
                continue  # a page that slid out of the window, say: gone from the caller's memory
            parent_key = None  # windows and snapshots are of use without what came before
        part: PartId = key + suffix  # type: ignore[assignment]
        if aging and not private:
            session.runtime.core.expect(part, Age(start, total - start - tokens))
        parent = parent_key + suffix if parent_key is not None else None
        out.append(_new(NewPart, (part, parent, parent_key, number, start, tokens, private)))
    return out


async def finish_store(session: Session, saving: Saving) -> StoreResult:
    """Sum up per block; replace the private tail if a new one was stored."""
    core, plan = session.runtime.core, saving.plan
    size = plan.space.block_tokens
    by_block: dict[int, BlockOutcome] = {}
    tail_is_there = False
    async for new, outcome in sliced(plan.done):
        block = new.start // size
        tier = core.levels[outcome.tier].name if outcome.stored else None
        kind = "skipped" if outcome.skip else "stored" if outcome.stored else "present"
        known = by_block.get(block)
        if known is None or _worse(kind, known.state):
            by_block[block] = BlockOutcome(block, kind, outcome.skip, tier)
        tail_is_there = tail_is_there or (new.private and outcome.skip is None)
    if saving.tail is not None and tail_is_there:
        _replace_tail(session, saving.tail)
    session.runtime.prefetcher.ended(session.state, saving.keys)
    if session.runtime.recorder is not None:
        session.runtime.recorder.ended(session.state, saving.keys, saving.total, core.clock())
    await _tell_ages(session, saving)
    return StoreResult(tuple(by_block[b] for b in sorted(by_block)))


async def _tell_ages(session: Session, saving: Saving) -> None:
    """Tell the rules of compression how old the blocks of the session are now, in steps."""
    runtime, space = session.runtime, saving.plan.space
    core, size, groups = runtime.core, space.block_tokens, len(space.layout.groups)
    if not core.decisions.compressing:
        return
    for first in range(0, len(saving.keys), SLICE):
        keys = saving.keys[first : first + SLICE]
        core.decisions.told(keys, groups, size, first, saving.total, core.clock())
        for part in (part_id(key, group) for key in keys for group in range(groups)):
            core.ages.pop(part, None)
        await asyncio.sleep(0)
    runtime.behind.recoder.kick()


def _replace_tail(session: Session, tail: Tail) -> None:
    state, core = session.state, session.runtime.core
    if state.tail is not None and state.tail.key != tail.key:
        core.free(core.decisions.forget(state.tail_parts(), EvictReason.REPLACED, core.clock()))
    state.tail = tail
    if state.gone:  # destroyed while this was under way: nobody will ever ask for it
        core.free(core.decisions.forget(state.tail_parts(), EvictReason.REMOVED, core.clock()))
        state.tail = None


_ORDER = ("present", "stored", "skipped")


def _worse(kind: str, than: str) -> bool:
    return _ORDER.index(kind) > _ORDER.index(than)
