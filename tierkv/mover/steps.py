"""Blocks on their way into a view: what a load wants of each, and what came of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import FoundPart, MissReason
    from tierkv.mover.fetch import Flight
    from tierkv.mover.inplace import InPlace, Place
    from tierkv.mover.load import LoadPlan
    from tierkv.mover.scattering import Arrived

__all__ = ["Ready", "Step", "asks_to_stop", "never", "on_device", "steps", "stop"]


@dataclass(slots=True, eq=False)
class Step:
    """One block of one plan: its parts, and how those that must travel do.

    Attributes:
        plan: The load it belongs to.
        block: Number of the block.
        parts: What the load needs of it.
        flights: Parts that are read as whole frames.
        places: Parts that are read straight into the view.
        held: Parts in the memory of the view's own device.
        cold: Parts that have to be read.
        apart: Whether several batches of others read them: then they are read once more.
    """

    plan: LoadPlan
    block: int
    parts: list[FoundPart]
    flights: dict[PartId, Flight] = field(default_factory=dict)
    places: dict[PartId, tuple[InPlace, Place]] = field(default_factory=dict)
    held: dict[PartId, Arrived] = field(default_factory=dict)
    cold: list[FoundPart] = field(default_factory=list)
    apart: bool = False

    @property
    def start(self) -> int:
        """Token of the view at which the block starts."""
        return self.block * self.plan.space.block_tokens


@dataclass(slots=True, eq=False)
class Ready:
    """A step whose bytes are in reach, and what came of it.

    Attributes:
        step: The step.
        parts: Its bytes.
        bad: The part that is damaged, if one is.
        done: Whether it is in place, or on its way there.
        derived: How it differs from exact KV; empty if it does not.
        news: Tiers and verified parts that a faster tier may want.
        nbytes: Bytes of the frames that are copied.
    """

    step: Step
    parts: list[Arrived]
    bad: Arrived | None = None
    done: bool = False
    derived: str = ""
    news: list[tuple[int, StoredPart]] = field(default_factory=list)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum([part.found.nbytes for part in self.parts if not part.placed])


def steps(plans: Sequence[LoadPlan], *, near: bool = False) -> Iterator[Step]:
    """Each block to load of each plan, in order.

    Args:
        plans: The loads.
        near: Whether nothing has to travel: the steps then share empty tables, which must stay so.
    """
    nothing: list[FoundPart] = []
    none: dict[PartId, Any] = {}
    for plan in plans:
        parts = iter(plan.found.parts)
        begin = plan.progress.blocks  # what is before it is in place
        ahead = next((part for part in parts if part.block >= begin), None)
        for block in range(begin, plan.found.blocks):
            mine = []
            while ahead is not None and ahead.block == block:
                mine.append(ahead)
                ahead = next(parts, None)
            if near:
                yield Step(plan, block, mine, none, none, none, nothing)
            else:
                yield Step(plan, block, mine)


def stop(plan: LoadPlan, reason: MissReason) -> None:
    """End a load before the block that it is at; the first reason stays."""
    if plan.progress.reason is None:
        plan.progress.reason = reason


def on_device(item: Ready) -> bool:
    """Whether a block goes into the memory of a device."""
    return item.step.plan.target.device is not None


def asks_to_stop() -> Callable[[], bool]:
    """Tells, from any thread, whether the running task was cancelled since this was called.

    Natively or by a scope, which cancels natively, too. A worker thread that somebody waits for
    asks it between pieces of work.
    """
    task = asyncio.current_task()
    if task is None:
        return never
    before, cancelling = task.cancelling(), task.cancelling
    return lambda: cancelling() > before


def never() -> bool:
    """Nobody asks to stop."""
    return False
