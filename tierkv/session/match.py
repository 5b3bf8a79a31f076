"""Matches: the longest loadable prefix of a prompt, leased while the match is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv import views
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, LayoutError
from tierkv.layout import GroupKind
from tierkv.mover.find import find
from tierkv.mover.layers import LayerLoad
from tierkv.mover.load import UNKNOWN, LoadPlan, load
from tierkv.session.leased import NEED_ALL, LeasedPrefix, make_query
from tierkv.session.worth import behind
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from tierkv.abc import View

__all__ = ["LoadResult", "Match"]

_REPLANS = 8


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load put into the view.

    Attributes:
        tokens: Leading tokens that are in place, verified; with ``start``, those that were there
            before it are counted, too, as the caller vouches for them.
        by_tier: The tokens loaded by tier (the slowest one that a block came from).
        reason: Why it is less than was matched; None if it is all. SLOWER: recomputing the rest
            takes less time than loading it; DEADLINE: it did not come, or could not, in time.
        rule: What the cost model says of the rest, if that is the reason.
    """

    tokens: int
    by_tier: dict[str, int]
    reason: MissReason | None = None
    rule: str = ""


class Match(LeasedPrefix):
    """An open match: ``async with session.match(token_ids) as match``.

    Entering waits for the session's turn, hashes what is new and takes a lease: what
    :attr:`tokens` promises stays loadable until the match is left. No bytes move yet.

    Attributes:
        tokens: Tokens of the loadable prefix; with ``start``, those before it are counted, too,
            as the caller vouches for them.
        reason: Why it is not longer; None if it covers every full block of the prompt.
        worth: Tokens of it that :meth:`load` is expected to bring: fewer where a tier is slower
            than recomputing, which is known once :meth:`Session.computed` told the speed.
        rule: Why :attr:`worth` is less than :attr:`tokens`; empty if it is not.
    """

    # ------------------------------------------------------------------ loading

    def plan(self, into: View, tokens: int | None = None, first: int = 0) -> LoadPlan:
        """Start a load of what is worth loading of the leased prefix into a view.

        Args:
            into: Where it goes.
            tokens: All of the prefix, or what is worth it; None takes what is worth it.
            first: First block to load; those before it are in the view already.

        Raises:
            ClosedError: if the match is not open.
            LayoutError: if the view does not fit the layout, has no room for the matched tokens,
                or lets two of them share memory.
        """
        if not self._open or self._lease is None:
            raise ClosedError("this match is not open: use it inside its 'async with'")
        session = self._session
        session.check_open()
        state, begin = session.state, first * session.space.block_tokens
        views.check(into, session.space.layout, self.tokens, writing=True, start=begin)
        found, lease = self._found, self._lease
        if self._part is not None and self._weighed == first:
            found, lease = self._part
        if tokens is not None and tokens != found.tokens:
            if tokens != self.tokens:
                raise LayoutError(
                    f"tokens is {self.tokens} (match.tokens) or {self.worth} (match.worth), "
                    f"not {tokens!r:.80}"
                )
            found, lease = self._found, self._lease
        found = session.runtime.prefetcher.demanded(behind(found, first), lossy=session.lossy)
        exact = not session.lossy
        plan = LoadPlan(state.space, state.root, self._keys, found, lease, into, first, exact)
        if first and session.lossy:
            plan.progress.derived = UNKNOWN  # nobody tells how the KV before it came about
        self.note(plan.progress)
        return plan

    async def load(
        self, into: View, *, start: int | None = None, deadline: float | str | None = None
    ) -> LoadResult:
        """Copy the matched prefix, or what is missing of it, into the caller's memory.

        Args:
            into: Where token 0 onwards goes. It need back nothing before ``start`` with memory.
            start: First token to load, the first one of a block (or the end of the prompt): what
                is before it is in place already. That is neither read nor written, and costs the
                load nothing; windows and states lack nothing that lies before it. None: what the
                match was opened with.
            deadline: Seconds (or text such as ``"150ms"``) after which no further block is waited
                for.

        Returns:
            How many leading tokens are in place, counted from token 0. Damage, lost files and
            failing tiers shorten the result; they raise nothing. So does the cost: where the
            speed of prefill is known (:meth:`Session.computed`), what a tier brings more slowly
            than it is recomputed is not loaded (see :func:`tierkv.decisions.cost.choose`), and
            with a deadline neither is what cannot come in time as far as is known.

        Raises:
            ClosedError: if the match or the engine is closed.
            LayoutError: if the view does not fit the layout, or no block begins at ``start``, or it
                is before the start of the match.
            LoadIncomplete: if a tier hangs while it reads straight into a view made with
                ``owned=True``: the read may land at any time, so drop the view.

        In a space with windows or recurrent states a failure may leave a shorter prefix that has
        to be loaded anew; tokens behind the reported ones may then have been written. Where the
        state of ``start`` itself may have been overwritten, the result is 0 tokens.

        What a session with ``fidelity="lossy"`` stores after a match or load from a ``start`` on
        counts as derived: the engine cannot know how the KV before ``start`` came about.

        Cancellation: at most one slice of a copy (32 MiB) is waited for, then the cancellation is
        re-raised; nothing writes into the view after that.
        """
        core = self._session.runtime.core
        began = core.clock()
        until = None if deadline is None else began + parse_duration(deadline)
        plan = self.plan(into, first=await self.begin(start, until))
        await load(core, self._session.runtime.fetcher, [plan], until)
        plan = await self.replan(plan, until)
        self.observe_load(plan, core.clock() - began)
        return self.result(plan)

    async def begin(self, start: int | None, until: float | None) -> int:
        """Weigh a load from token ``start`` on, unless that was done; the block that it is.

        Raises:
            LayoutError: if no block begins at ``start``, or it was not looked up.
        """
        first = self._first if start is None else self._block_at(start)
        if first < self._first:
            begin = self._first * self._session.space.block_tokens
            raise LayoutError(
                f"this match was opened with start={begin}: nothing before it was looked up, so "
                f"that no load can start at {start}"
            )
        costs, space = self._session.runtime.core.decisions.costs, self._session.space
        if until is not None or (first != self._weighed and costs.speed(space.fingerprint)):
            await self.weigh(until, first)
        return first

    async def replan(self, plan: LoadPlan, until: float | None) -> LoadPlan:
        """Find a shorter prefix where a failure left windows or states uncovered."""
        groups = plan.space.layout.groups
        failure = plan.progress.reason
        if failure is None or all(g.kind in NEED_ALL for g in groups):
            return plan
        core, size = self._session.runtime.core, plan.space.block_tokens
        spilled = False
        for _ in range(_REPLANS):
            spilled |= plan.progress.spilled and plan.progress.reason is not None
            if plan.progress.reason in (None, MissReason.DEADLINE):
                break
            keys = self._keys[: plan.progress.blocks]
            self._release()
            query = make_query(self._session, keys, len(keys) * size, start=self._first)
            self._take(await find(core, query))
            if not self._open:  # left meanwhile, which knew nothing of this lease
                self._release()
            plan = self.plan(plan.view, self.tokens, plan.first)
            await load(core, self._session.runtime.fetcher, [plan], until)
        if plan.progress.reason is not None:
            plan.progress.blocks = plan.first
            plan.progress.by_tier.clear()
        states = any(g.kind is GroupKind.STATE for g in groups)
        if spilled and states and plan.progress.blocks <= plan.first:
            # what was before it is there still, but perhaps not the state at its end
            plan.first = plan.progress.blocks = 0
        # it is less than was matched, whatever the last attempt found
        plan.progress.reason = plan.progress.reason or failure
        return plan

    def result(self, plan: LoadPlan) -> LoadResult:
        """What a finished plan put in place."""
        progress, size = plan.progress, plan.space.block_tokens
        tokens = max(plan.first * size, min(progress.blocks * size, plan.found.tokens))
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
        tokens = sum(plan.progress.by_tier.values())
        if speed and tokens:
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
            LayoutError: if the view does not fit the layout, ``tokens`` is another number, or the
                match was opened with a ``start``: layers come from token 0 on.
        """
        if self._first:
            raise LayoutError("layers come from token 0 on: open a match without start for them")
        wanted = self.tokens if tokens is None else tokens
        layers = LayerLoad(self._session.runtime.core, self.plan(into, wanted))
        self._layers.append(layers)
        return layers
