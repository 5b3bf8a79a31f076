"""Values that go into and come out of the decision object: frozen, closed enums, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import GroupKind

__all__ = [
    "Demote",
    "Drop",
    "EvictReason",
    "Found",
    "FoundPart",
    "GroupRule",
    "MissReason",
    "Outcome",
    "PartState",
    "Query",
    "Reservation",
    "SkipReason",
    "StoreItem",
    "TenantLimits",
    "TierLimits",
]


class _Reason(Enum):
    """Reasons. Each equals itself alone: its address will do as its hash, which takes no call."""

    __hash__ = object.__hash__


class MissReason(_Reason):
    """Why the first block of a lookup that is not loadable is a miss."""

    NEVER_STORED = "never_stored"
    PENDING = "pending"  # being stored right now
    EVICTED = "evicted"
    EXPIRED = "expired"
    QUOTA = "quota"  # evicted or refused because of a quota
    DAMAGED = "damaged"
    FAILED = "failed"  # the tier failed while reading or writing it
    REMOVED = "removed"  # cleared by its owner
    FIDELITY = "fidelity"  # only a lossy copy or derived KV is there, exact was asked for
    HOLE = "hole"  # a later part is there, but one that it needs is not
    DEADLINE = "deadline"  # not loaded in time
    REFUSED = "refused"  # admission kept it out
    SLOWER = "slower"  # loading would take longer than recomputing


class EvictReason(_Reason):
    """Why a copy left a tier."""

    CAPACITY = "capacity"
    QUOTA = "quota"
    EXPIRED = "expired"
    DEMOTED = "demoted"  # a copy stays in a slower tier
    DAMAGED = "damaged"
    FAILED = "failed"
    REPLACED = "replaced"  # a newer generation took its place
    REMOVED = "removed"
    ORPHANED = "orphaned"  # its prefix is gone for good
    SHRUNK = "shrunk"  # the tier was made smaller


class SkipReason(_Reason):
    """Why a part was not stored in a tier."""

    TOO_LARGE = "too_large"  # larger than the tier or quota
    FULL = "full"  # everything else is leased, protected or worth more
    TENANT_QUOTA = "tenant_quota"
    SESSION_QUOTA = "session_quota"
    IN_FLIGHT = "in_flight"  # somebody else is storing it right now
    NO_PARENT = "no_parent"  # the block before it is not stored
    FAILED = "failed"  # the medium refused or failed
    BACKPRESSURE = "backpressure"  # the write queue is full; the tail is dropped first
    CLOSED = "closed"
    REFUSED = "refused"  # admission said no
    RESET = "reset"  # the engine was reset after it was asked for


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What the decision object must know of a tier.

    Attributes:
        name: Name of the tier.
        capacity: Bytes, as charged by the backend.
        high: Used share above which :meth:`Decisions.tick` makes room.
        low: Used share down to which it makes room.
        durable: Whether parts survive a restart (they then go last to this tier).
        write_through: Whether every new part is copied here at once.
    """

    name: str
    capacity: int
    high: float = 1.0
    low: float = 0.9
    durable: bool = False
    write_through: bool = True


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Byte limits of one tenant in each tier; names of tiers as keys.

    Attributes:
        quota: Most bytes it may use.
        reserved: Bytes that other tenants cannot push out.
        session_quota: Most bytes that one of its sessions may refer to, over all tiers.
    """

    quota: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    session_quota: int | None = None


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What a loadable prefix needs of one layer group."""

    kind: GroupKind
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """One lookup.

    Attributes:
        keys: Keys of the blocks, in order; the last may be a private partial tail.
        groups: Rule of each group of the space.
        block_tokens: Tokens of a full block.
        tokens: Tokens that ``keys`` cover (less than blocks x block_tokens with a tail).
        lossy: Whether lossy copies and derived KV are welcome.
        ttl: Seconds for which a hit extends the life of the parts it touches; None: no TTL is
            applied by this session (a part without TTL lives until it is evicted).
        touch: Whether this counts as a use (a mere probe must not renew anything).
        lease: Whether the parts found are leased until released.
        ahead: Whether another lookup of the same request follows (this one is a prefetch's):
            then admission and hints hear of that one only.
        tiers: Tiers, one bit each, whose copies will do; -1: any.
        start: Leading blocks that are in place already: nothing of them is needed, found or
            leased, whatever the kind of the group. What is there of them counts as used.
    """

    keys: tuple[BlockKey, ...]
    groups: tuple[GroupRule, ...]
    block_tokens: int
    tokens: int
    lossy: bool = False
    ttl: float | None = None
    touch: bool = True
    lease: bool = True
    ahead: bool = False
    tiers: int = -1
    start: int = 0


class FoundPart(NamedTuple):
    """One part that a loadable prefix needs, in the fastest tier that has an acceptable copy."""

    part: PartId
    block: int
    group: int
    tier: int
    generation: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a lookup: the largest loadable prefix.

    Attributes:
        blocks: Blocks of the prefix (the tail counts as one), those before the query's start
            included.
        tokens: Tokens of the prefix.
        parts: Parts that a load needs, ordered by block, then group. Not every block of a
            sliding or state group is needed.
        lease: Handle of the lease on ``parts``; 0 if nothing is leased.
        reason: Why the prefix is not longer; None if all blocks were found.
    """

    blocks: int
    tokens: int
    parts: tuple[FoundPart, ...]
    lease: int
    reason: MissReason | None


class StoreItem(NamedTuple):
    """One part to put into a tier.

    Attributes:
        part: Which part.
        parent: Part of the same group one block earlier, if a prefix needs it: None for block 0
            and for every part of a sliding or state group. A part whose parent is nowhere is
            not stored, and a parent outlives its children.
        root: Root of the key chain.
        nbytes: Bytes as charged by the tier's backend.
        exact: Whether the KV is exact (not derived).
        lossless: Whether this copy is stored losslessly.
        ttl: Seconds to live from now, or None for no limit.
        private: Whether it is a session's partial tail.
    """

    part: PartId
    parent: PartId | None
    root: BlockKey
    nbytes: int
    exact: bool = True
    lossless: bool = True
    ttl: float | None = None
    private: bool = False


class Outcome(NamedTuple):
    """Decision about one item of a reservation.

    ``generation`` > 0: reserved under that generation; write, then commit or roll back.
    ``generation`` == 0 and ``skip`` None: an equal or better copy is already there.
    ``skip``: not stored, and why.
    """

    generation: int
    skip: SkipReason | None = None


class Drop(NamedTuple):
    """A copy that was just forgotten: the shell frees its bytes (they are accounted as free)."""

    part: PartId
    tier: int
    generation: int
    nbytes: int
    reason: EvictReason


class Demote(NamedTuple):
    """A copy worth keeping that should move from ``source`` to the slower tier ``target``."""

    part: PartId
    source: int
    target: int
    generation: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Result of a reservation.

    Attributes:
        id: Handle for commit and rollback; 0 if nothing was reserved.
        outcomes: One per item, in order.
        drops: Copies to free first.
        short: Bytes still missing because the victims left are dirty (they must be demoted
            before they may go); 0 if nothing was refused for that reason.
    """

    id: int
    outcomes: tuple[Outcome, ...]
    drops: tuple[Drop, ...] = ()
    short: int = 0


@dataclass(frozen=True, slots=True)
class PartState:
    """Where one part is, or why it is nowhere (for ``explain``).

    Attributes:
        tiers: Tiers that hold a copy, fastest first.
        pending: Tiers into which it is being written.
        leases: Leases out on it.
        generation: Generation of its copies; 0 if there is none.
        exact: Whether its KV is exact.
        lossless: For each of ``tiers``, whether that copy is lossless.
        nbytes: For each of ``tiers``, bytes that the copy takes there.
        reason: Why there is no copy; None if there is one.
        tier: The tier that the reason is about, if it is about one.
        ago: Seconds since the reason arose, if known.
    """

    tiers: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    leases: int = 0
    generation: int = 0
    exact: bool = True
    lossless: tuple[bool, ...] = ()
    nbytes: tuple[int, ...] = ()
    reason: MissReason | None = None
    tier: int | None = None
    ago: float | None = None
