"""What a rank knows of a request, and the copies that it was ordered to make for it.

A job has its own copy of the request's tokens and pages, as they were when it was ordered: the
request goes on growing, or loses its pages, while the job waits for its turn.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tierkv.abc import Event
    from tierkv.blocking import Pending
    from tierkv.layout import Space
    from tierkv.session import Session
    from tierkv_adapters.serving.orders import Grown, RequestFacts
    from tierkv_adapters.serving.pages import PageGroup

__all__ = ["Ended", "Job", "JobState", "Outcome", "RequestState"]


class Ended(NamedTuple):
    """A load or a save that is over.

    Attributes:
        id: The request.
        kind: Which of the two.
        start: First token of the order.
        tokens: Leading tokens of the request that are in place (a load), or stored (a save), as far
            as this order is concerned: from ``start``, if nothing came of it, to its ``stop``.
        reason: Why it is less than was ordered; None if it is all.
        seconds: From the order to the end.
        nbytes: Raw bytes that were copied.
    """

    id: str
    kind: Literal["load", "save"]
    start: int
    tokens: int
    reason: str | None
    seconds: float
    nbytes: int


class Outcome(NamedTuple):
    """What became of a job; see :class:`Ended`. ``blocks``: those that a save newly stored."""

    tokens: int
    reason: str | None = None
    nbytes: int = 0
    blocks: int = 0


class JobState(Enum):
    """How far a job is."""

    WAITING = "waiting"  # touches nothing
    BEGUN = "begun"  # reads or writes the pages
    GATHERED = "gathered"  # a save that has read all that it reads, and is being written
    ENDED = "ended"  # touches nothing any more


class RequestState:
    """One request, as the orders describe it. Belongs to the worker's thread, but for the queue.

    Attributes:
        facts: What its keys depend on.
        space: Its space; None if it has none, and nothing can be done for it.
        name: Name of its session in the engine.
        tokens: Its token ids so far.
        pages: Per group, its pages so far.
        given: Per group, in which step each page was given to it (groups that drop pages only).
        queue: Jobs that wait for their turn.
        running: The job whose turn it is.
        over: Whether the engine has forgotten it.
        handle: Its session; belongs to the loop's thread.
        leaving: Whether its session is being left for good.
    """

    def __init__(
        self, facts: RequestFacts, space: Space | None, name: str, groups: Sequence[PageGroup]
    ) -> None:
        self.facts = facts
        self.space = space
        self.name = name
        self.tokens = array("I")
        self.pages = [array("q") for _ in groups]
        self.given = [array("q") if group.drops else None for group in groups]
        self.queue: deque[Job] = deque()
        self.running: Job | None = None
        self.over = False
        self.handle: Session | None = None
        self.leaving = False
        self._groups = groups

    @property
    def id(self) -> str:
        """The engine's name for it."""
        return self.facts.id

    def grow(self, grown: Grown, step: int) -> None:
        """Take in what the request got in a step of the engine.

        Raises:
            ValueError: if it names another number of page groups.
        """
        if grown.pages and len(grown.pages) != len(self.pages):
            raise ValueError(f"{len(grown.pages)} lists of pages for {len(self.pages)} page groups")
        self.tokens.extend(grown.tokens)
        if grown.replace:
            self.lose()
        for mine, given, new in zip(self.pages, self.given, grown.pages, strict=False):
            mine.extend(new)
            if given is not None:
                given.extend([step] * len(new))

    def lose(self) -> None:
        """Forget its pages."""
        for pages in (*self.pages, *self.given):
            if pages is not None:
                del pages[:]

    def cut(
        self, start: int, stop: int, taken: Sequence[Mapping[int, int]], *, writing: bool
    ) -> list[array[int]]:
        """The pages of tokens ``[0, stop)``, without those that it has no longer.

        Windows slide, and the pages behind them go to other requests, of which nobody tells this
        one: a page that was given away after it was given to this request is not its page.

        Args:
            start: First token that is meant; nothing of a window before it is handed out.
            stop: Token behind the last one.
            taken: Per group, pages, and in which step they were last given to somebody.
            writing: Whether they will be written: then no page before ``start`` is handed out,
                as others may share it.

        Raises:
            ValueError: if there are fewer pages than the tokens need, or a page that is written
                begins before ``start``.
        """
        out = []
        for number, group in enumerate(self._groups):
            last = stop // group.page_tokens
            pages = self.pages[number][:last]
            if len(pages) < last:
                raise ValueError(
                    f"page group {number} has {len(pages)} pages, token {stop} needs {last}"
                )
            given = self.given[number]
            first = start // group.page_tokens
            if writing and group.per_token and start % group.page_tokens:
                raise ValueError(f"token {start} is inside a page of group {number}")
            if writing or given is not None:
                pages[:first] = array("q", [-1]) * first
            if given is not None:
                for at in range(first, last):
                    if taken[number].get(pages[at], -1) > given[at]:
                        pages[at] = -1
            out.append(pages)
        return out


@dataclass(eq=False, slots=True)
class Job:
    """One load or save. Its state changes under the rank's lock only.

    Attributes:
        request: For whom.
        kind: What it is.
        start: First token.
        stop: Token behind the last one.
        asked: When it was ordered, on the rank's clock.
        tokens: Token ids up to ``stop``.
        pages: Pages per group up to ``stop``.
        until: When its deadline is, on the rank's clock, or None.
        ready: Behind the engine's work on the pages so far; None: they are in host memory.
        state: How far it is.
        pending: The work on the engine's loop.
        why: Why it was cancelled, if it was.
        gathered: To be called, on the loop, once a save that has begun reads no page any more.
    """

    request: RequestState
    kind: Literal["load", "save"]
    start: int
    stop: int
    asked: float
    tokens: array[int] = field(default_factory=lambda: array("I"))
    pages: list[array[int]] = field(default_factory=list)
    until: float | None = None
    ready: Event | None = None
    state: JobState = JobState.WAITING
    pending: Pending[Outcome | None] | None = None
    why: str | None = None
    gathered: Callable[[], None] | None = None
    _held: list[frozenset[int]] | None = None

    def touches(self, pages: Sequence[Collection[int]]) -> bool:
        """Whether it reads or writes any of these pages, which are listed by group."""
        if self._held is None:
            self._held = [frozenset(page for page in each if page >= 0) for each in self.pages]
        return any(not held.isdisjoint(each) for held, each in zip(self._held, pages, strict=False))

    def forget_pages(self) -> None:
        """Touch no page any more."""
        self.pages, self._held = [], None

    def let_go(self, pages: Sequence[Collection[int]], groups: Sequence[PageGroup]) -> bool:
        """Give up what a waiting save has in these pages of windows and states.

        Returns:
            Whether it can go on: it touches none of these pages any more.
        """
        for mine, each, group in zip(self.pages, pages, groups, strict=True):
            if group.drops:
                for at, page in enumerate(mine):
                    if page in each:
                        mine[at] = -1
        self._held = None
        return not self.touches(pages)
