"""The tiers of a running engine, as movements see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.abc import MemoryBackend, ResidentBackend
from tierkv.workers import Signal

if TYPE_CHECKING:
    import asyncio

    from tierkv.abc import Backend
    from tierkv.blocks import PartId
    from tierkv.mover.timing import Batch

__all__ = ["Level"]


class Level:
    """One tier of a running engine.

    Attributes:
        index: Its number, fastest first.
        backend: Who holds its bytes.
        memory: The backend, if the engine can address its bytes.
        resident: The backend, if its frames are in a device's memory.
        write_through: Whether new parts are copied here at once.
        candidate: The chain that is used where it pays (codec ``"auto"``); None: the chain is
            fixed.
        doomed: Copies that were forgotten and are still to be deleted.
        purging: Set (and not None) while they are being deleted.
        failures: Writes that failed as a whole, one after the other.
        flying: Batches under way, oldest first.
        progress: When a batch ended last, on the loop's clock.
        timer: Looks after them.
        stalled: Set while the tier is known to hang.
        stuck: Set while a write to it is known to hang, whatever else it answers.
        probing: Whether a probe is under way.
        probes: How many were started so far.
        probed: When the last one was, on the engine's clock.
    """

    __slots__ = (
        "_chain",
        "backend",
        "candidate",
        "doomed",
        "ended",
        "failures",
        "flying",
        "index",
        "memory",
        "probed",
        "probes",
        "probing",
        "progress",
        "purging",
        "resident",
        "stalled",
        "stuck",
        "timer",
        "write_through",
    )

    def __init__(
        self,
        index: int,
        backend: Backend,
        chain: str,
        write_through: bool = True,
        candidate: str | None = None,
    ) -> None:
        self.index = index
        self.backend = backend
        # asked for a part at a time: an isinstance() of an abstract class is no small thing there
        self.memory = backend if isinstance(backend, MemoryBackend) else None
        self.resident = backend if isinstance(backend, ResidentBackend) else None
        self.write_through = write_through
        self.candidate = candidate
        self.doomed: list[tuple[PartId, int]] = []
        self.purging: Signal | None = None
        self.failures = 0
        self.flying: dict[Batch, None] = {}
        self.progress = 0.0
        self.ended: dict[str, float] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.stalled = Signal()
        self.stuck = Signal()
        self.probing = False
        self.probes = 0
        self.probed = 0.0
        self._chain = chain

    def __repr__(self) -> str:
        return f"<Level {self.index} {self.name}: {self.chain}, {len(self.flying)} batches>"

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.backend.name

    @property
    def chain(self) -> str:
        """Codec chain of frames that are made for it now.

        With codec ``"auto"`` it changes, but never while anything is reserved in the tier.
        """
        return self._chain

    def take_chain(self, chain: str) -> None:
        """Make further frames with another chain; only while nothing is reserved here."""
        self._chain = chain
