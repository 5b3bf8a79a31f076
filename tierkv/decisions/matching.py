"""Lookups: the largest loadable prefix, in slices, leased as it is found."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final

from tierkv.decisions.index import EXACT, NO_ROW, identify
from tierkv.decisions.reasons import Reasons
from tierkv.decisions.types import Found, FoundPart, MissReason
from tierkv.errors import ClosedError
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from tierkv.blocks import PartId
    from tierkv.decisions.hinting import Hints
    from tierkv.decisions.placement import Placement
    from tierkv.decisions.types import Drop, Query

__all__ = ["SLICE", "Lookup", "Matcher"]

SLICE: Final = 256
"""Blocks that one call handles at most."""

_NEED_ALL: Final = (GroupKind.FULL, GroupKind.LATENT)


class _Loose:
    """A sliding or state group of one lookup: which parts are held, how far they reach back."""

    __slots__ = ("group", "held", "since", "suffix", "window")

    def __init__(self, group: int, window: int | None) -> None:
        self.group = group
        self.suffix = group.to_bytes(2, "little")
        self.window = window  # None: a state group, which needs the part at the boundary only
        self.since = 0  # parts since..now are all there
        self.held: deque[tuple[int, FoundPart]] = deque()

    def first(self, tokens: int, last: int, block_tokens: int) -> int:
        """First block whose part is needed where a prefix of ``tokens`` ends with ``last``."""
        if self.window is None:
            return last
        return max(0, tokens - (self.window - 1)) // block_tokens if self.window > 1 else last + 1


class Lookup:
    """One lookup under way; a handle for the caller, who reads :attr:`id` at most.

    Attributes:
        id: Number of the lookup, as in the decision log.
        query: What is looked up.
    """

    __slots__ = (
        "best",
        "clock",
        "counts",
        "done",
        "end",
        "epoch",
        "found",
        "heard",
        "id",
        "loose",
        "position",
        "query",
        "reason",
        "rows",
        "strict",
    )

    def __init__(self, number: int, query: Query) -> None:
        self.id = number
        self.query = query
        self.strict = [
            (group, group.to_bytes(2, "little"))
            for group, rule in enumerate(query.groups)
            if rule.kind in _NEED_ALL
        ]
        self.loose = [
            _Loose(group, rule.window)
            for group, rule in enumerate(query.groups)
            if rule.kind not in _NEED_ALL
        ]
        self.counts = query.touch and not query.ahead  # admission and hints hear of it
        self.clock = self.heard = 0  # heard: blocks that admission has been told of
        self.reset(0)

    def reset(self, epoch: int) -> None:
        """Start over."""
        self.position = 0
        self.end = len(self.query.keys)
        self.best = 0
        self.reason: MissReason | None = None
        self.found: list[FoundPart] = []
        self.rows = array("i")  # rows of `found`
        self.done = False
        self.epoch = epoch
        for loose in self.loose:
            loose.since = 0
            loose.held.clear()

    def tokens(self, blocks: int) -> int:
        """Tokens of a prefix of so many blocks."""
        query = self.query
        return query.tokens if blocks == len(query.keys) else blocks * query.block_tokens


class Matcher(Reasons):
    """Runs lookups and keeps leases."""

    __slots__ = ("_hints", "_leases", "_number", "_open")

    def __init__(self, placement: Placement, hints: Hints) -> None:
        super().__init__(placement)
        self._hints = hints
        self._number = 0
        self._open: dict[int, Lookup] = {}
        self._leases: dict[int, array[int]] = {}

    def leases(self) -> int:
        """Leases not yet released."""
        return len(self._leases)

    def leased_rows(self) -> list[int]:
        """Every row as often as it is leased, by leases and by lookups under way."""
        rows = [row for lease in self._leases.values() for row in lease]
        for look in self._open.values():
            rows.extend(look.rows)
            rows.extend(row for loose in look.loose for row, _ in loose.held)
        return rows

    # ------------------------------------------------------------------ scanning

    def begin(self, query: Query) -> Lookup:
        """Start a lookup."""
        at = self._at
        self._number += 1
        look = Lookup(self._number, query)
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
            self._restart(look)
        stop = min(look.end, look.position + SLICE)
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

    def _restart(self, look: Lookup) -> None:
        """Something that this lookup may count on was taken away between two slices."""
        self._drop_leases(look)
        look.reset(self._at.epoch)

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
        pin, touch = at.pin, at.touch if query.touch else None
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
                    FoundPart(part, block, group, tier, generation[row], charge[tier][row])
                )
                rows.append(row)
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
        index = self._at.index
        part: PartId = name  # type: ignore[assignment]
        row = index.rows.get(part, NO_ROW)
        mask = index.resident[row] & self._at.readable & look.query.tiers if row >= 0 else 0
        if mask and not look.query.lossy:
            mask = mask & index.lossless[row] if index.flags[row] & EXACT else 0
        if not mask or index.expiry[row] <= now:
            return None
        tier = (mask & -mask).bit_length() - 1
        self._at.pin(row)
        nbytes = index.charge[tier][row]
        return row, FoundPart(part, block, group, tier, index.generation[row], nbytes)

    def _touch(self, look: Lookup, row: int, clock: int, now: float) -> None:
        until = inf if look.query.ttl is None else now + look.query.ttl
        self._at.touch(row, look.clock + clock, until)

    def _trim(self, look: Lookup) -> bool:
        """Give back at most a slice of what lies behind the prefix; True if nothing is left."""
        budget = SLICE
        while budget and len(look.found) > look.best * len(look.strict):
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
            self._restart(look)
            while not self.advance(look, now):
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
        """End a lease; unknown ones are ignored."""
        at = self._at
        for row in self._leases.pop(lease, ()):
            at.unpin(row)
        return at.collect() if at.ready else []

    def hold(
        self, part: PartId, lossy: bool, now: float, tiers: int
    ) -> tuple[int, int, int] | None:
        """Lease one part by itself; see :meth:`Decisions.hold_part`."""
        at = self._at
        index = at.index
        row = index.rows.get(part, NO_ROW)
        mask = index.resident[row] & at.readable & tiers if row >= 0 else 0
        if mask and not lossy:
            mask = mask & index.lossless[row] if index.flags[row] & EXACT else 0
        if not mask or index.expiry[row] <= now:
            return None
        at.pin(row)
        self._number += 1
        self._leases[self._number] = array("i", (row,))
        return self._number, (mask & -mask).bit_length() - 1, index.generation[row]
