"""The conformance suite of tiers in a device's memory.

As :class:`tierkv.testing.backends.MemoryBackendTests`, on device memory, and what is the device's
own: memory that submitted work may still touch is not reused, a device without room is a result,
and memory goes back when the tier shrinks. It runs on any device; the events that it holds open
are its own.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from tierkv.abc import Event, IoStatus, Move, ResidentBackend, StoredPart, WriteItem
from tierkv.frame import PAGE, Header, Section, checksum, encode_header
from tierkv.testing.backends import BackendTests
from tierkv.testing.bench import part
from tierkv.views import over

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tierkv.abc import Backend, Device, DeviceBuffer
    from tierkv.testing.bench import Bench

__all__ = ["FramedPart", "HeldEvent", "ResidentBackendTests", "framed"]

_SIZE = 64 << 10


class FramedPart(NamedTuple):
    """A whole frame: what a tier knows of it, its header, its bytes."""

    stored: StoredPart
    header: Header
    data: bytes


def framed(number: int, payload: int = 8192, generation: int = 1) -> FramedPart:
    """The ``number``-th part as a frame of one section of ``payload`` bytes (a multiple of 64)."""
    stored = part(number, PAGE + payload, generation)
    seed = int.from_bytes(hashlib.sha256(b"%d/%d" % (number, generation)).digest()[:8], "big")
    body = np.random.default_rng(seed).bytes(payload)
    shape = (1, 1, payload)
    header = Header(
        part=stored.part,
        space=hashlib.sha256(b"space").digest(),
        root=stored.root,
        parent=stored.parent,
        generation=generation,
        fidelity="exact",
        tokens=1,
        block_tokens=1,
        tenant=stored.tenant,
        expires=None,
        frame_bytes=stored.nbytes,
        payload_offset=PAGE,
        sections=(Section(0, "k", "uint8", shape, "raw", PAGE, payload, payload),),
        digests=(checksum(body),),
    )
    data = bytearray(PAGE) + body
    encode_header(header, memoryview(data))
    return FramedPart(stored, header, bytes(data))


class HeldEvent(Event):
    """An event that is done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        """Whether the test said so."""
        return self.done

    def synchronize(self) -> None:
        """Refuse: a backend blocks no thread for an event.

        Raises:
            AssertionError: if the event is not done.
        """
        assert self.done, "the backend blocks a thread until an event is done"


async def _put(device: Device, target: torch.Tensor, data: bytes) -> None:
    source = over(memoryview(bytearray(data)), "uint8", (len(data),))
    device.copy([Move(target[: len(data)], source)], device.loads)
    await device.wait(device.loads.record())


async def _get(device: Device, source: torch.Tensor, nbytes: int) -> bytes:
    seen = memoryview(bytearray(nbytes))
    device.copy([Move(over(seen, "uint8", (nbytes,)), source[:nbytes])], device.stores)
    await device.wait(device.stores.record())
    return bytes(seen)


async def _build(backend: ResidentBackend, frame: FramedPart) -> DeviceBuffer:
    buffer = backend.allocate(frame.stored.nbytes)
    assert buffer is not None
    await _put(backend.device, buffer.tensor, frame.data)
    return buffer


async def _write(bench: Bench, frame: FramedPart) -> IoStatus:
    buffer = bench.arena.allocate(frame.stored.nbytes)
    assert buffer is not None
    buffer.memory[:] = frame.data
    (result,) = await bench.backend.write([WriteItem(frame.stored, buffer)])
    buffer.memory[:] = b"\xee" * frame.stored.nbytes
    buffer.release()
    return result.status


async def _borrowed(backend: ResidentBackend, frame: FramedPart) -> bytes:
    found = backend.borrow(frame.stored.part, frame.stored.generation)
    assert found is not None
    assert found.header == frame.header
    return await _get(backend.device, found.buffer.tensor, frame.stored.nbytes)


def _all_of(backend: ResidentBackend) -> list[DeviceBuffer]:
    """Whatever it can still give, in equal buffers."""
    taken: list[DeviceBuffer] = []
    while (buffer := backend.allocate(_SIZE)) is not None:
        taken.append(buffer)
    return taken


async def _dirty(backend: ResidentBackend, taken: list[DeviceBuffer]) -> None:
    for buffer in taken:
        await _put(backend.device, buffer.tensor, b"\xdd" * _SIZE)


def _resident(backend: Backend) -> ResidentBackend:
    assert isinstance(backend, ResidentBackend)
    return backend


@pytest.mark.anyio
class ResidentBackendTests(BackendTests):
    """What a backend must do beside, if its frames are in the memory of a device."""

    async def test_built_frame_is_read_in_place(self, tmp_path: Path) -> None:
        """A frame built on the device is published where it is, and read where it is."""
        frame = framed(0)
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            buffer = await _build(backend, frame)
            place = buffer.tensor.data_ptr()
            assert backend.borrow(frame.stored.part, 1) is None, "visible before it was published"
            assert backend.adopt(frame.stored, frame.header, buffer)
            found = backend.borrow(frame.stored.part, 1)
            assert found is not None
            assert found.buffer.nbytes == frame.stored.nbytes
            assert found.buffer.tensor.data_ptr() == place
            assert await _borrowed(backend, frame) == frame.data
            assert await bench.read(frame.stored) == [frame.data]

    async def test_lent_device_memory_stays(self, tmp_path: Path) -> None:
        """Releasing what was borrowed frees nothing."""
        frame = framed(0)
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            assert await _write(bench, frame) is IoStatus.OK
            for _ in range(2):
                found = backend.borrow(frame.stored.part, 1)
                assert found is not None
                found.buffer.release()
            await _dirty(backend, _all_of(backend))
            assert await bench.read(frame.stored) == [frame.data]

    async def test_refused_frame_is_still_the_callers(self, tmp_path: Path) -> None:
        """``adopt`` of an older generation is False, and the buffer is still the caller's."""
        new, old = framed(0, generation=2), framed(0, generation=1)
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            assert await _write(bench, new) is IoStatus.OK
            buffer = await _build(backend, old)
            assert not backend.adopt(old.stored, old.header, buffer)
            taken = _all_of(backend)
            await _dirty(backend, taken)
            assert await _get(backend.device, buffer.tensor, old.stored.nbytes) == old.data
            buffer.release()
            assert await _borrowed(backend, new) == new.data

    async def test_discard_on_the_device_is_a_delete(self, tmp_path: Path) -> None:
        """``discard`` forgets exactly one generation, at once."""
        frame = framed(0, generation=2)
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            assert await _write(bench, frame) is IoStatus.OK
            backend.discard(frame.stored.part, 1)
            assert backend.borrow(frame.stored.part, 2) is not None
            backend.discard(frame.stored.part, 2)
            backend.discard(frame.stored.part, 2)
            assert backend.borrow(frame.stored.part, 2) is None
            assert backend.stats().live_bytes == 0

    async def test_written_frame_can_be_borrowed(self, tmp_path: Path) -> None:
        """A frame that came from host memory is found in place as well, header and bytes."""
        frame, other = framed(0), framed(1, 64)
        async with self.opened(tmp_path) as bench:
            for each in (frame, other):
                assert await _write(bench, each) is IoStatus.OK
            for each in (frame, other):
                assert await _borrowed(_resident(bench.backend), each) == each.data

    async def test_touched_memory_outlives_its_frame(self, tmp_path: Path) -> None:
        """A frame may be forgotten while work reads it: its memory is not reused before."""
        frame, event = framed(0, _SIZE - PAGE), HeldEvent()
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            assert await _write(bench, frame) is IoStatus.OK
            found = backend.borrow(frame.stored.part, 1)
            assert found is not None
            memory = found.buffer.tensor
            backend.touched(frame.stored.part, 1, event)
            backend.discard(frame.stored.part, 1)
            try:
                taken = _all_of(backend)
                await _dirty(backend, taken)
                assert await _get(backend.device, memory, frame.stored.nbytes) == frame.data
                assert len(taken) < self.capacity // _SIZE
            finally:
                event.done = True
            assert backend.allocate(_SIZE) is not None, "its room does not come back"

    async def test_release_waits_for_its_event(self, tmp_path: Path) -> None:
        """A buffer given back ``after`` an event is nobody's until the event is done."""
        frame, event = framed(0, _SIZE - PAGE), HeldEvent()
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            buffer = await _build(backend, frame)
            memory = buffer.tensor
            buffer.release(event)
            try:
                taken = _all_of(backend)
                await _dirty(backend, taken)
                assert await _get(backend.device, memory, _SIZE) == frame.data
                assert len(taken) < self.capacity // _SIZE
            finally:
                event.done = True
            assert backend.allocate(_SIZE) is not None, "its room does not come back"

    async def test_second_release_does_nothing(self, tmp_path: Path) -> None:
        """A buffer that is released twice frees nobody else's memory."""
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            first = backend.allocate(_SIZE)
            assert first is not None
            first.release()
            second = await _build(backend, framed(0, _SIZE - PAGE))
            first.release()
            await _dirty(backend, _all_of(backend))
            assert await _get(backend.device, second.tensor, _SIZE) == framed(0, _SIZE - PAGE).data

    async def test_buffers_are_whole_pages(self, tmp_path: Path) -> None:
        """Buffers are contiguous bytes on the device, rounded up to pages."""
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            for nbytes in (1, PAGE, PAGE + 1, 100_000):
                buffer = backend.allocate(nbytes)
                assert buffer is not None
                memory = buffer.tensor
                assert buffer.nbytes == nbytes
                assert str(memory.dtype) == "torch.uint8"
                assert tuple(memory.shape) == (-(-nbytes // PAGE) * PAGE,)
                assert memory.is_contiguous()
                assert memory.data_ptr() % PAGE == 0
                assert backend.device.owns(memory)

    async def test_device_without_room_is_no_error(self, tmp_path: Path) -> None:
        """Without memory ``allocate`` is None and ``write`` FULL; what is there stays."""
        kept = framed(0)
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            assert await _write(bench, kept) is IoStatus.OK
            assert backend.allocate(2 * self.capacity) is None
            taken = _all_of(backend)
            await _dirty(backend, taken)
            assert await _write(bench, framed(1, _SIZE)) is IoStatus.FULL
            assert await _borrowed(backend, kept) == kept.data
            for buffer in taken:
                buffer.release()
            assert await _write(bench, framed(1, _SIZE)) is IoStatus.OK

    async def test_shrink_gives_memory_back(self, tmp_path: Path) -> None:
        """Frames stand in the way of ``shrink`` until they are gone; nothing more goes in."""
        frames = [framed(number, _SIZE) for number in range(3)]
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            for frame in frames:
                assert await _write(bench, frame) is IoStatus.OK
            assert backend.shrink(0) >= sum(f.stored.nbytes for f in frames)
            assert await _write(bench, framed(9)) is IoStatus.FULL
            for frame in frames:
                assert await _borrowed(backend, frame) == frame.data
                backend.discard(frame.stored.part, 1)
            assert backend.shrink(0) == 0

    async def test_all_of_the_device_memory_is_usable(self, tmp_path: Path) -> None:
        """Frames of one size fill the capacity, as far as they divide it."""
        size = 24 * 1024
        async with self.opened(tmp_path) as bench:
            backend = _resident(bench.backend)
            count = self.capacity // backend.charge(size)
            buffers = [backend.allocate(size) for _ in range(count)]
            assert None not in buffers
            assert backend.allocate(size) is None
