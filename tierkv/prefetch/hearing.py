"""What sessions do is told to the predictors, and what these wish for is carried out."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierkv.abc import Arrival, Departure
from tierkv.decisions.predict.recent import Recent
from tierkv.decisions.types import GroupRule, Query
from tierkv.errors import ClosedError
from tierkv.prefetch.carrying import IN_LINE, Carrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, KeyChain
    from tierkv.decisions.prefetching import Plan, Prefetching
    from tierkv.decisions.types import Found, FoundPart
    from tierkv.layout import Space
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.workers import Job

__all__ = ["Prefetcher", "SessionLike", "prefix_query", "session_number"]

_log = logging.getLogger("tierkv.prefetch")
_HOMES = 65_536


class SessionLike(Protocol):
    """What has to be known of a session to prefetch for it."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def space(self) -> Space:
        """Its space."""

    @property
    def root(self) -> BlockKey:
        """Root of its key chain."""

    @property
    def chain(self) -> KeyChain:
        """Its history."""


class _Home(NamedTuple):
    """Where chains that begin with a certain block belong."""

    space: Space
    root: BlockKey
    lossy: bool


def session_number(root: BlockKey, name: str) -> int:
    """64 bits that name a session for predictors: not 0, and equal in every run."""
    text = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(root + text, digest_size=8).digest(), "little") | 1


def prefix_query(space: Space, keys: Sequence[BlockKey], *, lossy: bool, touch: bool) -> Query:
    """The lookup of a prefix that is to be prefetched.

    Args:
        space: Space of the blocks.
        keys: Their keys, from the first.
        lossy: Whether lossy copies are of use.
        touch: Whether a request for it is there. It counts as a use then; no life is prolonged.
    """
    return Query(
        keys=tuple(keys),
        groups=tuple(GroupRule(g.kind, g.window) for g in space.layout.groups),
        block_tokens=space.block_tokens,
        tokens=len(keys) * space.block_tokens,
        lossy=lossy,
        ttl=0.0,
        touch=touch,
        ahead=True,
    )


class Prefetcher:
    """Hears what sessions do, and has the wishes of the predictors carried out.

    Attributes:
        books: The predictors, their budget and what their wishes came to.
    """

    def __init__(
        self, core: Core, fetcher: Fetcher, behind: WriteBehind, books: Prefetching
    ) -> None:
        self.books = books
        self._core = core
        self._carrier = Carrier(core, fetcher, behind, books)
        self._homes: Recent[BlockKey, _Home] = Recent(_HOMES)
        self._announced: Recent[tuple[int, BlockKey], bool] = Recent(_HOMES)
        self._complained: set[str] = set()

    @property
    def open(self) -> int:
        """Prefetches that run or wait."""
        return self._carrier.open

    def __repr__(self) -> str:
        return f"<Prefetcher: {self.open} running or waiting; {self.books!r}>"

    # ------------------------------------------------------------------ events

    def arrived(
        self,
        session: SessionLike,
        keys: Sequence[BlockKey],
        found: Sequence[FoundPart],
        lossy: bool,
    ) -> None:
        """A match was opened: its keys, and what was found of them (leased, and counted as used).

        No await, and nothing of it is raised.
        """
        books = self.books
        if not books.predictors or not keys:
            return
        number = session_number(session.root, session.id)
        self._homes.set(keys[0], _Home(session.space, session.root, lossy))
        if self._announced.get((number, keys[-1])):
            self._announced.drop((number, keys[-1]))
            return  # the same request was announced by a prefetch
        cold = any(part.tier for part in found)
        for plan in books.arrived(Arrival(number, tuple(keys)), self._core.clock()):
            if plan.asked and not cold:
                books.finish(plan, self._core.clock())  # all of it is near already
            else:
                self._perform(plan, touch=False)  # the match has touched what is asked for

    def ended(
        self,
        session: SessionLike,
        keys: Sequence[BlockKey],
        *,
        stop_reason: str | None = None,
        next_in: float | None = None,
    ) -> None:
        """A turn was stored, or somebody told how it ended. No await, and nothing is raised."""
        if not self.books.predictors or not keys:
            return
        number = session_number(session.root, session.id)
        if self._homes.get(keys[0]) is None:
            self._homes.set(keys[0], _Home(session.space, session.root, False))
        event = Departure(number, tuple(keys), stop_reason, next_in)
        for plan in self.books.ended(event, self._core.clock()):
            self._perform(plan, touch=plan.asked)

    def hinted(
        self, session: SessionLike, *, stop_reason: str | None = None, next_in: float | None = None
    ) -> None:
        """Somebody told how the last turn of a session ended, or when it will be back."""
        self.ended(session, session.chain.keys, stop_reason=stop_reason, next_in=next_in)

    def demanded(self, found: Found, *, lossy: bool) -> Found:
        """A load of this prefix begins, which is leased.

        Returns:
            The prefix, with the parts that a prefetch brought nearer since it was looked up.
        """
        books, core = self.books, self._core
        if not books.any_out:
            return found
        parts = list(found.parts)
        for number, part in enumerate(parts):
            if part.tier and books.out(part.part):
                state = core.decisions.state(part.part, core.clock())
                near = state.tiers and state.tiers[0] < part.tier
                if near and state.generation == part.generation and (lossy or state.lossless[0]):
                    parts[number] = part._replace(tier=state.tiers[0], nbytes=state.nbytes[0])
        books.demand([(part.part, part.tier) for part in parts], core.clock())
        return replace(found, parts=tuple(parts))

    def tick(self) -> None:
        """Time passed: perform what is due, and say of which predictor nothing is expected."""
        now = self._core.clock()
        for plan in self.books.due(now):
            self._perform(plan, touch=plan.asked)
        for figures in self.books.figures(now):
            if figures.broken and figures.name not in self._complained:
                self._complained.add(figures.name)
                _log.error("predictor %s is off for good: %s", figures.name, figures.broken)

    # ------------------------------------------------------------------ jobs

    def ask(
        self,
        session: SessionLike,
        keys: Sequence[BlockKey],
        *,
        named: bool,
        lossy: bool,
        guess: bool,
    ) -> Job[int]:
        """Bring what a caller asks for; the job's result counts the parts that were moved.

        Args:
            session: Whose prefix it is.
            keys: Keys of its blocks.
            named: Whether the session is a real one, and not just a bearer of the root.
            lossy: Whether lossy copies are of use.
            guess: Whether no request for it is there.

        Raises:
            ClosedError: if the engine is closed.
        """
        books, now, keys = self.books, self._core.clock(), tuple(keys)
        plan = books.asked(keys, now, guess=guess)
        query = prefix_query(session.space, keys, lossy=lossy, touch=plan.asked)
        try:
            job = self._carrier.spawn(session.space, session.root, query, plan)
        except ClosedError:
            books.finish(plan, now)
            raise
        if books.predictors and keys and not guess:
            number = session_number(session.root, session.id) if named else 0
            self._homes.set(keys[0], _Home(session.space, session.root, lossy))
            if number:
                self._announced.set((number, keys[-1]), True)
            for further in books.arrived(Arrival(number, keys), now):
                if further.asked and further.keys == keys:
                    books.finish(further, now)  # that is what was just started
                else:
                    self._perform(further, touch=further.asked)
        return job

    def start(
        self, space: Space, root: BlockKey, query: Query, *, memory: bool = False
    ) -> Job[int]:
        """Bring the parts of a prefix into the fastest tier, for no predictor's sake.

        Args:
            space: Space of the prefix.
            root: Root of its key chain.
            query: How it is looked up.
            memory: Whether to bring it into a memory tier instead, where that is another.

        Raises:
            ClosedError: if the engine is closed.
        """
        return self._carrier.spawn(space, root, query, None, memory=memory)

    def _perform(self, plan: Plan, *, touch: bool) -> None:
        home = self._homes.get(plan.keys[0])
        if home is not None and self.open <= IN_LINE and not self._core.closed:
            query = prefix_query(home.space, plan.keys, lossy=home.lossy, touch=touch)
            try:
                self._carrier.spawn(home.space, home.root, query, plan)
            except ClosedError:
                pass
            else:
                return
        self.books.finish(plan, self._core.clock())
