"""Matches: the longest loadable prefix of a prompt, leased while the match is open."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv import views
from tierkv.blocks import part_id
from tierkv.decisions.types import GroupRule, MissReason, Query
from tierkv.errors import ClosedError
from tierkv.layout import GroupKind
from tierkv.mover.find import find
from tierkv.mover.layers import LayerLoad
from tierkv.mover.load import LoadPlan, load
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierkv.abc import View
    from tierkv.blocks import BlockKey, Media
    from tierkv.decisions.types import Found
    from tierkv.session.handle import Session

__all__ = ["LoadResult", "Match", "make_query"]

_HASH_INLINE_TOKENS = 8192
_REPLANS = 8


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load put into the view.

    Attributes:
        tokens: Leading tokens that are in place, verified.
        by_tier: Those tokens by tier (the slowest one that a block came from).
        reason: Why it is less than was matched; None if it is all.
    """

    tokens: int
    by_tier: dict[str, int]
    reason: MissReason | None = None


def make_query(
    session: Session, keys: Sequence[BlockKey], tokens: int, *, touch: bool = True
) -> Query:
    """The lookup for these blocks, with this session's rights."""
    space = session.space
    return Query(
        keys=tuple(keys),
        groups=tuple(GroupRule(g.kind, g.window) for g in space.layout.groups),
        block_tokens=space.block_tokens,
        tokens=tokens,
        lossy=session.lossy,
        ttl=session.ttl,
        touch=touch,
    )


class Match:
    """An open match: ``async with session.match(token_ids) as match``.

    Entering waits for the session's turn, hashes what is new and takes a lease: what
    :attr:`tokens` promises stays loadable until the match is left. No bytes move yet.

    Attributes:
        tokens: Tokens of the loadable prefix.
        reason: Why it is not longer; None if it covers every full block of the prompt.
    """

    def __init__(
        self, session: Session, token_ids: Sequence[int], media: Sequence[Media] = ()
    ) -> None:
        self.tokens = 0
        self.reason: MissReason | None = None
        self._session = session
        self._ids = token_ids
        self._media = media
        self._keys: tuple[BlockKey, ...] = ()
        self._found: Found | None = None
        self._layers: list[LayerLoad] = []

    def __repr__(self) -> str:
        state = "open" if self._found is not None else "closed"
        return f"<Match {state}: {self.tokens} of {len(self._ids)} tokens>"

    async def __aenter__(self) -> Match:
        session = self._session
        session.check_open()
        state, core = session.state, session.runtime.core
        start = core.clock()
        await session.begin_turn()
        try:
            shared = await follow(session, self._ids, self._media)
            state.lineage = []
            self._keys = tuple(state.chain.keys)
            tokens = len(self._keys) * state.space.block_tokens
            if self._tail_applies():
                assert state.tail is not None
                self._keys = (*self._keys[: state.tail.blocks], state.tail.key)
                tokens = state.tail.blocks * state.space.block_tokens + len(state.tail.tokens) // 4
            self._take(await find(core, make_query(session, self._keys, tokens)))
        except BaseException:
            session.end_turn()
            raise
        self._observe(shared, start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the lease and the turn back. Idempotent; no await."""
        if self._found is None:
            return
        for layers in self._layers:
            layers.close()
        self._release()
        self._session.end_turn()
        if any(plan.blocks and self._slow(plan) for plan in self._session.state.lineage):
            self._session.promote(self._keys)

    def _slow(self, plan: LoadPlan) -> bool:
        """Whether a layer-wise load left parts in a tier that only ranges were read from."""
        core = self._session.runtime.core
        return bool(self._layers) and any(
            core.levels[p.tier].memory is None for p in plan.found.parts
        )

    def _take(self, found: Found) -> None:
        self._found = found
        self.tokens = found.tokens
        self.reason = found.reason

    def _release(self) -> None:
        found, self._found = self._found, None
        if found is not None and found.lease:
            core = self._session.runtime.core
            core.free(core.decisions.release(found.lease, core.clock()))

    def _tail_applies(self) -> bool:
        """Whether the prompt goes on exactly with the session's private partial block."""
        state = self._session.state
        tail = state.tail
        if tail is None:
            return False
        size = state.space.block_tokens
        keys = state.chain.keys
        if len(keys) < tail.blocks or (keys[tail.blocks - 1] if tail.blocks else state.root) != (
            tail.parent
        ):
            return False
        if len(keys) > tail.blocks:
            known = self._session.runtime.core.decisions.state(
                part_id(keys[tail.blocks], 0), self._session.runtime.core.clock()
            )
            if known.tiers:
                return False  # the full block is there: better than a part of it
        begin = tail.blocks * size
        held = array("I")
        held.frombytes(tail.tokens)
        return state.chain.tokens[begin : begin + len(held)] == held

    def _observe(self, shared: int, start: float) -> None:
        core = self._session.runtime.core
        space = self._session.space
        found = self._found
        assert found is not None
        slowest: dict[int, int] = {}
        for part in found.parts:
            slowest[part.block] = max(slowest.get(part.block, 0), part.tier)
        by_tier: dict[str, int] = {}
        for block, tier in slowest.items():
            tokens = min(space.block_tokens, found.tokens - block * space.block_tokens)
            by_tier[core.levels[tier].name] = by_tier.get(core.levels[tier].name, 0) + tokens
        core.observer.lookup(
            requested=len(self._ids),
            reusable=shared // space.block_tokens * space.block_tokens,
            matched=found.tokens,
            by_tier=by_tier,
            reason=found.reason.value if found.reason else None,
        )
        core.observer.operation(op="match", tier="", seconds=core.clock() - start)

    # ------------------------------------------------------------------ loading

    def plan(self, into: View) -> LoadPlan:
        """Start a load of the leased prefix into a view.

        Raises:
            ClosedError: if the match is not open.
            LayoutError: if the view does not fit the layout.
        """
        if self._found is None:
            raise ClosedError("this match is not open: use it inside its 'async with'")
        self._session.check_open()
        views.check(into, self._session.space.layout)
        state = self._session.state
        plan = LoadPlan(state.space, state.root, self._keys, self._found, into)
        state.lineage.append(plan)
        return plan

    async def load(self, into: View, *, deadline: float | str | None = None) -> LoadResult:
        """Copy the matched prefix into the caller's memory.

        Args:
            into: Where token 0 onwards goes.
            deadline: Seconds (or text such as ``"150ms"``) after which no further block is waited
                for.

        Returns:
            How many leading tokens are in place. Damage, lost files and failing tiers shorten
            the result; they raise nothing.

        Raises:
            ClosedError: if the match or the engine is closed.
            LayoutError: if the view does not fit the layout.

        Cancellation: at most one slice of a copy (32 MiB) is waited for, then the cancellation is
        re-raised; nothing writes into the view after that.
        """
        core = self._session.runtime.core
        start = core.clock()
        until = None if deadline is None else start + parse_duration(deadline)
        plan = self.plan(into)
        await load(core, self._session.runtime.fetcher, [plan], until)
        plan = await self.replan(plan, until)
        self.observe_load(plan, core.clock() - start)
        return self.result(plan)

    async def replan(self, plan: LoadPlan, until: float | None) -> LoadPlan:
        """Find a shorter prefix where a failure left windows or states uncovered."""
        groups = plan.space.layout.groups
        simple = all(g.kind in (GroupKind.FULL, GroupKind.LATENT) for g in groups)
        core = self._session.runtime.core
        for _ in range(_REPLANS):
            if simple or plan.reason is None or plan.reason is MissReason.DEADLINE:
                break
            into, failure = plan.view, plan.reason
            self._release()
            size = plan.space.block_tokens
            keys = self._keys[: plan.blocks]
            found = await find(core, make_query(self._session, keys, len(keys) * size))
            self._take(found)
            plan = self.plan(into)
            await load(core, self._session.runtime.fetcher, [plan], until)
            if plan.reason is None:
                self.reason = failure
                break
        if not simple and plan.reason is not None:
            plan.blocks = 0
            plan.by_tier.clear()
        return plan

    def result(self, plan: LoadPlan) -> LoadResult:
        """What a finished plan put in place."""
        assert self._found is not None
        tokens = min(plan.blocks * plan.space.block_tokens, self._found.tokens)
        return LoadResult(tokens, dict(plan.by_tier), plan.reason)

    def observe_load(self, plan: LoadPlan, seconds: float) -> None:
        """Tell the observer of a load."""
        core = self._session.runtime.core
        names = list(plan.by_tier) or [""]
        order = [level.name for level in core.levels]
        slowest = max(names, key=lambda n: order.index(n) if n in order else -1)
        core.observer.operation(op="load", tier=slowest, seconds=seconds)

    def layers(self, into: View) -> LayerLoad:
        """Iterate over the model's layers as they come into place, in order.

        ``async for layer in match.layers(into=kv)``: when ``layer`` is yielded, all its matched
        tokens are verified and in the view. Not atomic: it raises
        :class:`~tierkv.errors.LoadIncomplete` if a layer cannot be had; then drop the view.

        Raises:
            ClosedError: if the match is not open.
            LayoutError: if the view does not fit the layout.
        """
        layers = LayerLoad(self._session.runtime.core, self.plan(into))
        self._layers.append(layers)
        return layers


async def follow(session: Session, token_ids: Sequence[int], media: Sequence[Media] = ()) -> int:
    """Make ``token_ids`` the session's history; return how many tokens were already in it."""
    state = session.state
    if len(token_ids) - len(state.chain.tokens) <= _HASH_INLINE_TOKENS:
        return state.chain.follow(token_ids, media)
    return await session.runtime.core.workers.run(state.chain.follow, token_ids, media)
