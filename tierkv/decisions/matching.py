"""Lookups: the largest loadable prefix, in slices, leased as it is found."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, Final

from tierkv.decisions.index import EXACT, NO_ROW, identify
from tierkv.decisions.lookup import Lookup
from tierkv.decisions.reasons import Reasons
from tierkv.decisions.types import Found, FoundPart
from tierkv.errors import ClosedError

if TYPE_CHECKING:
    from array import array

    from tierkv.blocks import PartId
    from tierkv.decisions.hinting import Hints
    from tierkv.decisions.placement import Placement
    from tierkv.decisions.types import Drop, Query

__all__ = ["SLICE", "Matcher"]

_new: Final = tuple.__new__  # a named tuple's own constructor takes twice as long

SLICE: Final = 256
"""Blocks that one call handles at most."""


class Matcher(Reasons):
    """Runs lookups and keeps leases.

    Attributes:
        number: Of the lookup or lease that was begun last; none is ever given out again.
        singles: Row of each lease on one part by itself: many, and short-lived.
    """

    __slots__ = ("_hints", "_leases", "_open", "number", "singles")

    def __init__(self, placement: Placement, hints: Hints) -> None:
        super().__init__(placement)
        self._hints = hints
        self.number = 0
        self.singles: dict[int, int] = {}
        self._open: dict[int, Lookup] = {}
        self._leases: dict[int, array[int]] = {}

    def leases(self) -> int:
        """Leases not yet released."""
        return len(self._leases) + len(self.singles)

    def leased_rows(self) -> list[int]:
        """Every row as often as it is leased, by leases and by lookups under way."""
        rows = [row for lease in self._leases.values() for row in lease]
        rows += self.singles.values()
        for look in self._open.values():
            rows.extend(look.rows)
            rows.extend(row for loose in look.loose for row, _ in loose.held)
        return rows

    # ------------------------------------------------------------------ scanning

    def begin(self, query: Query) -> Lookup:
        """Start a lookup; see :class:`Lookup`."""
        at, look = self._at, Lookup(self.number + 1, query)
        self.number += 1
        look.epoch = at.epoch
        look.clock = at.clock
        if query.touch:
            if look.counts and self._hints.waiting:
                self._hints.asked(query.keys)
            at.clock += len(query.keys)
        self._open[look.id] = look
        return look

    def lookup(self, handle: int) -> Lookup:
        """Lookup under way with that number.

        Raises:
            ClosedError: if it is finished or abandoned.
        """
        look = self._open.get(handle)
        if look is None:
            raise ClosedError(
                f"lookup {handle} is over: it was finished or abandoned; begin a new one"
            )
        return look

    def advance(self, look: Lookup, now: float) -> bool:
        """Handle the next slice; True when the lookup is done."""
        self.lookup(look.id)
        if look.epoch != self._at.epoch:
            # something that it may count on was taken away between two slices
            self._drop_leases(look)
            look.reset(self._at.epoch)
        stop, start = min(look.end, look.position + SLICE), look.query.start
        if look.position < start:
            self._pass_over(look, min(stop, start), now)
        if look.position < stop:
            if look.loose:
                self._scan(look, stop, now)
            else:
                self._scan_strict(look, stop, now)
        told = not self._at.ears or not look.counts or self._tell(look, now)
        if look.position >= look.end:
            look.done = self._trim(look) and told
        return look.done

    def _tell(self, look: Lookup, now: float) -> bool:
        """Tell admission which parts are asked for, there or not, a slice at a time."""
        query, ears = look.query, self._at.ears
        stop = min(len(query.keys), look.heard + SLICE)
        for key in query.keys[look.heard : stop]:
            for group in range(len(query.groups)):
                name: PartId = key + group.to_bytes(2, "little")  # type: ignore[assignment]
                ident = identify(name)
                for gate in ears:
                    gate.seen(ident, now)
        look.heard = stop
        return stop == len(query.keys)

    def _pass_over(self, look: Lookup, stop: int, now: float) -> None:
        """Renew what is there of blocks that are in place: they are in use, if not from here.

        Else what everybody begins with would go, as nobody ever has to load it.
        """
        query = look.query
        for block in range(look.position, stop if query.touch else 0):
            for _, suffix in look.strict:
                name = query.keys[block] + suffix
                row, mask = self._copies(name, query.tiers, lossy=query.lossy, now=now)
                if mask:
                    depth = len(query.keys) - block if self._at.step < 0 else block + 1
                    self._touch(look, row, depth, now)
        look.position = stop

    def _scan_strict(self, look: Lookup, stop: int, now: float) -> None:
        """Scan blocks where all groups need every block: the common case, kept tight."""
        at, query, keys = self._at, look.query, look.query.keys
        index = at.index
        get, resident, lossless = index.rows.get, index.resident, index.lossless
        flags, expiry, generation, charge = (
            index.flags,
            index.expiry,
            index.generation,
            index.charge,
        )
        found, rows, strict, lossy = look.found, look.rows, look.strict, query.lossy
        readable = at.readable & query.tiers
        busy, pin, touch = at.busy, at.pin, at.touch if query.touch else None
        until = inf if query.ttl is None else now + query.ttl
        # the root of a chain ends up as the most recent part of it: leaves go first anyway
        step = at.step
        clock = look.clock + (len(keys) if step < 0 else 1)
        for block in range(look.position, stop):
            for group, suffix in strict:
                part: PartId = keys[block] + suffix  # type: ignore[assignment]
                row = get(part, NO_ROW)
                mask = resident[row] & readable if row >= 0 else 0
                if mask and not lossy:
                    mask = mask & lossless[row] if flags[row] & EXACT else 0
                if not mask or expiry[row] <= now:
                    look.end = block
                    look.reason = self.why(part, lossy, now)
                    break
                tier = (mask & -mask).bit_length() - 1
                found.append(
                    _new(FoundPart, (part, block, group, tier, generation[row], charge[tier][row]))
                )
                rows.append(row)
                if row in busy:
                    busy[row] += 1
                else:
                    pin(row)
                if touch is not None:
                    touch(row, clock + step * block, until)
            else:
                continue
            break
        look.position = stop
        look.best = min(look.end, stop)

    def _scan(self, look: Lookup, stop: int, now: float) -> None:
        """Scan blocks of a space that has sliding or state groups as well."""
        query, strict = look.query, look.strict
        for block in range(look.position, stop):
            key = query.keys[block]
            for group, suffix in strict:
                got = self._take(look, block, group, key + suffix, now)
                if got is None:
                    look.end = block
                    if look.best == block:
                        look.reason = self.why(key + suffix, query.lossy, now)
                    break
                row, part = got
                look.found.append(part)
                look.rows.append(row)
                if query.touch:
                    depth = len(query.keys) - block if self._at.step < 0 else block + 1
                    self._touch(look, row, depth, now)
            if look.end == block:
                break
            self._scan_loose(look, block, now)
        look.position = stop

    def _scan_loose(self, look: Lookup, block: int, now: float) -> None:
        query = look.query
        tokens, reason = look.tokens(block + 1), None
        for loose in look.loose:
            part = query.keys[block] + loose.suffix
            got = self._take(look, block, loose.group, part, now)
            if got is None:
                loose.since = block + 1
            else:
                loose.held.append(got)
            if loose.since > loose.first(tokens, block, query.block_tokens) and reason is None:
                missing = query.keys[loose.since - 1] + loose.suffix
                reason = self.why(missing, query.lossy, now)
        if reason is None:
            look.best, look.reason = block + 1, None
        elif look.reason is None and look.best <= block:
            look.reason = reason
        pinned = self._at
        for loose in look.loose:
            # what the best prefix so far does not need, no longer one needs either
            first = loose.first(look.tokens(look.best), look.best - 1, query.block_tokens)
            while loose.held and loose.held[0][1].block < first:
                pinned.unpin(loose.held.popleft()[0])

    def _take(
        self, look: Lookup, block: int, group: int, name: bytes, now: float
    ) -> tuple[int, FoundPart] | None:
        row, mask = self._copies(name, look.query.tiers, lossy=look.query.lossy, now=now)
        if not mask:
            return None
        index, tier = self._at.index, (mask & -mask).bit_length() - 1
        self._at.pin(row)
        part: PartId = name  # type: ignore[assignment]
        nbytes = index.charge[tier][row]
        return row, FoundPart(part, block, group, tier, index.generation[row], nbytes)

    def _touch(self, look: Lookup, row: int, clock: int, now: float) -> None:
        until = inf if look.query.ttl is None else now + look.query.ttl
        self._at.touch(row, look.clock + clock, until)

    def _trim(self, look: Lookup) -> bool:
        """Give back at most a slice of what lies behind the prefix; True if nothing is left."""
        budget, most = SLICE, (look.best - look.query.start) * len(look.strict)
        while budget and len(look.found) > most:
            look.found.pop()
            self._at.unpin(look.rows.pop())
            budget -= 1
        for loose in look.loose:
            while budget and loose.held and loose.held[-1][1].block >= look.best:
                self._at.unpin(loose.held.pop()[0])
                budget -= 1
        return budget > 0

    # ------------------------------------------------------------------ results

    def finish(self, look: Lookup, now: float) -> Found:
        """End a lookup: what is leased is what the prefix needs.

        Raises:
            ClosedError: if the lookup is not done, or over.
        """
        self.lookup(look.id)
        if look.epoch != self._at.epoch:
            while not self.advance(look, now):  # from its beginning
                pass
        if not look.done:
            raise ClosedError(f"lookup {look.id} is not done; advance() it until that returns True")
        parts = self._needed(look, now)
        lease = 0
        if look.query.lease and look.rows:
            lease = look.id
            self._leases[lease] = look.rows
            del self._open[look.id]
        else:
            self.abandon(look)
        tokens = look.tokens(look.best) if look.best else 0
        return Found(look.best, tokens, parts, lease, look.reason)

    def _needed(self, look: Lookup, now: float) -> tuple[FoundPart, ...]:
        tail: list[FoundPart] = []
        for loose in look.loose:
            for row, part in loose.held:
                tail.append(part)
                look.rows.append(row)
                if look.query.touch:
                    self._touch(look, row, part.block + 1, now)
            loose.held.clear()
        if not tail:
            return tuple(look.found)
        start = bisect_left(look.found, min(p.block for p in tail), key=lambda p: p.block)
        mixed = sorted(look.found[start:] + tail, key=lambda p: (p.block, p.group))
        return (*look.found[:start], *mixed)

    def abandon(self, look: Lookup) -> None:
        """Give every lease of a lookup back; harmless if it is over."""
        if self._open.pop(look.id, None) is not None:
            self._drop_leases(look)

    def _drop_leases(self, look: Lookup) -> None:
        for row in look.rows:
            self._at.unpin(row)
        for loose in look.loose:
            for row, _ in loose.held:
                self._at.unpin(row)

    def release(self, lease: int) -> list[Drop]:
        """End a lease of a lookup; unknown ones are ignored."""
        at = self._at
        for row in self._leases.pop(lease, ()):
            at.unpin(row)
        return at.collect() if at.ready else []
