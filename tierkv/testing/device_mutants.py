"""Devices, and users of one, that are wrong in one way each; the check that must notice.

Most of these defects show only when threads meet in a certain way, so that each is tried with
many seeds of the simulated accelerator: one that is let pass fifty times is not caught.
"""

from __future__ import annotations

import random
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tierkv.abc import Event, Move
from tierkv.device.bits import as_bits, check_move
from tierkv.device.fold import fold_tensors
from tierkv.testing.accelerator import POISON, SimDevice, own
from tierkv.testing.devices import DeviceTests
from tierkv.testing.shuttle import Shuttle
from tierkv.testing.streams import SimEvent, SimStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.abc import Device, Stream
    from tierkv.device.plan import Plan, Run

__all__ = ["MUTANTS", "DeviceMutant", "SimTests", "failing_checks"]

_DELAY_S = 2e-4


# --------------------------------------------------------------- users of a device


class MissingWait(Shuttle):
    def order(self, stream: Stream) -> None:
        return


class EarlyFree(Shuttle):
    async def before_free(self, event: Event) -> None:
        return


class ReusedStaging(Shuttle):
    async def before_reuse(self, slot: int) -> None:
        return


class ReturnsEarly(Shuttle):
    async def before_return(self, event: Event) -> None:
        return


# ------------------------------------------------------------------------- devices


class Misaligned(SimDevice):
    def allocate(self, nbytes: int) -> torch.Tensor | None:
        found = super().allocate(nbytes + 64)
        return None if found is None else found[64:]


class RaisesWithoutMemory(SimDevice):
    def allocate(self, nbytes: int) -> torch.Tensor | None:
        found = super().allocate(nbytes)
        if found is None:
            raise MemoryError(nbytes)
        return found


class _Naive(SimDevice):
    """Its copies are done move by move, each by :meth:`move_one`."""

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        for move in moves:
            check_move(move)
        own(self, stream).submit(lambda: self.do_all(list(moves)))

    def do_all(self, moves: list[Move]) -> None:
        for move in moves:
            self.move_one(move)

    def move_one(self, move: Move) -> None:
        as_bits(move.target).copy_(as_bits(move.source))


class ConvertsFloats(_Naive):
    def move_one(self, move: Move) -> None:
        if move.source.dtype.is_floating_point:
            # by way of single precision: quiet NaNs instead of signalling ones
            move.target.copy_(move.source.float().mul(1.0).to(move.target.dtype))
        else:
            super().move_one(move)


class DropsTheLastMove(_Naive):
    def do_all(self, moves: list[Move]) -> None:
        super().do_all(moves[: max(1, len(moves) - 1)])


class Broadcasts(_Naive):
    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        kept = list(moves)
        own(self, stream).submit(lambda: [m.target.copy_(m.source) for m in kept] and None)


class MergesAcrossGaps(SimDevice):
    def planned(self, moves: Sequence[Move]) -> Plan:
        whole = super().planned(moves)
        runs: list[Run] = []
        for run in sorted([*whole.bulk, *whole.small]):
            last = runs[-1] if runs else None
            step = run.target - last.target if last else 0
            if last and 0 < step - last.nbytes <= 64 and run.source - last.source == step:
                runs[-1] = last._replace(nbytes=step + run.nbytes)
            else:
                runs.append(run)
        return whole._replace(bulk=runs, small=[])


class FoldsShortened(SimDevice):
    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        return super().folds([s[: max(0, s.numel() - 64)] for s in sections], stream)


class FoldsAtOnce(SimDevice):
    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        return fold_tensors(sections)


class UnpinsOnce(SimDevice):
    def __init__(self, name: str, *, delay: float) -> None:
        super().__init__(name, delay=delay)
        self._pinned: list[int] = []

    def pin(self, memory: memoryview) -> bool:
        self._pinned.append(len(memory))
        return True

    def unpin(self, memory: memoryview) -> None:
        self._pinned.remove(len(memory))


class TakesAnyName(SimDevice):
    def __init__(self, name: str, *, delay: float = 0.0) -> None:
        super().__init__(f"sim:{name.rpartition(':')[2]}", delay=delay)


class _Shuffled(SimStream):
    def step(self) -> bool:
        raise NotImplementedError

    def _add(self, work: Any) -> None:
        with self._changed:
            if len(self._queue) > 1 and self._rng.random() < 0.5:
                last = self._queue.pop()
                super()._add(work)
                self._queue.append(last)
                return
        super()._add(work)


class ShufflesAStream(SimDevice):
    def __init__(self, name: str, *, delay: float) -> None:
        super().__init__(name, delay=delay)
        self.stores = _Shuffled(self, "stores", name, delay)


class _Deaf(SimStream):
    def wait(self, event: Event) -> None:
        return


class IgnoresWaits(SimDevice):
    def __init__(self, name: str, *, delay: float) -> None:
        super().__init__(name, delay=delay)
        self.stores = _Deaf(self, "stores", name, delay)
        self.loads = _Deaf(self, "loads", name, delay)


class _Hasty(SimStream):
    def record(self) -> Event:
        event = SimEvent(self)
        with self._changed:
            # in front of the last piece of work instead of behind it
            last = self._queue.pop() if self._queue else None
            self.submit(event.fire)
            if last is not None:
                self._queue.append(last)
        return event


class EventsTooEarly(SimDevice):
    def __init__(self, name: str, *, delay: float) -> None:
        super().__init__(name, delay=delay)
        self.stores = _Hasty(self, "stores", name, delay)


class ForgetsTensors(_Naive):
    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        # what it was to copy may be gone when it comes to it: memory of somebody else by then
        kept = [(move.target, weakref.ref(move.source)) for move in moves]

        def run() -> None:
            for target, seen in kept:
                source = seen()
                if source is None:
                    target.fill_(POISON)
                else:
                    self.move_one(Move(target, source))

        own(self, stream).submit(run)


class OneBatchAtATime(_Naive):
    """Keeps its batch in an attribute: two threads overwrite each other's."""

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        self._batch = list(moves)
        time.sleep(random.random() * 1e-4)
        batch = self._batch
        own(self, stream).submit(lambda: self.do_all(batch))


class BlocksTheLoop(SimDevice):
    async def wait(self, event: Event) -> None:
        event.synchronize()


class ClosesAtOnce(SimDevice):
    def close(self) -> None:
        for stream in self._streams():
            with stream._changed:
                stream._queue.clear()
        super().close()


class SimTests(DeviceTests):
    """The suite on a simulated accelerator, or on what should be one.

    Args:
        device: Makes the device, given ``name`` and ``delay``.
        seed: Of the device.
        user: Makes what the checks of ordering look at.
    """

    def __init__(
        self,
        device: Callable[..., SimDevice] = SimDevice,
        seed: int = 0,
        user: type[Shuttle] = Shuttle,
    ) -> None:
        self._device, self._seed, self._user = device, seed, user

    def make(self) -> Device:
        """The device."""
        return self._device(f"sim:{self._seed}", delay=_DELAY_S)

    def model(self, device: Device, work: Callable[[], object]) -> None:
        """On the compute stream, late."""
        assert isinstance(device, SimDevice)
        device.compute.submit(lambda: time.sleep(_DELAY_S))
        device.compute.submit(work)

    def shuttle(self, device: Device, nbytes: int) -> Shuttle:
        """The user."""
        return self._user(device, nbytes)


class DeviceMutant(NamedTuple):
    """A defect of a device, or of its user, and the check that must notice it."""

    wrong: type[Any]
    check: str

    def suite(self, seed: int) -> SimTests:
        """The suite with this defect."""
        if issubclass(self.wrong, Shuttle):
            return SimTests(seed=seed, user=self.wrong)
        return SimTests(self.wrong, seed)


MUTANTS: list[DeviceMutant] = [
    DeviceMutant(MissingWait, "test_stores_what_the_model_wrote_last"),
    DeviceMutant(EarlyFree, "test_freed_memory_is_not_in_use"),
    DeviceMutant(ReusedStaging, "test_staging_is_reused_only_when_it_is_free"),
    DeviceMutant(ReturnsEarly, "test_a_load_is_in_place_when_it_returns"),
    DeviceMutant(Misaligned, "test_memory_is_aligned"),
    DeviceMutant(RaisesWithoutMemory, "test_no_memory_is_no_error"),
    DeviceMutant(ConvertsFloats, "test_bits_are_kept"),
    DeviceMutant(DropsTheLastMove, "test_every_move_of_a_batch_is_done"),
    DeviceMutant(MergesAcrossGaps, "test_what_lies_between_moves_is_untouched"),
    DeviceMutant(Broadcasts, "test_moves_that_do_not_fit_are_refused"),
    DeviceMutant(FoldsShortened, "test_folds_are_those_of_the_cpu"),
    DeviceMutant(UnpinsOnce, "test_pinning_changes_no_bytes"),
    DeviceMutant(TakesAnyName, "test_an_unknown_name_is_refused"),
    DeviceMutant(ShufflesAStream, "test_a_stream_keeps_its_order"),
    DeviceMutant(IgnoresWaits, "test_streams_wait_for_events"),
    DeviceMutant(EventsTooEarly, "test_an_event_is_done_when_everything_before_it_is"),
    DeviceMutant(FoldsAtOnce, "test_folds_see_the_copies_before_them"),
    DeviceMutant(ForgetsTensors, "test_tensors_live_until_their_copy_ran"),
    DeviceMutant(OneBatchAtATime, "test_submissions_from_many_threads"),
    DeviceMutant(BlocksTheLoop, "test_waiting_leaves_the_loop_free"),
    DeviceMutant(ClosesAtOnce, "test_close_waits"),
]
"""Every mutant, each with a check of its own."""


async def failing_checks(suite: DeviceTests, only: str = "test_") -> dict[str, str]:
    """Run checks of a suite; return what went wrong, by check.

    Args:
        suite: The suite.
        only: Start of the names of the checks to run; all by default.
    """
    failed: dict[str, str] = {}
    for name in sorted(name for name in dir(suite) if name.startswith(only)):
        try:
            running = getattr(suite, name)()
            if running is not None:
                await running
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - whatever it is, the check noticed
            failed[name] = f"{type(error).__name__}: {error}"
    return failed
