"""What a store is asked to do, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tierkv.pipeline import PartLabel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv.abc import Device, Event, View
    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import SkipReason
    from tierkv.layout import Space

__all__ = ["NewPart", "PartOutcome", "StorePlan"]


class NewPart(NamedTuple):
    """One part to take out of the caller's view."""

    part: PartId
    parent: PartId | None
    parent_key: BlockKey | None
    group: int
    start: int
    tokens: int
    private: bool = False


class PartOutcome(NamedTuple):
    """What became of one part: stored in ``tier``, already present, or skipped and why."""

    stored: bool
    skip: SkipReason | None = None
    tier: int = 0


@dataclass(slots=True)
class StorePlan:
    """One chain of parts to store, and what became of each.

    Attributes:
        space: Space of the parts.
        root: Root of the key chain.
        view: Where the KV is.
        parts: The parts, parents first; taken once, a batch at a time.
        tenant: Whose they are.
        session: Session that stores them.
        session_parts: What the session refers to, if it has a quota.
        fidelity: ``"exact"``, or ``"derived:<how>"``.
        ttl: Seconds they live after their last use, or None.
        device: Device whose memory the view is in; None: plain host memory.
        ready: What the device has to wait for before the view can be read.
        nbytes: Bytes of all its parts, as far as that is known beforehand.
        resets: How often the engine had been reset when the store was asked for: if it is reset
            after that, nothing more of it becomes visible.
        done: Each part and what became of it, in order.
    """

    space: Space
    root: BlockKey
    view: View
    parts: Iterable[NewPart]
    tenant: str = ""
    session: str = ""
    session_parts: Sequence[PartId] = ()
    fidelity: str = "exact"
    ttl: float | None = None
    device: Device | None = None
    ready: Event | None = None
    nbytes: int = 0
    resets: int = 0
    done: list[tuple[NewPart, PartOutcome]] = field(default_factory=list)

    def label(self, new: NewPart, generation: int, expires: float | None) -> PartLabel:
        """What the frame of ``new`` says of itself."""
        return PartLabel(
            part=new.part,
            generation=generation,
            root=self.root,
            parent=new.parent_key,
            fidelity=self.fidelity,
            tokens=new.tokens,
            tenant=self.tenant,
            expires=expires,
        )
