"""A tier over rows that tests own, with a disk that can be made to fail."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import tierkv
from tierkv.blocking import CacheManager
from tierkv.blocks import Identity
from tierkv.layout import Space
from tierkv.registry import resolve
from tierkv.testing.faults import Fault, inject
from tierkv_adapters.serving.registry import lend
from tierkv_adapters.vllm.tier.keys import ROW_TOKENS, row_layout
from tierkv_adapters.vllm.tier.settings import TierSettings
from tierkv_adapters.vllm.tier.side import TierResult, TierSide

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROW = 8192
CHUNKS = 64
GUARD = 60.0
"""Seconds after which a test that waits has failed: no measure of speed."""


class Clock:
    """The real one, with a hand."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def key(number: int, group: int = 0) -> bytes:
    """An offload key as vLLM makes them: 32 bytes of hash, 4 of the group."""
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


def space(weights: str = "rev1") -> Space:
    """The space of the rows here."""
    return Space(Identity("vllm:test", weights), row_layout(ROW, "vllm:offload:test"), ROW_TOKENS)


class Rig:
    """A tier, its rows, and what is in them.

    Args:
        root: Of the disk.
        faults: Of the disk's reads and writes.
        host: Capacity of a RAM tier in front of it; None: there is none.
        weights: Tells spaces apart.
        rows: vLLM's CPU tier; None: memory of its own.
        config: More settings of the engine.
        **settings: Of the tier.
    """

    def __init__(
        self,
        root: Path,
        *faults: Fault,
        host: str | None = None,
        weights: str = "rev1",
        rows: np.ndarray[Any, np.dtype[np.int8]] | None = None,
        config: dict[str, Any] | None = None,
        **settings: object,
    ) -> None:
        specs = [tierkv.Tier("nvme", capacity="16MiB", path=str(root), name="disk")]
        if host is not None:
            specs.insert(0, tierkv.Tier("host", capacity=host))
        backends = [resolve("backends", spec.kind)(spec) for spec in specs]
        if faults:
            backends[-1] = inject(backends[-1], *faults)
        self.manager = CacheManager(
            tiers=specs, backends=backends, metrics=False, **(config or {})
        ).open()
        self.rows = np.zeros((CHUNKS, ROW), np.int8) if rows is None else rows
        self.memory = self.rows.data
        self.clock = Clock()
        given = TierSettings.parse({"manager": lend(self.manager), **settings})
        try:
            self.side = TierSide(space(weights), self.memory, given, clock=self.clock)
        except BaseException:
            self.manager.close()
            raise
        self.jobs = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()
        self.manager.close()

    def fill(self, row: int, number: int) -> None:
        """Make a row that of a chunk."""
        seed = int.from_bytes(key(number)[:4], "little")
        self.rows[row] = np.random.default_rng(seed).integers(-128, 128, ROW, np.int8)

    def holds(self, row: int, number: int) -> bool:
        """Whether a row is that of a chunk."""
        seed = int.from_bytes(key(number)[:4], "little")
        wanted = np.random.default_rng(seed).integers(-128, 128, ROW, np.int8)
        return bool((self.rows[row] == wanted).all())

    def results(self) -> list[TierResult]:
        """Poll until no job is left, as vLLM's empty steps do."""
        out, ends = [], time.monotonic() + GUARD
        while self.side.busy():
            out += self.side.finished()
            assert time.monotonic() < ends, f"a job never ends: {self.side}"
            time.sleep(0.001)
        return out

    def begin(self, kind: str, numbers: Sequence[int], rows: Sequence[int]) -> int:
        """Begin a job of chunks ``numbers`` at ``rows``."""
        self.jobs += 1
        submit = self.side.submit_load if kind == "load" else self.side.submit_store
        submit(self.jobs, [key(number) for number in numbers], rows)
        return self.jobs

    def store(self, numbers: Sequence[int]) -> TierResult:
        """Store chunks, from rows of their numbers, and wait."""
        for number in numbers:
            self.fill(number, number)
        self.begin("store", numbers, numbers)
        (result,) = self.results()
        return result

    def load(self, numbers: Sequence[int], rows: Sequence[int] | None = None) -> TierResult:
        """Load chunks to rows, and wait."""
        self.begin("load", numbers, list(numbers) if rows is None else rows)
        (result,) = self.results()
        return result

    def settle(self) -> None:
        """Wait until what was stored is on the disk, and nothing of it anywhere else."""
        self.manager.flush()

    def wipe(self) -> None:
        """Forget what is in the rows."""
        self.rows[:] = 0

    def hits(self, numbers: Sequence[int]) -> list[str]:
        """What lookups answer."""
        return [self.side.lookup(key(number)) for number in numbers]
