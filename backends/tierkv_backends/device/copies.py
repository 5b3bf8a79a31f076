"""One batch of copies between a pool and host memory, and the wait for its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tierkv.abc import Move
from tierkv.device import outlast
from tierkv.errors import ClosedError, IntegrityError
from tierkv.frame import decode_header
from tierkv.views import over
from tierkv.workers import Signal
from tierkv_backends.device.pool import is_done, keep_for_ever

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tierkv.abc import Device, Event, StoredPart, Stream, Threads, WriteItem
    from tierkv.frame import Header
    from tierkv_backends.device.pool import DevicePool

__all__ = ["Batch", "Traffic"]

_INLINE: Final = 512 << 10  # a copy below this costs less than the way to a thread and back


class Batch:
    """Copies that are submitted together and awaited by one event.

    Attributes:
        event: Behind all of them, once they are submitted.
        failure: What the device raised, if it did.
        headers: Of the frames that were written, as far as they are frames.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.event: Event | None = None
        self.failure: Exception | None = None
        self.headers: list[Header | None] = []
        self._device = device
        self._stream = stream
        self._moves: list[Move] = []
        self._frames: list[WriteItem] = []
        self._began = False
        self._bytes = 0

    @property
    def stuck(self) -> bool:
        """Whether its outcome is unknown: the memory that it touches must never be reused."""
        return self._began and (self.event is None or not is_done(self.event))

    def read(self, source: torch.Tensor, target: memoryview) -> None:
        """Copy device memory into host memory of the same length."""
        self._add(Move(over(target, "uint8", (len(target),)), source))

    def write(self, item: WriteItem, target: torch.Tensor) -> None:
        """Copy a frame into device memory, and read its header."""
        frame = item.buffer.memory[: item.stored.nbytes]
        self._frames.append(item)
        self._add(Move(target[: len(frame)], over(frame, "uint8", (len(frame),))))

    def _add(self, move: Move) -> None:
        self._moves.append(move)
        self._bytes += move.target.numel()

    async def carry(self, threads: Threads, given_up: Callable[[], bool]) -> None:
        """Submit the copies and wait until the device is done with every byte of them.

        Copies of 512 KiB and more are submitted in a worker thread: from and to memory that is
        not pinned, a device makes them while it is asked to. :attr:`failure` tells if they failed.

        Raises:
            ClosedError: if the tier was closed and ``given_up`` while the device hangs; what the
                batch may still touch is then kept for as long as the process lives.

        Cancellation: re-raised once the device touches nothing of this batch any more, or it was
        given up.
        """
        if not self._moves:
            return
        try:
            if self._bytes < _INLINE:
                self._submit()
            else:
                await threads.run(self._submit)
        finally:
            try:
                await self._outlast(given_up)
            finally:
                if self.stuck:
                    keep_for_ever(self._moves)

    async def _outlast(self, given_up: Callable[[], bool]) -> None:
        if self.event is None:
            return
        done = True
        try:
            done = await outlast(self._device, self.event, given_up)
        except Exception as error:  # noqa: BLE001 - a broken device may raise anything
            self.failure = error
        if not done:
            raise ClosedError("the tier was closed over a copy that hangs on the device")

    def _submit(self) -> None:
        self._began = True
        try:
            self._device.copy(self._moves, self._stream)
        except Exception as error:  # noqa: BLE001 - reported for each item
            self.failure = error
        try:
            self.event = self._stream.record()  # part of a failed batch may be under way
        except Exception as error:  # noqa: BLE001 - then nobody knows when it ends
            self.failure = error
        # while the device copies
        self.headers = [_header(item.stored, item.buffer.memory) for item in self._frames]


class Traffic:
    """The batches of one open tier, and the end of all work on its memory.

    Args:
        device: The device.
        pool: The tier's memory there.
    """

    def __init__(self, device: Device, pool: DevicePool) -> None:
        self._device = device
        self._pool = pool
        self._under_way = 0
        self._quiet = Signal()

    async def carry(self, batch: Batch, threads: Threads) -> None:
        """:meth:`Batch.carry`."""
        self._under_way += 1
        try:
            await batch.carry(threads, lambda: self._pool.given_up)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._quiet.set()

    async def settle(self, within: float) -> bool:
        """Wait until no work touches the pool's memory; after ``within`` seconds give it up.

        Call when nothing more is submitted.

        Returns:
            Whether all work is done.

        Cancellation: re-raised at the end.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        cancelled: asyncio.CancelledError | None = None

        def late() -> bool:
            if loop.time() >= end and not self._pool.given_up:
                self._pool.give_up()
            return self._pool.given_up

        for event in self._pool.pending():
            try:
                await outlast(self._device, event, late)
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception:  # noqa: BLE001 - a broken device: its memory is never used again
                continue
        if self._under_way:
            self._quiet = Signal()
            try:
                await self._quiet.outlast(max(0.0, end - loop.time()))
            except asyncio.CancelledError as error:
                cancelled = error
            if self._under_way and not self._pool.given_up:
                self._pool.give_up()  # not by the clock: a loop may wake up a moment early
        if cancelled is not None:
            raise cancelled
        return not self._pool.given_up


def _header(stored: StoredPart, frame: memoryview) -> Header | None:
    """The header of a frame; None if the bytes are not this frame, which is nobody's business here.

    Such bytes can still be read, and are verified by whoever reads them.
    """
    try:
        header = decode_header(frame[: stored.nbytes])
    except IntegrityError:
        return None
    named = (header.part, header.generation, header.frame_bytes)
    return header if named == (stored.part, stored.generation, stored.nbytes) else None
