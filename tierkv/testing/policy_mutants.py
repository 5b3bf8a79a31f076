"""Policies that are wrong, each in one way: the suite must tell.

Every mutant names the check that is there for it.
"""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tierkv.decisions.policy.lru import Lru
from tierkv.testing.policies import PolicyTests

if TYPE_CHECKING:
    from tierkv.abc import Policy

__all__ = ["MUTANTS", "Mutant", "failing_checks"]


class Mutant(NamedTuple):
    """A wrong policy and the check that must catch it."""

    make: type[Policy]
    check: str


def failing_checks(make: type[Policy], only: str = "test_") -> dict[str, str]:
    """Run the checks whose names begin with ``only`` on a policy; those that fail, and why."""
    said = {"make": lambda _self: make(), "follows_shifts": issubclass(make, Lru)}
    case: Any = type("Case", (PolicyTests,), said)()
    failed = {}
    for name in sorted(name for name in dir(case) if name.startswith(only)):
        try:
            getattr(case, name)()
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


class Shouting(Lru):
    """Has a name that no configuration would spell."""

    name: ClassVar[str] = " LRU"


class BornFree(Lru):
    """Offers rows that nobody has released yet."""

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row, nbytes, clock)
        self.release(row)


class TouchFrees(Lru):
    """Takes an access for the end of a lease."""

    def touch(self, row: int, clock: int) -> None:
        super().touch(row, clock)
        self.release(row)


class Consuming(Lru):
    """Forgets a row because it was offered."""

    def victim(self) -> int | None:
        row = super().victim()
        if row is not None:
            self.touch(row, self.rank_of(row) + 100)
        return row


class Counting(Lru):
    """Wants as many holds as there were releases."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[int, int] = {}

    def release(self, row: int) -> None:
        self.count[row] = self.count.get(row, 0) + 1
        super().release(row)

    def hold(self, row: int) -> None:
        self.count[row] = max(0, self.count.get(row, 0) - 1)
        if not self.count[row]:
            super().hold(row)


class Haunted(Lru):
    """Goes on offering a row that was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts: set[int] = set()

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        self.ghosts.add(row)

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        if row in self.ghosts:
            self.ghosts.discard(row)
            super().remove(row)
        super().insert(row, nbytes, clock)


class Remembering(Lru):
    """Ranks a recycled row by what it stood for before."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, int] = {}

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row, nbytes, self.first.setdefault(row, clock))


class Deaf(Lru):
    """Does not expedite what is held at that time."""

    def expedite(self, row: int) -> None:
        if self._rank[row] & 1:
            super().expedite(row)


class Grudging(Lru):
    """Never forgives a row that was expedited."""

    def touch(self, row: int, clock: int) -> None:
        if self.rank_of(row):
            super().touch(row, clock)


class Backwards(Lru):
    """Has ranks that run against its own order."""

    def rank(self, row: int) -> float:
        return -super().rank(row)


class Backdated(Lru):
    """Takes the latest arrival for the oldest."""

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row, nbytes, max(0, 1000 - clock))


class Losing(Lru):
    """Loses a row that is held for the twentieth time."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: dict[int, int] = {}

    def hold(self, row: int) -> None:
        self.holds[row] = self.holds.get(row, 0) + 1
        super().hold(row)

    def release(self, row: int) -> None:
        if self.holds.get(row, 0) != 20 or len(self) < 50:
            super().release(row)

    def victim(self) -> int | None:
        found = super().victim()
        return None if found is not None and self.holds.get(found, 0) == 20 else found


class Resetting(Lru):
    """Starts from nothing when its size changes."""

    def resize(self, capacity_parts: float) -> None:
        for row in range(len(self._rank)):
            if self._rank[row] >= 0:
                self.hold(row)


class Dicing(Lru):
    """Breaks ties by chance."""

    _dice: ClassVar[random.Random] = random.Random()

    def victim(self) -> int | None:
        first = super().victim()
        if first is None or len(self) != 30:
            return first
        rank = self.rank_of(first)
        ties = [r for r in range(30) if self._rank[r] & 1 and self.rank_of(r) - rank < 3]
        return self._dice.choice(ties) if rank > 3 else first


class Scanning(Lru):
    """Looks at every row for each victim."""

    def victim(self) -> int | None:
        best: int | None = None
        for row in range(len(self._rank)):
            free = self._rank[row] >= 0 and self._rank[row] & 1
            if free and (best is None or self._rank[row] < self._rank[best]):
                best = row
        return best


class Hoarding(Lru):
    """Writes down every access and throws nothing away."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[tuple[int, int]] = []

    def touch(self, row: int, clock: int) -> None:
        self.past.append((row, clock))
        super().touch(row, clock)


class Lasting(Lru):
    """Remembers every part that was ever evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        if evicted:
            self.known[ident] = self.rank_of(row)
        super().remove(row, evicted=evicted, ident=ident)


class Confusing(Lru):
    """Takes a row number for the name of a part: what comes in it after an eviction is welcome."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: set[int] = set()
        self.welcome: set[int] = set()

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row, nbytes, clock, ident)
        if row in self.evicted:
            self.welcome.add(row)

    def touch(self, row: int, clock: int) -> None:
        super().touch(row, clock + 1000 * (row in self.welcome))

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        if evicted:
            self.evicted.add(row)
        self.welcome.discard(row)
        super().remove(row, evicted=evicted, ident=ident)


class Mourning(Lru):
    """Keeps a ghost of every part that leaves, why ever it left."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, int] = {}
        self.known: set[int] = set()

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row, nbytes, clock, ident)
        self.names[row] = ident

    def touch(self, row: int, clock: int) -> None:
        super().touch(row, clock + 1000 * (self.names[row] in self.known))

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        self.known.add(self.names.pop(row))
        super().remove(row, evicted=evicted, ident=ident)


class Signed(Lru):
    """Keeps names in cells that are one bit too small."""

    def __init__(self) -> None:
        super().__init__()
        self.names = array("q", [0] * 64)

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row, nbytes, clock, ident)
        self.names[row % 64] = ident


class Wrapping(Lru):
    """Has room for so many row numbers, and takes the others for those."""

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        super().insert(row % 100_000, nbytes, clock, ident)

    def touch(self, row: int, clock: int) -> None:
        super().touch(row % 100_000, clock)

    def release(self, row: int) -> None:
        super().release(row % 100_000)


class Persuaded(Lru):
    """Frees a leased row when it is told how important it is."""

    def score(self, row: int, value: float) -> None:
        self.release(row)


class Drifting(Lru):
    """Goes on shifting a row after it was used again."""

    def __init__(self) -> None:
        super().__init__()
        self.drift: dict[int, int] = {}

    def shift(self, row: int, accesses: float) -> None:
        self.drift[row] = int(accesses)
        super().shift(row, accesses)

    def touch(self, row: int, clock: int) -> None:
        self.raise_rank(row, max(1, clock + 1 + self.drift.get(row, 0)))


class Flattered(Lru):
    """Takes any score for a use, though it says that it follows none."""

    def score(self, row: int, value: float) -> None:
        self.raise_rank(row, self.rank_of(row) + 1000)


MUTANTS = (
    Mutant(Shouting, "test_has_a_name"),
    Mutant(BornFree, "test_new_rows_are_held"),
    Mutant(TouchFrees, "test_held_rows_are_never_victims"),
    Mutant(Consuming, "test_victim_changes_nothing"),
    Mutant(Counting, "test_release_and_hold_are_idempotent"),
    Mutant(Haunted, "test_removed_rows_are_forgotten"),
    Mutant(Remembering, "test_a_recycled_row_is_new"),
    Mutant(Deaf, "test_an_expedited_row_goes_first"),
    Mutant(Grudging, "test_touch_ranks_an_expedited_row_again"),
    Mutant(Backwards, "test_the_victim_has_the_smallest_rank"),
    Mutant(Backdated, "test_a_new_row_is_not_the_next_victim"),
    Mutant(Losing, "test_every_row_goes_in_the_end"),
    Mutant(Resetting, "test_resize_keeps_every_row"),
    Mutant(Dicing, "test_is_deterministic"),
    Mutant(Scanning, "test_held_rows_cost_nothing"),
    Mutant(Hoarding, "test_memory_is_bounded"),
    Mutant(Lasting, "test_ghosts_are_bounded"),
    Mutant(Confusing, "test_ghosts_go_by_name"),
    Mutant(Mourning, "test_what_was_not_evicted_leaves_no_ghost"),
    Mutant(Signed, "test_names_have_64_bits"),
    Mutant(Wrapping, "test_rows_may_lie_far_apart"),
    Mutant(Persuaded, "test_advice_frees_nobody"),
    Mutant(Drifting, "test_shifts_move_the_order"),
    Mutant(Flattered, "test_scores_move_the_order"),
)
"""Wrong policies, one for each check."""
