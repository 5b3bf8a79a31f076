"""Codec "auto": is a chain worth its time on a tier? Tried on frames that are there anyway.

A tier's bandwidth is learned from every batch. What a chain saves and costs is learned by trying
it: now and then the engine encodes a frame that is in memory with the candidate, decodes it again
and throws both away. The chain is taken up for further frames where
``min(bandwidth * ratio, cores * decode speed) > bandwidth``, both measured.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tierkv.blocks import split_part
from tierkv.decisions.types import GroupRule, Query
from tierkv.errors import CapacityError, ClosedError, CodecError
from tierkv.frame import decode_header
from tierkv.layout import GroupKind
from tierkv.mover.find import find
from tierkv.mover.lease import Lease
from tierkv.mover.staged import stage_nowait
from tierkv.pipeline import Pipeline, verify
from tierkv.workers import Lane

if TYPE_CHECKING:
    from tierkv.blocks import PartId
    from tierkv.mover.core import Core

__all__ = ["Tuner"]

_TRIALS = 4  # one a tick, to begin with
_AGAIN_S = 30.0


class Tuner:
    """Chooses the chains of tiers with codec ``"auto"``."""

    def __init__(self, core: Core, cores: int) -> None:
        self._core = core
        self._cores = max(1, min(cores, os.cpu_count() or 1))
        self._levels = [level for level in core.levels if level.candidate is not None]
        self._trials: dict[str, int] = {}
        self._last = float("-inf")
        self._trying = False

    def __repr__(self) -> str:
        return f"<Tuner of {[level.name for level in self._levels]}>"

    def tick(self) -> None:
        """Choose, and try what has not been tried for a while. Called at every tick; quick."""
        core, now = self._core, self._core.clock()
        for level in self._levels:
            assert level.candidate is not None
            # while something is reserved, a batch is being made that counts on the chain
            if not core.decisions.reserved(level.index):
                level.take_chain(
                    core.decisions.choose_chain(level.index, level.candidate, self._cores, now)
                )
        chains = {level.candidate for level in self._levels if level.candidate is not None}
        fresh = any(self._trials.get(chain, 0) < _TRIALS for chain in chains)
        if not chains or self._trying or not (fresh or now - self._last >= _AGAIN_S):
            return
        self._trying, self._last = True, now
        try:
            core.workers.spawn(self._try, sorted(chains), name="try-codecs", lane=Lane.PREFETCH)
        except ClosedError:
            self._trying = False

    async def _try(self, chains: list[str]) -> None:
        try:
            for level in self._core.levels:
                part = next((p for p, _, _ in self._core.decisions.parts(level.index)), None)
                if level.memory is not None and part is not None:
                    await self._try_on(part, chains)
                    return
        finally:
            self._trying = False

    async def _try_on(self, part: PartId, chains: list[str]) -> None:
        core = self._core
        key, group = split_part(part)
        rules = (GroupRule(GroupKind.FULL),) * (group + 1)
        found = await find(core, Query((key,), rules, 1, 1, lossy=True, touch=False))
        lease = Lease(core, found.lease)
        try:
            mine = next((p for p in found.parts if p.part == part), None)
            memory = core.levels[mine.tier].memory if mine is not None else None
            buffer = memory.borrow(part, mine.generation) if mine is not None and memory else None
            if buffer is None:
                return
            for chain in chains:
                told = await self._measure(buffer.memory, chain, group)
                if told is not None:
                    core.decisions.coded(chain, *told, core.clock())
                    self._trials[chain] = self._trials.get(chain, 0) + 1
        finally:
            lease.release()

    async def _measure(
        self, frame: memoryview, chain: str, group: int
    ) -> tuple[int, int, float] | None:
        """Raw bytes, stored bytes and seconds of decoding; None if it cannot be tried now."""
        core = self._core
        try:
            space = core.spaces.get(decode_header(frame).space)
            if space is None:
                return None
            ways = (Pipeline(space, chain), Pipeline(space, "raw"))
            slices = stage_nowait(core.staging, [way.max_bytes(group) for way in ways])
        except (CodecError, CapacityError):
            return None
        if slices is None:
            return None
        try:
            return await core.workers.run(
                _there_and_back, frame, *ways, *(piece.memory for piece in slices)
            )
        except CodecError:
            return None  # a damaged frame: whoever loads it will tell
        finally:
            for piece in slices:
                piece.release()


def _there_and_back(
    frame: memoryview, coded: Pipeline, raw: Pipeline, out: memoryview, back: memoryview
) -> tuple[int, int, float]:
    """Encode and decode one frame; in a thread."""
    header = decode_header(frame)
    verify(header, frame)
    stored = coded.transcode(header, frame, out).nbytes
    header = decode_header(out[:stored])
    start = time.perf_counter()
    nbytes = raw.transcode(header, out[:stored], back).nbytes
    return nbytes, stored, time.perf_counter() - start
