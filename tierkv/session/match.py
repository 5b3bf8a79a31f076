"""Matches: the longest loadable prefix of a prompt, leased while the match is open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tierkv import views
from tierkv.blocks import as_token_ids
from tierkv.decisions.types import Found, GroupRule, MissReason, Query
from tierkv.errors import ClosedError, LayoutError
from tierkv.layout import GroupKind
from tierkv.mover.find import find, tokens_by_tier
from tierkv.mover.layers import LayerLoad
from tierkv.mover.lease import Lease
from tierkv.mover.load import LoadPlan, load
from tierkv.session.tails import with_tail
from tierkv.session.worth import leading, outline, weigh
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierkv.abc import View
    from tierkv.blocks import BlockKey, KeyChain, Media
    from tierkv.decisions.cost import LoadChoice, Run
    from tierkv.session.handle import Session

__all__ = ["HASH_INLINE_TOKENS", "LoadResult", "Match", "follow", "make_query"]

HASH_INLINE_TOKENS = 8192
"""Most new tokens that are hashed on the loop: about a millisecond."""
_REPLANS = 8
_NEED_ALL = (GroupKind.FULL, GroupKind.LATENT)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load put into the view.

    Attributes:
        tokens: Leading tokens that are in place, verified.
        by_tier: Those tokens by tier (the slowest one that a block came from).
        reason: Why it is less than was matched; None if it is all. SLOWER: recomputing the rest
            takes less time than loading it; DEADLINE: it did not come, or could not, in time.
        rule: What the cost model says of the rest, if that is the reason.
    """

    tokens: int
    by_tier: dict[str, int]
    reason: MissReason | None = None
    rule: str = ""


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
        worth: Tokens of it that :meth:`load` is expected to bring: fewer where a tier is slower
            than recomputing, which is known once :meth:`Session.computed` told the speed.
        rule: Why :attr:`worth` is less than :attr:`tokens`; empty if it is not.
    """

    def __init__(
        self, session: Session, token_ids: Sequence[int], media: Sequence[Media] = ()
    ) -> None:
        self.tokens = 0
        self.reason: MissReason | None = None
        self.worth = 0
        self.rule = ""
        self._session = session
        self._ids = as_token_ids(token_ids)
        self._media = media
        self._keys: tuple[BlockKey, ...] = ()
        self._open = False
        self._found = Found(0, 0, (), 0, None)
        self._lease: Lease | None = None
        self._runs: tuple[Run, ...] = ()
        self._part: tuple[Found, Lease] | None = None  # what is worth loading, if it is not all
        self._also: list[Lease] = []
        self._layers: list[LayerLoad] = []

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<Match {state}: {self.tokens} of {len(self._ids)} tokens>"

    async def __aenter__(self) -> Match:
        session = self._session
        session.check_open()
        if self._open:
            raise ClosedError("this match is open already")
        core = session.runtime.core
        start = core.clock()
        await session.begin_turn()
        try:
            chain, shared = await follow(session, self._ids, self._media)
            session.lineage = []
            self._keys, tokens = with_tail(session, chain)
            self._take(await find(core, make_query(session, self._keys, tokens)))
            if core.decisions.costs.speed(session.space.fingerprint):
                await self.weigh()
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
        far = any(core.levels[p.tier].memory is None for p in self._found.parts)
        if far and not core.closed and self._layers and any(p.blocks for p in session.lineage):
            session.promote(self._keys)

    def _take(self, found: Found) -> None:
        self._found = found
        self._lease = Lease(self._session.runtime.core, found.lease)
        self.tokens = self.worth = found.tokens
        self.reason = found.reason
        self.rule, self._runs, self._part = "", (), None

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        for each in ([lease] if lease is not None else []) + self._also:
            each.release()
        self._also.clear()

    async def weigh(self, until: float | None = None) -> None:
        """Find out how much of the prefix is worth loading, and fits the time.

        Args:
            until: Deadline on the core's clock, or None.
        """
        core, space = self._session.runtime.core, self._session.space
        if self._lease is None:
            return  # not open: whoever loads is told
        if not self._runs:
            self._runs = await outline(core, space, self._found)
        if not self._runs or self._lease is None:
            return
        choice = weigh(core, space, self._found, self._runs, until)
        if choice.reason is None:
            self.worth, self.rule, self._part = self.tokens, "", None
            return
        part = leading(self._found, choice), self._lease
        if choice.blocks and any(g.kind not in _NEED_ALL for g in space.layout.groups):
            part = await self._shorter(choice)
        self.worth, self.rule, self._part = part[0].tokens, choice.rule, part

    async def _shorter(self, choice: LoadChoice) -> tuple[Found, Lease]:
        """Look a shorter prefix up: it needs other windows and states."""
        core, keys = self._session.runtime.core, self._keys[: choice.blocks]
        query = make_query(self._session, keys, choice.tokens, touch=False)
        found = await find(core, query)
        lease = Lease(core, found.lease)
        self._also.append(lease)
        if self._lease is None:  # left meanwhile, which knew nothing of this one
            self._release()
        return replace(found, reason=choice.reason), lease

    def _observe(self, shared: int, start: float) -> None:
        core = self._session.runtime.core
        space = self._session.space
        found = self._found
        by_tier = tokens_by_tier(core, found, space.block_tokens)
        core.observer.lookup(
            requested=len(self._ids),
            reusable=shared // space.block_tokens * space.block_tokens,
            matched=found.tokens,
            by_tier=by_tier,
            reason=found.reason.value if found.reason else None,
        )
        core.observer.operation(op="match", tier="", seconds=core.clock() - start)

    # ------------------------------------------------------------------ loading

    def plan(self, into: View, tokens: int | None = None) -> LoadPlan:
        """Start a load of what is worth loading of the leased prefix into a view.

        Args:
            into: Where it goes.
            tokens: All of the prefix, or what is worth it; None takes what is worth it.

        Raises:
            ClosedError: if the match is not open.
            LayoutError: if the view does not fit the layout, has no room for the matched tokens,
                or lets two of them share memory.
        """
        if not self._open or self._lease is None:
            raise ClosedError("this match is not open: use it inside its 'async with'")
        session = self._session
        session.check_open()
        views.check(into, session.space.layout, self.tokens, writing=True)
        state = session.state
        found, lease = self._part or (self._found, self._lease)
        if tokens is not None and tokens != found.tokens:
            if tokens != self.tokens:
                raise LayoutError(
                    f"tokens is {self.tokens} (match.tokens) or {self.worth} (match.worth), "
                    f"not {tokens!r:.80}"
                )
            found, lease = self._found, self._lease
        found = session.runtime.prefetcher.demanded(found, lossy=session.lossy)
        plan = LoadPlan(state.space, state.root, self._keys, found, lease, into)
        session.lineage.append(plan.progress)
        return plan

    async def load(self, into: View, *, deadline: float | str | None = None) -> LoadResult:
        """Copy the matched prefix into the caller's memory.

        Args:
            into: Where token 0 onwards goes.
            deadline: Seconds (or text such as ``"150ms"``) after which no further block is waited
                for.

        Returns:
            How many leading tokens are in place. Damage, lost files and failing tiers shorten
            the result; they raise nothing. So does the cost: where the speed of prefill is known
            (:meth:`Session.computed`), what a tier brings more slowly than it is recomputed is
            not loaded (see :func:`tierkv.decisions.cost.choose`), and with a deadline neither is
            what cannot come in time as far as is known.

        Raises:
            ClosedError: if the match or the engine is closed.
            LayoutError: if the view does not fit the layout.
            LoadIncomplete: if a tier hangs while it reads straight into a view made with
                ``owned=True``: the read may land at any time, so drop the view.

        In a space with windows or recurrent states a failure may leave a shorter prefix that has
        to be loaded anew; tokens behind the reported ones may then have been written.

        Cancellation: at most one slice of a copy (32 MiB) is waited for, then the cancellation is
        re-raised; nothing writes into the view after that.
        """
        core = self._session.runtime.core
        start = core.clock()
        until = None if deadline is None else start + parse_duration(deadline)
        if until is not None:
            await self.weigh(until)
        plan = self.plan(into)
        await load(core, self._session.runtime.fetcher, [plan], until)
        plan = await self.replan(plan, until)
        self.observe_load(plan, core.clock() - start)
        return self.result(plan)

    async def replan(self, plan: LoadPlan, until: float | None) -> LoadPlan:
        """Find a shorter prefix where a failure left windows or states uncovered."""
        groups = plan.space.layout.groups
        failure = plan.progress.reason
        if failure is None or all(g.kind in _NEED_ALL for g in groups):
            return plan
        core, size = self._session.runtime.core, plan.space.block_tokens
        for _ in range(_REPLANS):
            if plan.progress.reason in (None, MissReason.DEADLINE):
                break
            keys = self._keys[: plan.progress.blocks]
            self._release()
            self._take(await find(core, make_query(self._session, keys, len(keys) * size)))
            if not self._open:  # left meanwhile, which knew nothing of this lease
                self._release()
            plan = self.plan(plan.view, self.tokens)
            await load(core, self._session.runtime.fetcher, [plan], until)
        if plan.progress.reason is not None:
            plan.progress.blocks = 0
            plan.progress.by_tier.clear()
        # it is less than was matched, whatever the last attempt found
        plan.progress.reason = plan.progress.reason or failure
        return plan

    def result(self, plan: LoadPlan) -> LoadResult:
        """What a finished plan put in place."""
        progress = plan.progress
        tokens = min(progress.blocks * plan.space.block_tokens, plan.found.tokens)
        reason, rule = progress.reason, ""
        if reason is None and plan.found.blocks < self._found.blocks:
            reason, rule = plan.found.reason, self.rule
        return LoadResult(tokens, dict(progress.by_tier), reason, rule)

    def observe_load(self, plan: LoadPlan, seconds: float) -> None:
        """Tell the observer of a load."""
        core = self._session.runtime.core
        names = list(plan.progress.by_tier) or [""]
        order = [level.name for level in core.levels]
        slowest = max(names, key=lambda n: order.index(n) if n in order else -1)
        core.observer.operation(op="load", tier=slowest, seconds=seconds)
        speed = core.decisions.costs.speed(plan.space.fingerprint)
        if speed and plan.progress.blocks:
            tokens = min(plan.progress.blocks * plan.space.block_tokens, plan.found.tokens)
            core.observer.saved(seconds=max(tokens / speed - seconds, 0.0))

    def layers(self, into: View, *, tokens: int | None = None) -> LayerLoad:
        """Iterate over the model's layers as they come into place, in order.

        ``async for layer in match.layers(into=kv)``: when ``layer`` is yielded, all its matched
        tokens are verified and in the view. Not atomic: it raises
        :class:`~tierkv.errors.LoadIncomplete` if a layer cannot be had; then drop the view.

        Args:
            into: Where token 0 onwards goes.
            tokens: :attr:`worth` to bring only what is worth loading; None brings all of
                :attr:`tokens`, whatever it costs: what comes is always what was asked for.

        Raises:
            ClosedError: if the match is not open.
            LayoutError: if the view does not fit the layout, or ``tokens`` is another number.
        """
        wanted = self.tokens if tokens is None else tokens
        layers = LayerLoad(self._session.runtime.core, self.plan(into, wanted))
        self._layers.append(layers)
        return layers


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
