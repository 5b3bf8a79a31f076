"""Whole-frame reads from tiers that the engine cannot address, each made once for all readers.

A *flight* is one such read. It belongs to the engine: readers join and leave (or are cancelled)
as they like. Its bytes land in staging memory or, where the fastest memory tier above their own
has room, directly in that tier, so that the part is promoted without a further copy. What is
promoted is verified here, before it is published; what landed in staging memory is verified by
the first reader, just before the copy that its reading is for.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tierkv.abc import IoStatus, ReadRequest
from tierkv.decisions.types import EvictReason, SkipReason, StoreItem
from tierkv.errors import ClosedError, CodecError, TierKVError
from tierkv.fitting import ForeignFrame
from tierkv.frame import page_round
from tierkv.mover.core import INLINE_BYTES, stored_part
from tierkv.mover.staged import Slice, stage
from tierkv.pipeline import open_frame, verify
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Buffer, IoResult, StoredPart
    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import FoundPart
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level

__all__ = ["Fetcher", "Flight", "Wanted"]

_log = logging.getLogger("tierkv.mover")


class Wanted:
    """One part that somebody wants: where it is, and what it must be."""

    __slots__ = ("found", "parent", "root", "space")

    def __init__(
        self, found: FoundPart, space: Space, root: BlockKey, parent: PartId | None
    ) -> None:
        self.found = found
        self.space = space
        self.root = root
        self.parent = parent


class Flight:
    """One read under way or done; ``frame`` is valid from landing until :meth:`leave`.

    Attributes:
        wanted: What is read.
        number: Of the batch that it is read with. Batches get their memory in this order, each
            all of it at once.
        landed: Set when the read is over, well or not.
        checked: Whether the bytes were verified.
        demand: Whether somebody waits for it, so that it is worth reading even without room in
            a faster tier.
        users: Who has joined and not left.
        frame: The bytes, or None.
        header: Their header, once it was opened.
        failure: Why there are no bytes, or no good ones.
    """

    __slots__ = (
        "_slice",
        "checked",
        "demand",
        "failure",
        "frame",
        "header",
        "landed",
        "number",
        "users",
        "wanted",
    )

    def __init__(self, wanted: Wanted, number: int, *, demand: bool) -> None:
        self.wanted = wanted
        self.number = number
        self.landed = Signal()
        self.demand = demand
        self.checked = False
        self.users = 1
        self.frame: memoryview | None = None
        self.header: Header | None = None
        self.failure: EvictReason | None = None
        self._slice: Slice | None = None

    def leave(self) -> None:
        """Stop using the frame; call once per join."""
        self.users -= 1
        if self.users == 0 and self.landed.is_set():
            self._give_back()

    def _land(self) -> None:
        self.landed.set()
        if self.users == 0:
            self._give_back()

    def _give_back(self) -> None:
        self.frame = None
        if self._slice is not None:
            self._slice.release()
            self._slice = None


class Fetcher:
    """Starts flights and lets readers share them.

    Attributes:
        promoted: Called with parts that were just verified, the tier that they are in, and their
            space, where a tier in a device's memory stands above that tier: for bringing them
            there. None: nobody does.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.promoted: Callable[[Level, Sequence[StoredPart], Space], None] | None = None
        self._flights: dict[tuple[PartId, int, int], Flight] = {}
        self._started = 0
        self._in_flight = 0  # more than can be joined: some fly apart

    def __repr__(self) -> str:
        return f"<Fetcher: {self._in_flight} flights>"

    @property
    def in_flight(self) -> int:
        """Reads under way, shared or not."""
        return self._in_flight

    def lands(self, source: Level) -> Level | None:
        """The fastest memory tier above ``source``: where its parts land when they are read."""
        above = self._core.levels[: source.index]
        return next((level for level in above if level.memory is not None), None)

    def wanted_above(self, level: Level) -> bool:
        """Whether parts of this tier are worth :meth:`offer`-ing."""
        if self.promoted is None:
            return False
        return any(above.resident is not None for above in self._core.levels[: level.index])

    def offer(self, level: Level, parts: Sequence[StoredPart], space: Space) -> None:
        """Tell of verified parts of a tier that a device's tier may want to have."""
        if self.promoted is not None and parts and self.wanted_above(level):
            self.promoted(level, parts, space)

    def flying(self, found: FoundPart) -> int:
        """Number of the batch that reads this very copy; 0 if it is not being read."""
        flight = self._flights.get((found.part, found.generation, found.tier))
        return 0 if flight is None else flight.number

    def join(
        self, wanted: Sequence[Wanted], *, demand: bool = True, apart: bool = False
    ) -> list[Flight]:
        """Join the flight of each part, starting one batch per tier for those not under way.

        The caller holds a lease on the parts and must :meth:`Flight.leave` each flight.

        Args:
            wanted: The parts.
            demand: False for a prefetch: what finds no room in the fast tier is then not read.
            apart: Whether to share no flight: for who must not wait for several batches at once.

        Raises:
            ClosedError: if the engine is closed; nothing is then joined.
        """
        joined: list[Flight] = []
        fresh: dict[int, list[Flight]] = {}
        for want in wanted:
            tier = want.found.tier
            key = (want.found.part, want.found.generation, tier)
            flight = None if apart else self._flights.get(key)
            if flight is None:
                batch = fresh.setdefault(tier, [])
                if not batch:
                    self._started += 1
                number = batch[0].number if batch else self._started
                flight = Flight(want, number, demand=demand)
                self._in_flight += 1
                if not apart:
                    self._flights[key] = flight
                batch.append(flight)
            else:
                flight.users += 1
                flight.demand = flight.demand or demand
            joined.append(flight)
        try:
            for tier, flights in fresh.items():
                level = self._core.levels[tier]
                self._core.workers.spawn(self._fly, level, flights, name="fetch")
        except ClosedError:
            for flight in joined:
                flight.leave()
            for flights in fresh.values():
                self._finish(flights)
            raise
        return joined

    def _finish(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            found = flight.wanted.found
            key = (found.part, found.generation, found.tier)
            if self._flights.get(key) is flight:
                del self._flights[key]
            if flight.frame is None and flight.failure is None:
                flight.failure = EvictReason.FAILED
            self._in_flight -= not flight.landed.is_set()
            flight._land()

    async def _fly(self, level: Level, flights: list[Flight]) -> None:
        promotion: _Promotion | None = None
        try:
            promotion = _Promotion(self, level, flights)
            await asyncio.sleep(0)  # a batch in one go would hold up the loop for milliseconds
            # what was prefetched and finds no room worth taking is not read: whoever wants it
            # from now on must not take it for being under way
            vain = [f for f in flights if not f.demand and promotion.buffer_of(f) is None]
            self._finish(vain)
            flights = [f for f in flights if f.demand or promotion.buffer_of(f) is not None]
            await self._read(level, flights, promotion)
        except TierKVError as error:
            _log.warning(
                "tier %s: a fetch of %d frames failed: %s", level.name, len(flights), error
            )
        except Exception:  # noqa: BLE001 - whatever a plug-in does, whoever waits must hear of it
            _log.exception("tier %s: a fetch of %d frames failed", level.name, len(flights))
        finally:
            # also on cancellation (engine closing): nothing is left in a tier half published
            if promotion is not None:
                promotion.abandon()
            self._finish(flights)

    async def _read(self, level: Level, flights: Sequence[Flight], promotion: _Promotion) -> None:
        staged = [f for f in flights if promotion.buffer_of(f) is None]
        sizes = [level.backend.longest(f.wanted.found.nbytes) for f in staged]
        slices = await stage(self._core.staging, sizes)
        for flight, piece in zip(staged, slices, strict=True):
            flight._slice = piece
        into: list[memoryview] = []
        requests = []
        for flight in flights:
            found = flight.wanted.found
            buffer = promotion.buffer_of(flight) or flight._slice
            assert buffer is not None
            size = page_round(buffer.nbytes)
            requests.append(ReadRequest(found.part, found.generation, 0, size))
            into.append(buffer.padded[:size])
        if requests:
            results = await self._core.read(level, requests, into)
            await self._check(flights, into, results, promotion)
            await asyncio.sleep(0)
        promotion.settle()

    async def _check(
        self,
        flights: Sequence[Flight],
        into: Sequence[memoryview],
        results: Sequence[IoResult],
        promotion: _Promotion,
    ) -> None:
        """Keep what was read; verify what is going to be published."""
        core = self._core
        good = []
        for flight, memory, result in zip(flights, into, results, strict=True):
            found = flight.wanted.found
            if result.status is not IoStatus.OK:
                flight.failure = core.unreadable(found, result)
                continue
            core.bytes_copied += found.nbytes
            if promotion.buffer_of(flight) is None:
                flight.frame = memory
            else:
                good.append((flight, memory))
        if sum(len(memory) for _, memory in good) < INLINE_BYTES:
            checked = _verify_all(good)
        else:
            checked = await core.workers.run(_verify_all, good)
        for (flight, memory), header in zip(good, checked, strict=True):
            found = flight.wanted.found
            if isinstance(header, ForeignFrame):
                flight.failure = EvictReason.FAILED  # for this reader; the copy is good
            elif isinstance(header, CodecError):
                flight.failure = EvictReason.DAMAGED
                core.damaged(found.part, found.tier, found.generation, "checksum")
            else:
                flight.header, flight.frame, flight.checked = header, memory, True


def _verify_all(frames: Sequence[tuple[Flight, memoryview]]) -> list[Header | CodecError]:
    out: list[Header | CodecError] = []
    for flight, frame in frames:
        want = flight.wanted
        try:
            header = open_frame(
                frame, want.space, want.found.part, want.found.generation, want.root
            )
            verify(header, frame)
        except CodecError as error:
            out.append(error)
        else:
            out.append(header)
    return out


class _Promotion:
    """Room in a memory tier for parts that are being read, published once verified."""

    def __init__(self, fetcher: Fetcher, source: Level, flights: Sequence[Flight]) -> None:
        self._fetcher = fetcher
        self._core = core = fetcher._core
        self._open: dict[Flight, tuple[int, Buffer]] = {}
        self._reservation = 0
        level = fetcher.lands(source)
        if level is None or level.memory is None or not flights:
            return
        self._level, self._target = level, level.memory
        target = level.memory
        items = [
            StoreItem(
                f.wanted.found.part,
                f.wanted.parent,
                f.wanted.root,
                target.charge(source.backend.longest(f.wanted.found.nbytes)),
            )
            for f in flights
        ]
        ahead = not any(f.demand for f in flights)
        reserved = core.reserve(level, items, demand=False, source=source, ahead=ahead)
        self._reservation = reserved.id
        refused = []
        for index, (flight, outcome) in enumerate(zip(flights, reserved.outcomes, strict=True)):
            if not outcome.generation:
                continue
            buffer = target.allocate(source.backend.longest(flight.wanted.found.nbytes))
            if buffer is None:
                refused.append(index)
            else:
                self._open[flight] = (index, buffer)
        if refused:
            core.rollback(reserved.id, refused, SkipReason.FULL)

    def buffer_of(self, flight: Flight) -> Buffer | None:
        """Where this flight's bytes should land, if it is to be promoted."""
        held = self._open.get(flight)
        return held[1] if held is not None else None

    def settle(self) -> None:
        """Publish what was verified, give the rest back. Atomic: no await."""
        core = self._core
        for flight, (index, buffer) in list(self._open.items()):
            if flight.header is None:
                continue
            del self._open[flight]
            stored = stored_part(flight.header)
            if not self._target.adopt(stored, buffer):
                self._undo(flight, index, buffer)
                continue
            drops = core.commit(self._level, self._reservation, [index], [stored])
            if any(d.part == stored.part and d.tier == self._level.index for d in drops):
                # replaced while it was read: its memory is free again, nobody may look at it
                flight.header = flight.frame = None
            else:
                self._fetcher.offer(self._level, [stored], flight.wanted.space)

    def abandon(self) -> None:
        """Give back what was not published. Atomic, idempotent."""
        for flight, (index, buffer) in list(self._open.items()):
            del self._open[flight]
            self._undo(flight, index, buffer)

    def _undo(self, flight: Flight, index: int, buffer: Buffer) -> None:
        flight.header = flight.frame = None
        buffer.release()
        self._core.rollback(self._reservation, [index], SkipReason.CLOSED)
