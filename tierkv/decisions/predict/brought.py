"""What was granted, until it has come to something: used, late, wasted or refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from tierkv.decisions.lines import format_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tierkv.blocks import PartId
    from tierkv.decisions.lines import DecisionLog
    from tierkv.decisions.predict.books import Book, PrefetchFigures
    from tierkv.decisions.predict.budget import Budget

__all__ = ["NAMED_BYTES", "Brought", "Out", "name_part"]

NAMED_BYTES: Final = 8
"""Bytes of a key by which lines of the log name it: predictors know no difference."""


def name_part(part: PartId) -> str:
    """Name of a part in the log."""
    return (part[:NAMED_BYTES] + part[-2:]).hex()


class Out:
    """A part that was granted and has come to nothing yet, neither good nor bad."""

    __slots__ = ("book", "landed", "nbytes", "plan", "since", "tier")

    def __init__(self, book: Book, plan: int, tier: int, nbytes: int, since: float) -> None:
        self.book = book
        self.plan = plan
        self.tier = tier
        self.nbytes = nbytes
        self.since = since
        self.landed = False


class Brought:
    """The parts that are out: granted, and neither good nor bad yet; and the log of all calls.

    Args:
        books: Book of each predictor, by name.
        budget: What they move.
        keep: Seconds after which a part that nobody asked for is wasted.
        header: First line of the log.
    """

    def __init__(
        self, books: dict[str, Book], budget: Budget, keep: float, header: Mapping[str, Any]
    ) -> None:
        self._books = books
        self._budget = budget
        self._keep = keep
        self._header = dict(header)
        self._out: OrderedDict[PartId, Out] = OrderedDict()  # in order of their grants
        self._flying: dict[int, list[PartId]] = {}
        self._log: DecisionLog | None = None

    # ------------------------------------------------------------------ record

    def attach(self, log: DecisionLog | None) -> None:
        """Write every further call to a decision log, a header first; None stops it."""
        self._log = log
        if log is not None:
            log.write(format_line("prefetch.header", 0.0, (self._header,), None))

    def _record(self, op: str, now: float, args: Sequence[Any], result: Any = None) -> None:
        if self._log is not None:
            self._log.write(format_line(f"prefetch.{op}", now, args, result))

    @property
    def any_out(self) -> bool:
        """Whether any part is."""
        return bool(self._out)

    def out(self, part: PartId) -> bool:
        """Whether a part is on its way, or there and not asked for yet."""
        return part in self._out

    def landed(self, parts: Iterable[PartId], now: float) -> None:
        """Granted parts are in the fast tier now, unless somebody asked for them meanwhile."""
        mine = [part for part in parts if part in self._out]
        for part in mine:
            self._out[part].landed = True
        if mine:
            self._record("landed", now, ([name_part(part) for part in mine],))

    def refused(self, parts: Iterable[PartId], now: float) -> None:
        """Granted parts were not brought: there was no room for them, or something failed."""
        names = dict.fromkeys(parts)
        mine = [part for part in names if part in self._out and not self._out[part].landed]
        for part in mine:
            self._close(part, "refused", now)
        if mine:
            self._record("refused", now, ([name_part(part) for part in mine],))

    # ------------------------------------------------------------------ outcomes

    def demand(self, parts: Iterable[tuple[PartId, int]], now: float) -> None:
        """Somebody loads these parts: (part, tier that it was found in)."""
        if not self._out:
            return
        mine = {part: tier for part, tier in parts if part in self._out}
        for part, tier in mine.items():
            out = self._out[part]
            self._close(part, "used" if tier < out.tier else "late", now)
        if mine:
            self._record("demand", now, ([(name_part(part), tier) for part, tier in mine.items()],))

    def dropped(self, part: PartId, tier: int, now: float) -> None:
        """A copy left a tier: a part that nobody has asked for by then was brought in vain."""
        out = self._out.get(part)
        if out is None or tier >= out.tier:
            return
        self._close(part, "wasted", now)
        self._record("dropped", now, (name_part(part), tier))

    def _close(self, part: PartId, outcome: str, now: float) -> None:
        out = self._out.pop(part)
        if outcome == "refused":
            self._budget.give_back(out.nbytes, now)
        out.book.close(outcome, out.plan, now)

    def figures(self, now: float) -> tuple[PrefetchFigures, ...]:
        """What each predictor did so far."""
        return tuple(book.figures(now) for book in self._books.values())

    def _expire(self, now: float) -> None:
        """Give up what nobody has asked for in a long time."""
        while self._out:
            part, out = next(iter(self._out.items()))
            if now - out.since < self._keep:
                break
            self._close(part, "wasted" if out.landed else "refused", now)
