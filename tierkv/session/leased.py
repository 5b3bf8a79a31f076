"""Prefixes that are looked up and leased: what a match is before any byte moves."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING

from tierkv.blocks import as_token_ids
from tierkv.decisions.types import Found, GroupRule, MissReason, Query
from tierkv.errors import ClosedError, LayoutError
from tierkv.layout import GroupKind
from tierkv.mover.find import find, tokens_by_tier
from tierkv.mover.lease import Lease
from tierkv.session.lineage import begin
from tierkv.session.tails import with_tail
from tierkv.session.worth import leading, outline, weigh

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from tierkv.blocks import BlockKey, KeyChain, Media
    from tierkv.decisions.cost import LoadChoice, Run
    from tierkv.mover.layers import LayerLoad
    from tierkv.mover.load import Progress
    from tierkv.session.handle import Session

__all__ = ["HASH_INLINE_TOKENS", "NEED_ALL", "LeasedPrefix", "follow", "make_query"]

HASH_INLINE_TOKENS = 8192
"""Most new tokens that are hashed on the loop: about a millisecond."""
NEED_ALL = (GroupKind.FULL, GroupKind.LATENT)
"""Groups of which a prefix needs every block."""


def make_query(
    session: Session, keys: Sequence[BlockKey], tokens: int, *, touch: bool = True, start: int = 0
) -> Query:
    """The lookup for these blocks, from number ``start`` on, with this session's rights."""
    space = session.space
    return Query(
        keys=tuple(keys),
        groups=tuple(GroupRule(g.kind, g.window) for g in space.layout.groups),
        block_tokens=space.block_tokens,
        tokens=tokens,
        lossy=session.lossy,
        ttl=session.ttl,
        touch=touch,
        start=start,
    )


class LeasedPrefix:
    """What :class:`~tierkv.session.Match` is before it loads: a lookup, its lease, its worth."""

    def __init__(
        self,
        session: Session,
        token_ids: Sequence[int],
        media: Sequence[Media] = (),
        start: int = 0,
    ) -> None:
        self.tokens = 0
        self.reason: MissReason | None = None
        self.worth = 0
        self.rule = ""
        self._session = session
        self._ids = as_token_ids(token_ids)
        self._media = media
        self._first = self._block_at(start)  # what is before it is in place
        self._keys: tuple[BlockKey, ...] = ()
        self._open = False
        self._found = Found(0, 0, (), 0, None)
        self._lease: Lease | None = None
        self._runs: tuple[int, tuple[Run, ...]] | None = None  # first block of the outline, and it
        self._weighed = 0  # first block of what was weighed last
        self._part: tuple[Found, Lease] | None = None  # what of that is worth it, if not all is
        self._also: list[Lease] = []
        self._layers: list[LayerLoad] = []
        self._afresh = False  # whether the next load is the first into memory that holds nothing

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<Match {state}: {self.tokens} of {len(self._ids)} tokens>"

    async def __aenter__(self) -> Self:
        session = self._session
        session.check_open()
        if self._open:
            raise ClosedError("this match is open already")
        core = session.runtime.core
        start = core.clock()
        await session.begin_turn()
        try:
            chain, shared = await follow(session, self._ids, self._media)
            self._keys, tokens = with_tail(session, chain, self._first)
            query = make_query(session, self._keys, tokens, start=self._first)
            self._take(await find(core, query))
            self._afresh = begin(session, self._first, self.tokens)
            if core.decisions.costs.speed(session.space.fingerprint):
                await self.weigh(first=self._first)
            session.check_open()  # another task may have left it meanwhile
        except BaseException:
            self._release()
            session.end_turn()
            raise
        self._open, self._layers = True, []
        session.matches.add(self)
        prefetcher = session.runtime.prefetcher
        prefetcher.arrived(session.state, chain.keys, self._found.parts, session.lossy)
        if session.runtime.recorder is not None:
            full, tokens = self._keys[: len(chain.keys)], len(self._ids)
            session.runtime.recorder.arrived(session.state, full, tokens, start)
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
        """Give the lease and the turn back. Idempotent; no await.

        A copy that another task has under way for this match keeps the lease to its end.
        """
        if not self._open:
            return
        self._open = False
        for layers in self._layers:
            layers.close()
        self._release()
        session = self._session
        session.matches.discard(self)
        session.end_turn()
        core = session.runtime.core
        # layer-wise loads read ranges, which leaves the parts where they are
        if not self._layers or core.closed or not any(p.blocks for p in session.lineage):
            return
        if any(core.levels[p.tier].memory is None for p in self._found.parts):
            session.promote(self._keys)

    def note(self, load: Progress) -> None:
        """Note a load: what was in place before is over, unless it is that of another match."""
        if self._afresh:
            self._session.lineage = []
            self._afresh = False
        self._session.lineage.append(load)

    def _take(self, found: Found) -> None:
        self._found = found
        self._lease = Lease(self._session.runtime.core, found.lease)
        self.tokens = self.worth = found.tokens
        self.reason = found.reason
        self.rule, self._runs, self._weighed, self._part = "", None, self._first, None

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        for each in ([lease] if lease is not None else []) + self._also:
            each.release()
        self._also.clear()

    async def weigh(self, until: float | None = None, first: int = 0) -> None:
        """Find out how much of the prefix is worth loading, and fits the time.

        Args:
            until: Deadline on the core's clock, or None.
            first: First block to load: those before it are in place, and cost nothing.
        """
        core, space = self._session.runtime.core, self._session.space
        if self._lease is None:
            return  # not open: whoever loads is told
        if self._runs is None or self._runs[0] != first:
            self._runs = first, await outline(core, space, self._found, first)
        runs = self._runs[1]
        if self._lease is None:
            return
        part: tuple[Found, Lease] | None = None
        worth, rule = self.tokens, ""
        if runs:
            choice = weigh(core, space, self._found, runs, until, first)
            if choice.reason is not None:
                part, rule = (leading(self._found, choice), self._lease), choice.rule
                loose = any(g.kind not in NEED_ALL for g in space.layout.groups)
                if choice.blocks > first and loose:
                    part = await self._shorter(choice)
                worth = part[0].tokens
        self.worth, self.rule, self._weighed, self._part = worth, rule, first, part

    async def _shorter(self, choice: LoadChoice) -> tuple[Found, Lease]:
        """Look a shorter prefix up: it needs other windows and states."""
        core, keys = self._session.runtime.core, self._keys[: choice.blocks]
        start = self._first
        query = make_query(self._session, keys, choice.tokens, touch=False, start=start)
        found = await find(core, query)
        lease = Lease(core, found.lease)
        self._also.append(lease)
        if self._lease is None:  # left meanwhile, which knew nothing of this one
            self._release()
        return replace(found, reason=choice.reason), lease

    def _block_at(self, start: int) -> int:
        """Number of the block that begins at a token (a prompt's end counts as a beginning)."""
        size = self._session.space.block_tokens
        try:
            token = index(start)
        except TypeError:
            raise LayoutError(f"start must be a token index, not {start!r:.80}") from None
        if token % size or not 0 <= token <= len(self._ids):
            raise LayoutError(
                f"start must be a multiple of {size} (block_tokens) from 0 to {len(self._ids)} "
                f"(the prompt), not {token}"
            )
        return token // size

    def _observe(self, shared: int, start: float) -> None:
        core = self._session.runtime.core
        space = self._session.space
        found, begin = self._found, self._first * space.block_tokens
        by_tier = tokens_by_tier(core, found, space.block_tokens)
        core.observer.lookup(
            requested=len(self._ids) - begin,
            reusable=max(shared // space.block_tokens * space.block_tokens - begin, 0),
            matched=found.tokens - begin,
            by_tier=by_tier,
            reason=found.reason.value if found.reason else None,
        )
        core.observer.operation(op="match", tier="", seconds=core.clock() - start)


async def follow(
    session: Session, token_ids: Sequence[int], media: Sequence[Media] = ()
) -> tuple[KeyChain, int]:
    """Make ``token_ids`` the session's history.

    Returns:
        The chain, which stays as it is at least until the next await, and how many of its tokens
        the session had already.
    """
    state = session.state
    chain = state.chain
    token_ids = as_token_ids(token_ids)
    new = len(token_ids) - len(chain.tokens)
    if new <= HASH_INLINE_TOKENS and len(token_ids) <= 8 * HASH_INLINE_TOKENS:
        return chain, state.follow(token_ids, media)
    # in a thread on a copy: whoever reads the history meanwhile sees all of it or nothing
    longer = chain.fork()
    shared = await session.runtime.core.workers.run(longer.follow, token_ids, media)
    if state.chain is chain:  # else it was cleared meanwhile
        state.adopt(longer, shared)
    return longer, shared
