"""How bytes move, offline: what the engine's mover does for a decision object, without bytes.

Every call is the one that the mover makes, in the same order: reserve, demote what is in the way,
commit, copy onwards. What is decided comes out of the decision object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.blocks import KEY_BYTES, PART_BYTES, BlockKey, PartId
from tierkv.decisions.types import EvictReason, SkipReason, StoreItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.decisions.core import Decisions
    from tierkv.decisions.types import Demote, Drop, FoundPart, Reservation

__all__ = ["ROOT", "Moves", "chain_items", "key_of", "name_of"]

ROOT: Final = BlockKey(bytes(KEY_BYTES))
_new: Final = tuple.__new__  # a named tuple's own constructor takes twice as long
_ROUNDS: Final = 3  # attempts to make room by demotion, as in the mover
_ELSEWHERE: Final = (
    SkipReason.FULL,
    SkipReason.TOO_LARGE,
    SkipReason.TENANT_QUOTA,
    SkipReason.REFUSED,
    SkipReason.NO_PARENT,
)
_NO_ROOM: Final = (
    SkipReason.FULL,
    SkipReason.TOO_LARGE,
    SkipReason.TENANT_QUOTA,
    SkipReason.REFUSED,
)


def name_of(key: int) -> PartId:
    """Name of the part that stands for a block of a trace: its key, and group 0."""
    return PartId(key.to_bytes(PART_BYTES, "little"))


def chain_items(chain: Sequence[int], start: int, nbytes: int) -> list[StoreItem]:
    """Items for the blocks of a chain from number ``start`` on, ``nbytes`` bytes each."""
    # as name_of() has it
    names = [key.to_bytes(PART_BYTES, "little") for key in chain[max(0, start - 1) :]]
    parts = names[1:] if start else names
    parents = names if start else [None, *names]
    return [
        _new(StoreItem, (part, parent, ROOT, nbytes, True, True, None, False))
        for part, parent in zip(parts, parents, strict=False)
    ]


def key_of(part: PartId) -> int:
    """The block that a part of a replay stands for; see :func:`name_of`."""
    return int.from_bytes(part[:KEY_BYTES], "little")


class Moves:
    """Stores, copies and demotions; counts bytes and departures.

    Attributes:
        decisions: Decides.
        written: Bytes written into each tier.
        evictions: Copies that left each tier, by reason.
        skipped: Parts not stored, by reason.
        on_drop: Told of each copy that left, and when; None: nobody is.
    """

    def __init__(self, decisions: Decisions, tiers: int, *, write_through: bool) -> None:
        self.decisions = decisions
        self.written = [0] * tiers
        self.evictions: list[dict[EvictReason, int]] = [{} for _ in range(tiers)]
        self.skipped: dict[SkipReason, int] = {}
        self.on_drop: Callable[[PartId, int, float], None] | None = None
        self._tiers = tiers
        self._write_through = write_through

    def store(self, items: Sequence[StoreItem], tenant: str, now: float) -> list[StoreItem]:
        """Store a chain in the fastest tier that takes it, each part in one; copy it onwards.

        Returns:
            The parts that are there now.
        """
        left, there = list(items), []
        for tier in range(self._tiers):
            reservation = self._reserve(tier, left, tenant, now)
            done = [i for i, o in enumerate(reservation.outcomes) if o.generation]
            if done:
                drops = self.decisions.commit(reservation.id, done, now)
                self.free(drops, now)
                fresh = left if len(done) == len(left) else [left[i] for i in done]
                self.written[tier] += sum([item.nbytes for item in fresh])
                there += fresh
                self._onwards(tier, fresh, now)
            if len(done) == len(left):
                break
            again, skipped = [], self.skipped
            for item, outcome in zip(left, reservation.outcomes, strict=True):
                if outcome.skip in _ELSEWHERE and tier + 1 < self._tiers:
                    again.append(item)
                elif outcome.skip is not None:
                    skipped[outcome.skip] = skipped.get(outcome.skip, 0) + 1
                elif not outcome.generation:
                    there.append(item)
            left = again
            if not left:
                break
        return there

    def _reserve(
        self, tier: int, items: Sequence[StoreItem], tenant: str, now: float
    ) -> Reservation:
        """Reserve room, demoting dirty victims first where that is what it takes."""
        decisions = self.decisions
        for attempt in range(_ROUNDS):
            reservation = decisions.reserve(tier, items, tenant=tenant, now=now)
            self.free(reservation.drops, now)
            if not reservation.short or attempt == _ROUNDS - 1:
                break
            taken = [i for i, o in enumerate(reservation.outcomes) if o.generation]
            if taken:
                self.free(decisions.rollback(reservation.id, taken, now, SkipReason.CLOSED), now)
            outcomes = zip(items, reservation.outcomes, strict=True)
            room = sum(item.nbytes for item, o in outcomes if o.generation or o.skip)
            drops, demotes = decisions.make_room(tier, room, tenant=tenant, now=now)
            self.free(drops, now)
            if not drops and not demotes:
                break
            self.demote(demotes, now)
        return reservation

    def _onwards(self, tier: int, items: Sequence[StoreItem], now: float) -> None:
        if self._write_through:
            for target in range(tier + 1, self._tiers):
                self.copy(tier, target, items, now)

    def copy(self, source: int, target: int, items: Sequence[StoreItem], now: float) -> Reservation:
        """Copy parts of one tier to a slower one."""
        reservation = self.decisions.reserve(target, items, tenant="", now=now, source=source)
        self.free(reservation.drops, now)
        done = [i for i, o in enumerate(reservation.outcomes) if o.generation]
        if done:
            self.free(self.decisions.commit(reservation.id, done, now), now)
            self.written[target] += sum(items[i].nbytes for i in done)
        return reservation

    def demote(self, demotes: Iterable[Demote], now: float) -> None:
        """Copy parts that must leave a tier to a slower one, then forget them in the faster."""
        decisions = self.decisions
        for demote in demotes:
            item = StoreItem(demote.part, None, ROOT, demote.nbytes)
            outcome = self.copy(demote.source, demote.target, [item], now).outcomes[0]
            decisions.cancel_demote([demote], now)
            arrived = demote.target in decisions.state(demote.part, now).tiers
            if arrived or outcome.skip in _NO_ROOM:
                reason = EvictReason.DEMOTED if arrived else EvictReason.CAPACITY
                gone = [(demote.part, demote.generation)]
                self.free(decisions.dropped(gone, demote.source, reason, now), now)

    def bring(
        self, tier: int, parts: Sequence[FoundPart], now: float, *, ahead: bool = False
    ) -> tuple[int, list[int]]:
        """Reserve room in the first tier for parts of a slower one, evicting nothing hotter.

        Args:
            tier: Where they are.
            parts: The parts.
            now: Time.
            ahead: Whether nobody has asked for them yet.

        Returns:
            The reservation, and the numbers of the parts that have room.
        """
        items = [StoreItem(p.part, None, ROOT, p.nbytes) for p in parts]
        reservation = self.decisions.reserve(
            0, items, tenant="", now=now, demand=False, source=tier, ahead=ahead
        )
        self.free(reservation.drops, now)
        return reservation.id, [i for i, o in enumerate(reservation.outcomes) if o.generation]

    def arrived(self, reservation: int, items: Sequence[int], nbytes: int, now: float) -> None:
        """Make parts visible that were brought to the first tier."""
        self.free(self.decisions.commit(reservation, items, now), now)
        self.written[0] += nbytes

    def tick(self, now: float) -> None:
        """Let the decision object look at the time."""
        drops, demotes = self.decisions.tick(now)
        self.free(drops, now)
        self.demote(demotes, now)

    def free(self, drops: Iterable[Drop], now: float) -> None:
        """Count copies that left."""
        evictions, on_drop = self.evictions, self.on_drop
        for part, tier, _, _, reason in drops:
            counts = evictions[tier]
            counts[reason] = counts.get(reason, 0) + 1
            if on_drop is not None:
                on_drop(part, tier, now)
