"""The tiers of a running engine, as movements see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.abc import MemoryBackend, ResidentBackend

if TYPE_CHECKING:
    from tierkv.abc import Backend
    from tierkv.blocks import PartId
    from tierkv.workers import Signal

__all__ = ["Level"]


@dataclass(slots=True)
class Level:
    """One tier of a running engine.

    Attributes:
        index: Its number, fastest first.
        backend: Who holds its bytes.
        chain: Codec chain of frames that are made for it.
        write_through: Whether new parts are copied here at once.
        doomed: Copies that were forgotten and are still to be deleted.
        purging: Set (and not None) while they are being deleted.
        failures: Writes that failed as a whole, one after the other.
        writing: When each write that is under way began, oldest first.
    """

    index: int
    backend: Backend
    chain: str
    write_through: bool = True
    doomed: list[tuple[PartId, int]] = field(default_factory=list)
    purging: Signal | None = None
    failures: int = 0
    writing: dict[object, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.backend.name

    @property
    def memory(self) -> MemoryBackend | None:
        """The backend, if the engine can address its bytes."""
        return self.backend if isinstance(self.backend, MemoryBackend) else None

    @property
    def resident(self) -> ResidentBackend | None:
        """The backend, if its frames are in a device's memory."""
        return self.backend if isinstance(self.backend, ResidentBackend) else None
