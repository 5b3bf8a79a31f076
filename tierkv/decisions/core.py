"""The decision object: what lives where, who is evicted, what may be loaded.

Synchronous, without I/O, without a clock of its own: every call takes ``now`` (seconds,
monotonic), changes the state at once and returns the moves to make. A cancelled caller can
therefore never cut a decision in half, and the offline replay drives this very class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.recovery import recover
from tierkv.decisions.told import Told
from tierkv.decisions.types import SkipReason
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.lookup import Lookup
    from tierkv.decisions.types import (
        Demote,
        Drop,
        EvictReason,
        Found,
        Query,
        Reservation,
        StoreItem,
    )

__all__ = ["Decisions"]


class Decisions(Told):
    """Sans-IO core of an engine.

    Not thread-safe: one event loop (or one replay) drives it. O(log n) a block; with tenants that
    have limits of their own, evictions look at each such tenant once.

    Args:
        tiers: Fast to slow.
        policy: Makes the eviction policy of a tier: one for all tiers, or one each. It is called
            once more for each tenant with limits in that tier.
        tenants: Limits by tenant.
        default_limits: Limits of every other tenant; None: no limits.
        admission: Makes what decides which parts may enter a tier: one for all tiers, or one
            (or None) each. None admits everything.
        touch_order: Which part of a chain that is used at once counts as the most recent one:
            ``"leaf_first"`` touches the leaf first and the root last, which keeps what others
            share; ``"root_first"`` is what some published figures were made with.
        history: Parts whose reason of departure is remembered.
        log: Where the decision log goes; None costs nothing.

    Raises:
        ConfigError: if the tiers or limits contradict themselves.
    """

    # ------------------------------------------------------------------ lookups

    def begin_lookup(self, query: Query, now: float) -> Lookup:
        """Start a lookup; it must end in :meth:`finish` or :meth:`abandon`."""
        look = self._matcher.begin(query)
        self._record("begin_lookup", now, (query,), look.id)
        return look

    def advance(self, lookup: Lookup, now: float) -> bool:
        """Look at the next 256 blocks at most and lease what is found; True when done.

        Raises:
            ClosedError: if the lookup is over.
        """
        done = self._matcher.advance(lookup, now)
        self._record("advance", now, (lookup.id,), done)
        return done

    def finish(self, lookup: Lookup, now: float) -> Found:
        """End a lookup. Leases on parts that the prefix does not need are given back.

        Raises:
            ClosedError: if the lookup is not done, or over.
        """
        found = self._matcher.finish(lookup, now)
        self._record("finish", now, (lookup.id,), found)
        return found

    def abandon(self, lookup: Lookup, now: float) -> None:
        """End a lookup whose caller is gone: every lease comes back. Idempotent."""
        self._matcher.abandon(lookup)
        self._record("abandon", now, (lookup.id,), None)

    def lookup(self, query: Query, now: float) -> Found:
        """Look up a whole chain at once: for short ones, and offline."""
        look = self._matcher.begin(query)
        while not self._matcher.advance(look, now):
            pass
        found = self._matcher.finish(look, now)
        self._record("lookup", now, (query,), found)
        return found

    # ------------------------------------------------------------------ stores and copies

    def reserve(
        self,
        tier: int,
        items: Sequence[StoreItem],
        *,
        tenant: str,
        now: float,
        session: str = "",
        session_bytes: int = 0,
        demand: bool = True,
        source: int | None = None,
        ahead: bool = False,
    ) -> Reservation:
        """First phase of a store or copy: decide item by item, set bytes aside, evict.

        Args:
            tier: Where to.
            items: A chain in order, parents first; possibly of several groups.
            tenant: Whose parts they are. With ``source``, tenant, parent, fidelity and TTL are the
                part's own, whatever is said here.
            now: Time.
            session: Session that stores them; its quota applies if it is named.
            session_bytes: Bytes that the session refers to already.
            demand: False for what nobody waits for (prefetch, promotion): then only parts that
                were last used no later than the item itself make room.
            source: Tier that a resident part is copied from; it is held there until commit or
                rollback. None: new KV.
            ahead: Whether a copy is made ahead of a use that is expected (a prefetch), not on a
                hit: the thrash guard lets it pass.

        Returns:
            One outcome an item, the copies to free first, and the bytes missing because only
            dirty copies are left to evict (see :meth:`make_room`).

        Raises:
            ConfigError: if there is no such tier.
        """
        self._tier(tier)
        limits = self._at.ledger.limits(self._at.ledger.tenant(tenant))
        left: int | None = None
        if limits is not None and limits.session_quota is not None and session:
            left = limits.session_quota - session_bytes
        result = self._storer.reserve(
            tier, items, tenant, now, left, demand=demand, source=source, ahead=ahead
        )
        args = (tier, items, tenant, session, session_bytes, demand, source, ahead)
        self._record("reserve", now, args, result)
        self._settle(now)
        return result

    def commit(
        self,
        reservation: int,
        done: Sequence[int],
        now: float,
        charges: Sequence[int] | None = None,
        lossless: Sequence[bool] | None = None,
    ) -> tuple[Drop, ...]:
        """Second phase: items that are written and verified become visible.

        Args:
            reservation: Handle from :meth:`reserve`.
            done: Numbers of the items.
            now: Time.
            charges: Bytes really charged for each of ``done``; the rest is given back.
            lossless: Whether each of ``done`` came out lossless.

        Returns:
            Copies that are outdated now, in every tier.

        Raises:
            ClosedError: if an item is not open (any more); nothing is then committed.
            CapacityError: if an item took more than was reserved; nothing is then committed.
        """
        drops = tuple(self._storer.commit(reservation, done, now, charges, lossless))
        self._record("commit", now, (reservation, done, charges, lossless), drops)
        self._settle(now)
        return drops

    def rollback(
        self,
        reservation: int,
        failed: Sequence[int],
        now: float,
        reason: SkipReason = SkipReason.FAILED,
    ) -> tuple[Drop, ...]:
        """Second phase, otherwise: bytes are given back, nothing becomes visible.

        Raises:
            ClosedError: if an item is not open (any more); nothing is then rolled back.
        """
        drops = tuple(self._storer.rollback(reservation, failed, now, reason))
        self._record("rollback", now, (reservation, failed, reason), drops)
        self._settle(now)
        return drops

    # ------------------------------------------------------------------ room

    def make_room(
        self, tier: int, nbytes: int, *, tenant: str, now: float
    ) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        """Have ``nbytes`` free in a tier: clean copies go at once, dirty ones are to be demoted.

        Args:
            tier: Where.
            nbytes: Bytes that shall be free in the end, what is free now included.
            tenant: For whom; if it has a quota there, that much is left of it as well.
            now: Time.

        Returns:
            Copies to free, and proposals. A proposed part is held until :meth:`dropped` (after it
            was copied with ``reserve(target, source=tier)``) or :meth:`cancel_demote`.
        """
        number = self._at.ledger.tenant(tenant)
        result = self._evictor.make_room(self._tier(tier), nbytes, number, now)
        self._record("make_room", now, (tier, nbytes, tenant), result)
        self._settle(now)
        return result

    def set_capacity(
        self, tier: int, capacity: int, now: float
    ) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        """Grow or shrink a tier while it is in use.

        Returns:
            As :meth:`make_room`. After a shrink, ``used`` may stay above the new capacity until
            the demotions are done and leases have ended; :meth:`tick` goes on with the rest.

        Raises:
            ConfigError: if there is no such tier, or the capacity is negative.
        """
        self._tier(tier)
        if capacity < 0:
            raise ConfigError(f"a capacity cannot be negative: {capacity}")
        result = self._evictor.resize(tier, capacity, now)
        self._record("set_capacity", now, (tier, capacity), result)
        self._settle(now)
        return result

    def dropped(
        self, parts: Sequence[tuple[PartId, int]], tier: int, reason: EvictReason, now: float
    ) -> tuple[Drop, ...]:
        """Forget copies (part, generation) of a tier that nobody uses or needs.

        A proposal to demote such a part ends here. A leased copy stays, and so does a last copy
        whose children are still there.

        Returns:
            What was really forgotten.
        """
        drops = tuple(self._evictor.dropped(parts, self._tier(tier), reason, now))
        self._record("dropped", now, (parts, tier, reason), drops)
        self._settle(now)
        return drops

    def cancel_demote(self, demotes: Sequence[Demote], now: float) -> None:
        """Take proposals back: the parts may be evicted again. Idempotent."""
        self._evictor.cancel(demotes)
        self._record("cancel_demote", now, (demotes,), None)

    # ------------------------------------------------------------------ faults, time, restart

    def invalidate(
        self, part: PartId, tier: int, generation: int, reason: EvictReason, now: float
    ) -> tuple[Drop, ...]:
        """Take back a copy that turned out bad; another generation is left alone.

        It is gone for lookups at once. If it is leased, its bytes come out of :meth:`release` or
        :meth:`tick` when the last lease has ended.
        """
        drops = tuple(self._at.invalidate(part, self._tier(tier), generation, reason, now))
        self._record("invalidate", now, (part, tier, generation, reason), drops)
        self._settle(now)
        return drops

    def forget(self, parts: Sequence[PartId], reason: EvictReason, now: float) -> tuple[Drop, ...]:
        """Forget every copy of some parts, for example a session's private tail."""
        drops = tuple(self._at.forget(parts, reason, now))
        self._record("forget", now, (parts, reason), drops)
        self._settle(now)
        return drops

    def tick(self, now: float) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        """Do what time brings: TTLs, watermarks, consequences of holes. Bounded (1024 parts).

        Returns:
            As :meth:`make_room`.
        """
        self._at.writable = self.costs.writable(now)
        self._hints.tick()
        result = self._evictor.tick(now)
        self._record("tick", now, (), result)
        self._settle(now)
        return result

    def recover(
        self,
        tier: int,
        parts: Sequence[StoredPart],
        charges: Sequence[int],
        now: float,
        wall: float,
        floor: int = 0,
    ) -> tuple[Drop, ...]:
        """Take over what a durable tier still holds, before anything is stored in it.

        Older duplicates, expired parts and, if the tier has become too small, the coldest parts
        come back as drops. Generations continue behind the largest one found. A part whose parent
        is missing is kept but goes first.

        Args:
            tier: Tier that holds them.
            parts: What it holds, in any order.
            charges: Bytes charged for each.
            now: Time on the monotonic clock of all calls.
            wall: The same moment on the wall clock, on which expiry times are stored.
            floor: New generations are greater than this, too. What was stored last before a crash
                may have left bytes on a medium that no record tells of any more.
        """
        self._tier(tier)
        self._storer.seen(floor)
        drops = tuple(
            recover(self._at, self._storer, self._evictor, tier, parts, charges, now, wall)
        )
        self._record("recover", now, (tier, parts, charges, wall, floor), drops)
        self._settle(now)
        return drops
