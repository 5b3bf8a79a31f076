"""How likely classes of rows are used again, by the time since their last use; learned online."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BUCKETS", "STARTS", "Hazards", "bucket"]

STARTS: Final = (1, *(ceil(2.0 ** (half / 2)) for half in range(2, 56)))
"""Smallest age, in accesses, of each span of age that is told apart: two an octave."""

BUCKETS: Final = len(STARTS)
"""How many spans there are."""

_WIDTHS: Final = (*(b - a for a, b in pairwise(STARTS)), STARTS[-1])
_FADE: Final = 0.97  # of what was seen, at each learning
_PRIOR: Final = 200.0  # lives of the coarser class that count beside a class's own
_PRIOR_USES: Final = 20.0  # uses, beside its own, that say how it differs from the coarser one
_LEAST: Final = 1e-9


def bucket(age: int) -> int:
    """Number of the span that an age in accesses belongs to."""
    return bisect_right(STARTS, age) - 1 if age > 1 else 0


class Hazards:
    """Says what keeping a row is worth: uses to come for each access that it is kept.

    A *life* is the time from one use of a part to the next. Of a class of lives, the hazard of an
    age is the chance that a life which has come so far ends in this span. It is estimated as by
    Kaplan and Meier (1958): lives whose end nobody saw, because the part was forgotten or is still
    waiting, count as long as they were watched. Classes of few lives lean on their group, and
    groups on all: a class is taken for its group, times one factor, until it has shown more.

    The worth of an age is Gittins' index (J. R. Stat. Soc. B 41, 1979): the most uses for each
    access of keeping that any horizon from there on gives. So a class is not punished for an age
    at which users still read: what counts is whether it pays to wait.

    Args:
        classes: How many classes of lives there are.
        groups: Into how many groups they fall; class numbers of a group are neighbours.
    """

    __slots__ = ("_classes", "_known", "_lost", "_size", "_used", "worth")

    def __init__(self, classes: int, groups: int) -> None:
        self._classes = classes
        self._size = classes // groups
        self._used = [[0.0] * BUCKETS for _ in range(classes)]
        self._lost = [[0.0] * BUCKETS for _ in range(classes)]
        self._known: set[int] = set()
        self.worth: list[list[float]] = []
        """By class and span; empty until it was learned for the first time."""

    def used(self, kind: int, age: int) -> None:
        """Count a use of a part of class ``kind``, ``age`` accesses after the one before."""
        self._known.add(kind)
        self._used[kind][bucket(age)] += 1.0

    def lost(self, kind: int, age: int) -> None:
        """Count a part that was watched for ``age`` accesses without another use."""
        self._known.add(kind)
        self._lost[kind][bucket(age)] += 1.0

    def learn(self, waiting: Sequence[Sequence[int]]) -> None:
        """Weigh everything anew.

        Args:
            waiting: By class and span: parts whose next use has not come.
        """
        size, groups = self._size, self._classes // self._size
        watched = []
        group_used = [[0.0] * BUCKETS for _ in range(groups)]
        group_watched = [[0.0] * BUCKETS for _ in range(groups)]
        for kind in range(self._classes):
            used, lost = self._used[kind], self._lost[kind]
            if kind in self._known:
                used = self._used[kind] = [x * _FADE for x in used]
                lost = self._lost[kind] = [x * _FADE for x in lost]
            elif not any(waiting[kind]):
                watched.append(used)  # nothing, that is
                continue
            seen = _watched(used, [a + b for a, b in zip(lost, waiting[kind], strict=True)])
            watched.append(seen)
            group = kind // size
            if seen[0]:
                group_used[group] = _added(group_used[group], used)
                group_watched[group] = _added(group_watched[group], seen)
        all_used, all_watched = group_used[0], group_watched[0]
        for group in range(1, groups):
            all_used = _added(all_used, group_used[group])
            all_watched = _added(all_watched, group_watched[group])
        base = [a / (b + 1.0) for a, b in zip(all_used, all_watched, strict=True)]
        worth = []
        for group in range(groups):
            common = _hazards(group_used[group], group_watched[group], base)
            alike = _worth(common)
            for kind in range(group * size, (group + 1) * size):
                seen = watched[kind]
                own = _worth(_hazards(self._used[kind], seen, common)) if seen[0] else alike
                worth.append(own)
        self.worth = worth


def _added(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _watched(used: list[float], unseen: list[float]) -> list[float]:
    """Lives that were watched through each span; those that left in it count by half."""
    seen = [0.0] * BUCKETS
    beyond = 0.0
    for span in range(BUCKETS - 1, -1, -1):
        left = unseen[span]
        beyond += used[span] + left
        seen[span] = beyond - 0.5 * left
    return seen


def _hazards(used: list[float], watched: list[float], like: list[float]) -> list[float]:
    """Hazards of a class, drawn towards those of a coarser one by a fitted factor."""
    expected = _PRIOR_USES
    for lives, hazard in zip(watched, like, strict=True):
        expected += lives * hazard
    prior = _PRIOR * (_PRIOR_USES + sum(used)) / expected
    return [
        min(1.0, (uses + prior * hazard) / (lives + _PRIOR))
        for uses, lives, hazard in zip(used, watched, like, strict=True)
    ]


def _worth(hazards: list[float]) -> list[float]:
    """Gittins' index of each span, from the last one back.

    Neighbouring spans are pooled while the later ones pay better: the best horizon of a span ends
    where its pool does. O(spans).
    """
    uses, kept = [0.0] * BUCKETS, [0.0] * BUCKETS
    alive = 1.0
    for span, hazard in enumerate(hazards):
        use = alive * hazard
        uses[span], kept[span] = use, (alive - 0.5 * use) * _WIDTHS[span]
        alive = max(_LEAST, alive - use)
    index = [0.0] * BUCKETS
    pools: list[tuple[float, float]] = []
    for span in range(BUCKETS - 1, -1, -1):
        use, cost = uses[span], kept[span]
        while pools and pools[-1][0] * cost >= use * pools[-1][1]:
            more, longer = pools.pop()
            use, cost = use + more, cost + longer
        pools.append((use, cost))
        index[span] = use / cost
    return index
