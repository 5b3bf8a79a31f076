"""The bytes of a window's blocks: read from their tiers, or where they lie in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.types import EvictReason, MissReason
from tierkv.mover.scattering import Arrived
from tierkv.mover.steps import Ready, stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import MemoryBackend
    from tierkv.decisions.types import FoundPart
    from tierkv.mover.core import Core
    from tierkv.mover.steps import Step

__all__ = ["collect"]


def collect(core: Core, window: Sequence[Step], reached: dict[int, int]) -> list[Ready]:
    """Steps of which every part is in reach, none behind a gap; the others end their plan.

    Args:
        core: The engine's core.
        window: Steps that have arrived, or failed to.
        reached: By id of the plan: the block that it goes on with. Moved on.
    """
    memories = [level.memory for level in core.levels]
    checked = not core.verify_host
    ready: list[Ready] = []
    for step in window:
        name = id(step.plan)
        if step.block != reached.get(name, step.plan.first):
            continue  # never past a gap
        if step.flights or step.held or step.places:
            parts = _arrived(core, step) or []
        else:
            parts = []
            for found in step.parts:
                memory = memories[found.tier]
                part = None if memory is None else _borrowed(core, found, memory, checked)
                if part is None:
                    stop(step.plan, MissReason.FAILED)
                    break
                parts.append(part)
        if len(parts) == len(step.parts):
            ready.append(Ready(step, parts))
            reached[name] = step.block + 1
    return ready


def _arrived(core: Core, step: Step) -> list[Arrived] | None:
    """Bytes of each part of a step; None (and a reason) if one did not arrive."""
    out: list[Arrived] = []
    for found in step.parts:
        part = step.held.get(found.part)
        if part is None:
            part = _placed(step, found) or _flown(step, found)
        memory = core.levels[found.tier].memory
        if part is None and memory is not None:
            part = _borrowed(core, found, memory, not core.verify_host)
        if part is None:
            stop(step.plan, _why(step, found))
            return None
        out.append(part)
    return out


def _placed(step: Step, found: FoundPart) -> Arrived | None:
    _, place = step.places.get(found.part, (None, None))
    if place is None or place.header is None:
        return None
    return Arrived(found, header=place.header, checked=True, placed=True)


def _flown(step: Step, found: FoundPart) -> Arrived | None:
    flight = step.flights.get(found.part)
    if flight is None or not flight.landed.is_set() or flight.frame is None:
        return None
    return Arrived(found, flight.frame, header=flight.header, checked=flight.checked)


def _borrowed(core: Core, found: FoundPart, memory: MemoryBackend, checked: bool) -> Arrived | None:
    buffer = memory.borrow(found.part, found.generation)
    if buffer is None:
        core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
        return None
    return Arrived(found, buffer.memory, 0, None, None, checked)


def _why(step: Step, found: FoundPart) -> MissReason:
    failure: EvictReason | None = None
    if found.part in step.places:
        failure = step.places[found.part][1].failure
    if found.part in step.flights:
        failure = step.flights[found.part].failure
    return MissReason.DAMAGED if failure is EvictReason.DAMAGED else MissReason.FAILED
