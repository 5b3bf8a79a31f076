"""What planning needs of others, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import GroupRule

__all__ = ["PlanSettings", "PlannerCounters", "Replicas"]


class Replicas(Protocol):
    """What the ranks hold; :class:`~tierkv_adapters.serving.replicas.ReplicaIndex`."""

    def match(
        self,
        keys: Sequence[Sequence[BlockKey]],
        groups: Sequence[GroupRule],
        block_tokens: int,
        *,
        start: int = 0,
    ) -> int:
        """Blocks of the longest prefix that every rank could load."""
        ...

    def source(
        self,
        keys: Sequence[Sequence[BlockKey]],
        groups: Sequence[GroupRule],
        block_tokens: int,
        blocks: int,
        *,
        start: int = 0,
    ) -> int:
        """Bit of the slowest tier that a load would read."""
        ...


class PlanSettings(Protocol):
    """The settings that planning reads."""

    @property
    def load_deadline(self) -> float | None:
        """Seconds after which a load ends with what it has."""
        ...

    @property
    def min_load_tokens(self) -> int:
        """Fewer tokens than this are not worth a load."""
        ...


@dataclass(slots=True)
class PlannerCounters:
    """Plain counts; tokens where the name says so.

    Attributes:
        requests: Requests admitted.
        uncacheable: Those of which nothing may be loaded or stored.
        lookups: Offers that were looked up.
        offered_tokens: Tokens offered; an offer repeated before it was taken counts once.
        accepted_tokens: Tokens ordered to be loaded.
        loaded_tokens: Tokens that ranks reported to be in place, of those ordered.
        loads: Loads ordered.
        failed_loads: Loads that fell short.
        failed_tokens: Tokens that had to be computed after all because of it.
        blocked: Offers cut short by a block that failed a short while ago.
        misaligned: Offers not made because the engine's own hit ends inside a page.
        saves: Saves ordered.
        saved_blocks: Blocks in them.
        unbacked_blocks: Blocks not saved because pages of them were gone.
    """

    requests: int = 0
    uncacheable: int = 0
    lookups: int = 0
    offered_tokens: int = 0
    accepted_tokens: int = 0
    loaded_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    failed_tokens: int = 0
    blocked: int = 0
    misaligned: int = 0
    saves: int = 0
    saved_blocks: int = 0
    unbacked_blocks: int = 0
