"""What the scheduler's side tells the ranks, once a step; picklable, and made of plain data.

Engines write what travels with a step into their logs when it fails, and event loops the arguments
of slow calls: so nothing here shows a token or a salt in its repr.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from array import array

    from tierkv.blocks import AdapterId, Media

__all__ = ["Grown", "HintOrder", "LoadOrder", "RequestFacts", "SaveOrder", "StepOrders"]


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Everything about a request, apart from its tokens, that its KV and its keys depend on.

    Attributes:
        id: The engine's name for it; unique among the requests alive.
        session: Session whose history it continues; None: it belongs to none.
        tenant: Whose it is; tenants never share blocks.
        ttl: Seconds its blocks live after their last use, or None.
        salt: Secret that blocks must share to be reused (``cache_salt``).
        adapter: LoRA adapter that is active, or None.
        media: Content behind placeholder tokens.
        era: Since which reset its KV is computed; see :class:`~tierkv_adapters.serving.eras.Eras`.
    """

    id: str
    session: str | None = None
    tenant: str = ""
    ttl: float | None = None
    salt: bytes = field(default=b"", repr=False)
    adapter: AdapterId | None = None
    media: tuple[Media, ...] = ()
    era: bytes = field(default=b"", repr=False)


class Grown(NamedTuple):
    """What a request got since it was last told of.

    Attributes:
        id: The request.
        tokens: Token ids that follow those told before (``array("I")``).
        pages: Per page group, the pages that follow those told before (``array("q")``); -1 where
            there is none, such as outside of a sliding window.
        replace: Whether the pages are all of them and take the place of those told before: the
            request was preempted and has come back.
    """

    id: str
    tokens: array[int]
    pages: tuple[array[int], ...]
    replace: bool = False

    def __repr__(self) -> str:
        pages = [len(group) for group in self.pages]
        return f"<Grown {self.id!r}: {len(self.tokens)} tokens, {pages} pages>"


class LoadOrder(NamedTuple):
    """Bring tokens ``[start, stop)`` of a request into its pages; both are block borders.

    Attributes:
        id: The request.
        start: First token to bring; what is before it is in the pages already.
        stop: Token behind the last one to bring.
        deadline: Seconds after which nothing further is waited for; None: no deadline.
        sync: Whether the forward pass of this very step reads it.
    """

    id: str
    start: int
    stop: int
    deadline: float | None = None
    sync: bool = False


class SaveOrder(NamedTuple):
    """Store tokens ``[start, stop)`` of a request once this step's forward pass is over.

    Both are block borders, and every token before ``stop`` is computed then.
    """

    id: str
    start: int
    stop: int


class HintOrder(NamedTuple):
    """Keep KV for a while, or bring some early; a rank may refuse, and nobody waits for it.

    Attributes:
        facts: Of the request that brought the hint: whose KV it may be about.
        action: ``"pin"``: what is stored of the request, now or later, stays in memory;
            ``"prefetch"``: ``session``'s history, or ``tokens``, come into the fastest tier.
        tokens: Token ids (``array("I")``): of the request, or to bring; None: the history.
        session: Session that is meant, or None.
        seconds: How long a pin lasts; None for what is no pin.
    """

    facts: RequestFacts
    action: Literal["pin", "prefetch"]
    tokens: array[int] | None = None
    session: str | None = None
    seconds: float | None = None

    def __repr__(self) -> str:
        count = "no" if self.tokens is None else len(self.tokens)
        return f"<HintOrder {self.action} for {self.facts.id!r}: {count} tokens>"


@dataclass(slots=True)
class StepOrders:
    """One step of the engine, as every rank is told of it.

    A rank follows the fields in this order: ``reset``, ``ended``, ``voided``, ``fresh``, ``grown``,
    then it waits for its copies out of ``taken``; then loads; and after the forward pass, saves.

    Attributes:
        reset: Whether all that was ever stored is void, and whatever was to be stored, too: the
            weights may be others now. What is ordered from here on is about new KV.
        ended: Requests that are over: forget them. Copies under way for them go on.
        voided: Requests that lost all of their pages (preemption).
        fresh: Requests that the ranks have not heard of.
        grown: Tokens and pages that requests got.
        taken: Per page group, pages that were given to a request in this step: their old content
            is no longer whose it was, and new content is written in this step (``array("q")``).
            Nothing where there are none.
        loads: What to bring.
        saves: What to store.
        prefill: (tokens, seconds) of an earlier step's prefill: what recomputing costs; or None.
        hints: What requests that came hint at.
        requests: Requests that came since the scheduler's side was made, for who asks a rank.
    """

    reset: bool = False
    ended: list[str] = field(default_factory=list)
    voided: list[str] = field(default_factory=list)
    fresh: list[RequestFacts] = field(default_factory=list)
    grown: list[Grown] = field(default_factory=list)
    taken: tuple[array[int], ...] = ()
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    prefill: tuple[int, float] | None = None
    hints: list[HintOrder] = field(default_factory=list)
    requests: int = 0
