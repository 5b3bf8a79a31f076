"""What is fetched early: wishes of the predictors, granted within a budget, and what came of them.

Synchronous and without I/O, as everything that decides. The engine (:mod:`tierkv.prefetch`) and
the replay drive the same object in the same way:

1. :meth:`Prefetching.arrived`, :meth:`~Prefetching.ended` and :meth:`~Prefetching.due` return
   plans, each a prefix worth having in the fastest tier.
2. Whoever performs a plan looks its keys up (``touch=plan.asked``, ``ttl=0``) and asks
   :meth:`~Prefetching.grant` which of the parts in slower tiers to bring, in order.
3. It tells what came of them (:meth:`~Prefetching.landed`, :meth:`~Prefetching.refused`), and
   :meth:`~Prefetching.finish` at the end of the plan, however it ended.
4. It tells of each load that somebody waits for (:meth:`~Prefetching.demand`) and of each copy
   that leaves a tier (:meth:`~Prefetching.dropped`): by these the predictors are judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.decisions.predict.books import Book
from tierkv.decisions.predict.brought import NAMED_BYTES, Brought, Out, name_part
from tierkv.decisions.predict.budget import Budget
from tierkv.decisions.predict.trust import Trust
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.abc import Arrival, Departure, Predictor, Wish
    from tierkv.blocks import BlockKey, PartId

__all__ = ["ASKED", "Plan", "Prefetching"]

ASKED: Final = "arrival"
"""Under this name counts what a request that is there needs, whoever says so: the predictor of
this name, or a caller who asks himself. It is charged to the budget, and never refused by it."""

_MINIMUM: Final = 64
_PAUSE_S: Final = 60.0
_KEEP_S: Final = 300.0
_LIMIT: Final = 65_536
_TRIAL: Final = 4  # an unproven predictor has at most so many times `minimum` parts out


class Plan(NamedTuple):
    """A prefix to bring into the fastest tier.

    Attributes:
        id: Number of the plan.
        predictor: Whose wish it is.
        keys: Keys of its blocks, from the first.
        deadline: When it is of no use any more; None: never.
        asked: Whether a request for it is there, so that it counts as a use.
    """

    id: int
    predictor: str
    keys: tuple[BlockKey, ...]
    deadline: float | None
    asked: bool


class Prefetching(Brought):
    """The predictors, their budget, and their books. Sans-IO; one loop or one replay drives it.

    Memory is bounded: at most ``limit`` parts are out at a time. Each call is O(1) a part.

    Args:
        predictors: Asked in this order; a part that several want belongs to the first.
        budget: Bytes a second that predictions may move; None: no limit. What counts as
            :data:`ASKED` is charged, too, but never refused.
        floor: Share of a predictor's prefetches that must be right (used, or late); see
            :class:`~tierkv.decisions.predict.trust.Trust`.
        minimum: Outcomes before a predictor is judged.
        pause: Seconds for which one that failed is off, at first.
        keep: Seconds after which a part that nobody asked for is wasted, wherever it is.
        limit: Most parts that are out.

    Raises:
        ConfigError: if a number makes no sense, or two predictors have one name.
    """

    def __init__(
        self,
        predictors: Sequence[Predictor] = (),
        *,
        budget: float | None = None,
        floor: float = 0.25,
        minimum: int = _MINIMUM,
        pause: float = _PAUSE_S,
        keep: float = _KEEP_S,
        limit: int = _LIMIT,
    ) -> None:
        names = [predictor.name for predictor in predictors]
        if len(set(names)) != len(names):
            raise ConfigError(f"prefetch: a predictor is named twice: {', '.join(names)}")
        if not 0 <= floor <= 1 or (budget is not None and not budget > 0):
            raise ConfigError(
                f"prefetch: the floor is a share (0 to 1) and the budget positive, not {floor!r} "
                f"and {budget!r}"
            )
        if min(minimum, limit) < 1 or min(pause, keep) <= 0:
            raise ConfigError("prefetch: minimum, limit, pause and keep must be positive")
        self.predictors = tuple(predictors)
        self._minimum, self._limit = minimum, limit
        header = {
            "predictors": names,
            "budget": budget,
            "floor": floor,
            "minimum": minimum,
            "pause": pause,
            "keep": keep,
            "limit": limit,
        }
        rows = dict.fromkeys((*names, ASKED))
        books = {name: Book(name, Trust(floor, minimum, pause)) for name in rows}
        super().__init__(books, Budget(budget), keep, header)
        self._plans = 0
        self._planned: dict[int, Book] = {}

    def __repr__(self) -> str:
        names = ", ".join(predictor.name for predictor in self.predictors) or "no predictor"
        return f"<Prefetching: {names}; {len(self._out)} parts out>"

    def _told(self, plans: Sequence[Plan]) -> list[Any]:
        return [(p.id, p.predictor, _keys(p.keys), p.deadline) for p in plans]

    # ------------------------------------------------------------------ events

    def arrived(self, event: Arrival, now: float) -> list[Plan]:
        """A request came in."""
        plans = self._gather(lambda predictor: predictor.arrived(event, now), now)
        if self._log is not None:
            self._record("arrived", now, (event.session, _keys(event.keys)), self._told(plans))
        return plans

    def ended(self, event: Departure, now: float) -> list[Plan]:
        """A turn ended."""
        plans = self._gather(lambda predictor: predictor.ended(event, now), now)
        if self._log is not None:
            args = (event.session, _keys(event.keys), event.stop_reason, event.next_in)
            self._record("ended", now, args, self._told(plans))
        return plans

    def due(self, now: float) -> list[Plan]:
        """Time passed: call it at :meth:`next_due`, and now and then."""
        plans = self._gather(lambda predictor: predictor.due(now), now)
        if self._log is not None:
            self._record("due", now, (), self._told(plans))
        return plans

    def next_due(self) -> float | None:
        """When a predictor has something to say next; None if none plans anything."""
        times = [p.next_due() for p in self.predictors if not self._books[p.name].broken]
        return min((time for time in times if time is not None), default=None)

    def asked(self, keys: tuple[BlockKey, ...], now: float, *, guess: bool = False) -> Plan:
        """A caller wants this prefix: he is always heeded.

        Args:
            keys: Keys of the blocks, from the first.
            now: Time.
            guess: Whether no request for it is there yet.
        """
        plan = self._plan(ASKED, keys, None, asked=not guess)
        self._record("asked", now, (_keys(keys), guess), plan.id)
        return plan

    def _gather(self, ask: Callable[[Predictor], list[Wish]], now: float) -> list[Plan]:
        self._expire(now)
        plans: list[Plan] = []
        for predictor in self.predictors:
            book = self._books[predictor.name]
            if book.broken:
                continue
            try:
                wishes = [
                    (tuple(wish.keys), wish.deadline)
                    for wish in ask(predictor)
                    if wish.keys and (wish.deadline is None or wish.deadline > now)
                ]
            except Exception as error:  # noqa: BLE001 - a plug-in's fault must fail no request
                book.broken = f"{type(error).__name__}: {error}"
                continue
            if not wishes or not self._may_plan(book, predictor, now):
                continue
            plans += [
                self._plan(predictor.name, keys, deadline, asked=predictor.asked)
                for keys, deadline in wishes
            ]
        return plans

    def _may_plan(self, book: Book, predictor: Predictor, now: float) -> bool:
        if not book.trust.on(now):
            return False
        # what it may cost to find out that a guess is bad is bounded
        return book.trust.proven or predictor.asked or book.out < _TRIAL * self._minimum

    def _plan(
        self, name: str, keys: tuple[BlockKey, ...], deadline: float | None, *, asked: bool
    ) -> Plan:
        self._plans += 1
        self._planned[self._plans] = self._books[name]
        return Plan(self._plans, name, tuple(keys), deadline, asked)

    # ------------------------------------------------------------------ performing

    def grant(self, plan: Plan, parts: Sequence[tuple[PartId, int, int]], now: float) -> list[int]:
        """Which of these parts to bring now.

        Args:
            plan: A plan that is not finished.
            parts: (part, tier that it is in, bytes) of parts in slower tiers, in prefix order.
            now: Time.

        Returns:
            Numbers of the parts to bring, ascending. The first one that the budget does not
            cover ends the list: of a prefix, the tail goes first.
        """
        book = self._planned.get(plan.id)
        granted: list[int] = []
        if book is not None and (plan.deadline is None or now < plan.deadline):
            forced = plan.predictor == ASKED
            for number, (part, tier, nbytes) in enumerate(parts):
                if part in self._out:
                    continue  # on its way, or there and found in another tier meanwhile
                if len(self._out) >= self._limit:
                    break
                if forced:
                    self._budget.charge(nbytes, now)
                elif not self._budget.spend(nbytes, now):
                    break
                self._out[part] = Out(book, plan.id, tier, nbytes, now)
                self._flying.setdefault(plan.id, []).append(part)
                book.issue(nbytes)
                granted.append(number)
        if self._log is not None:
            told = [(name_part(part), tier, nbytes) for part, tier, nbytes in parts]
            self._record("grant", now, (plan.id, plan.deadline, told), granted)
        return granted

    def finish(self, plan: Plan, now: float) -> None:
        """The plan is over, however it ended: nothing of it is on its way. Idempotent."""
        if self._planned.pop(plan.id, None) is None:
            return
        for part in self._flying.pop(plan.id, ()):
            out = self._out.get(part)
            if out is not None and out.plan == plan.id and not out.landed:
                self._close(part, "refused", now)
        self._record("finish", now, (plan.id,))


def _keys(keys: Iterable[BlockKey]) -> str:
    return b"".join(key[:NAMED_BYTES].ljust(NAMED_BYTES, b"\0") for key in keys).hex()
