"""The conformance suite of devices.

A plug-in's test file subclasses it and says how to make the device::

    class TestMine(DeviceTests):
        def make(self) -> MyDevice:
            return MyDevice("mine:0")

pytest then runs every check (with anyio's plug-in). Some defects show only now and then: run it
several times. What the checks must catch is shown by :mod:`tierkv.testing.device_mutants`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import pytest

from tierkv.abc import Move
from tierkv.device.fold import fold, fold_digests
from tierkv.errors import BackendError, LayoutError
from tierkv.testing.device_bench import DeviceBench, noise, plain

if TYPE_CHECKING:
    import torch

    from tierkv.abc import Event

__all__ = ["DeviceTests"]

_PAGE: Final = 4096
_FRAME: Final = 32 << 10


class _MemoryTests(DeviceBench):
    """Memory and single copies."""

    def test_memory_is_aligned(self) -> None:
        """Fresh memory is uint8, as long as asked for, at a multiple of 4 KiB, and its own."""
        with self.device() as device:
            pieces = [device.allocate(size) for size in (1, 100, _PAGE, 3 * _PAGE + 7)]
            spans = []
            for size, piece in zip((1, 100, _PAGE, 3 * _PAGE + 7), pieces, strict=True):
                assert piece is not None
                assert (str(piece.dtype), tuple(piece.shape)) == ("torch.uint8", (size,))
                assert piece.data_ptr() % _PAGE == 0
                assert device.owns(piece)
                spans.append((piece.data_ptr(), piece.data_ptr() + size))
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans))

    def test_no_memory_is_no_error(self) -> None:
        """More memory than there is gives None; the device goes on."""
        with self.device() as device:
            assert device.available() > 0
            assert device.allocate(1 << 60) is None
            data = noise(1000)
            assert self.bytes_of(device, self.filled(device, data)) == plain(data)

    def test_bits_are_kept(self) -> None:
        """Every 16-bit pattern survives as bfloat16 and float16, strided too, and odd booleans."""
        import torch

        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        for dtype in (torch.bfloat16, torch.float16):
            with self.device() as device:
                source = self.filled(device, patterns.view(torch.uint8)).view(dtype)
                flat = torch.zeros(1 << 16, dtype=dtype)
                wide = torch.zeros(256, 512, dtype=dtype)
                turned = source.view(256, 256).transpose(0, 1)
                moves = [Move(flat, source), Move(wide[:, ::2], turned)]
                device.copy(moves, device.stores)
                device.stores.record().synchronize()
                assert torch.equal(flat.view(torch.int16), patterns)
                back = wide[:, ::2].transpose(0, 1).contiguous().view(torch.int16)
                assert torch.equal(back.view(-1), patterns)
        with self.device() as device:
            source = self.filled(device, torch.arange(256).byte()).view(torch.bool)
            out = torch.zeros(256, dtype=torch.bool)
            device.copy([Move(out, source)], device.stores)
            device.stores.record().synchronize()
            assert out.view(torch.uint8).tolist() == list(range(256))

    def test_every_move_of_a_batch_is_done(self) -> None:
        """Batches of 1 to 400 pieces of awkward sizes, all three ways, arrive whole."""
        import torch

        with self.device() as device:
            for count, size in ((1, 1), (3, 100_000), (7, 28 << 10), (40, 8_192), (400, 67)):
                data = noise(count * size, count)
                order = random.Random(count).sample(range(count), count)
                there = self.filled(device, torch.zeros(count * size, dtype=torch.uint8))
                rows = there.view(count, size)
                pairs = [(rows[i], data.view(count, size)[j]) for j, i in enumerate(order)]
                device.copy([Move(t, s) for t, s in pairs], device.loads)
                device.stores.wait(device.loads.record())
                again = self.filled(device, torch.zeros(count * size, dtype=torch.uint8))
                moves = [Move(again.view(count, size)[j], rows[i]) for j, i in enumerate(order)]
                device.copy(moves, device.stores)
                assert self.bytes_of(device, again) == plain(data), (count, size)

    def test_what_lies_between_moves_is_untouched(self) -> None:
        """Pieces that are near each other, on one side or on both, never drag others along."""
        import torch

        size, gap = 30_000, 64
        for there_gap, here_gap in ((gap, gap), (gap, 0), (0, gap)):
            with self.device() as device:
                data = noise(8 * (size + gap))
                there = self.filled(device, torch.full((8 * (size + gap),), 0xAA).byte())
                expected = bytearray(b"\xaa" * there.numel())
                moves = []
                for i in range(8):
                    low, start = i * (size + there_gap), i * (size + here_gap)
                    moves.append(Move(there[low : low + size], data[start : start + size]))
                    expected[low : low + size] = plain(data[start : start + size])
                device.copy(moves, device.loads)
                assert self.bytes_of(device, there) == expected

    def test_moves_that_do_not_fit_are_refused(self) -> None:
        """Nothing is broadcast or converted, and nothing else of the batch is done."""
        import torch

        with self.device() as device:
            there = self.filled(device, torch.zeros(64, dtype=torch.uint8))
            good = Move(there[:8], torch.ones(8, dtype=torch.uint8))
            for target, source in (
                (there[8:16], torch.ones(1, dtype=torch.uint8)),
                (there[8:16], torch.ones(8)),
                (there[8:16].view(2, 4), torch.ones(8, dtype=torch.uint8)),
            ):
                with pytest.raises(LayoutError):
                    device.copy([good, Move(target, source)], device.loads)
            assert self.bytes_of(device, there) == bytes(64)

    def test_folds_are_those_of_the_cpu(self) -> None:
        """Checksums of sections of any size, neighbours or not, are those of ``fold``."""
        sizes = [64, 64, 64, 4096, 65_536, 65_536, 65_600, 1 << 20, 0]
        with self.device() as device:
            data = noise(sum(sizes))
            there = self.filled(device, data)
            sections, expected, at = [], [], 0
            for size in sizes:
                sections.append(there[at : at + size])
                expected.append(fold(memoryview(plain(data[at : at + size]))))
                at += size
            numbers = device.folds(sections, device.loads)
            device.loads.record().synchronize()
            assert fold_digests(numbers) == expected

    def test_pinning_changes_no_bytes(self) -> None:
        """Copies work before, while and after memory is pinned; unpinning twice is fine."""
        import mmap

        from tierkv.views import over

        with self.device() as device, mmap.mmap(-1, 16 * _PAGE) as mapping:
            memory = memoryview(mapping)
            host = over(memory, "uint8", (len(memory),))
            host.copy_(noise(len(memory)))
            data = plain(host)
            assert self.bytes_of(device, self.filled(device, host)) == data
            assert device.pin(memory) in (True, False)
            assert self.bytes_of(device, self.filled(device, host)) == data
            device.unpin(memory)
            device.unpin(memory)
            assert self.bytes_of(device, self.filled(device, host)) == data
            del host
            memory.release()

    def test_an_unknown_name_is_refused(self) -> None:
        """A device that is not there is a typed error when it is made."""
        with self.device() as device:
            make = type(device)
        with pytest.raises(BackendError):
            make("no-such-device")  # type: ignore[call-arg]


class _OrderTests(DeviceBench):
    """Streams and events."""

    def test_a_stream_keeps_its_order(self) -> None:
        """A chain of copies on one stream, each from where the last one wrote."""
        import torch

        with self.device() as device:
            data = noise(_FRAME)
            steps = [self.filled(device, torch.zeros(_FRAME, dtype=torch.uint8)) for _ in range(6)]
            out = torch.zeros(_FRAME, dtype=torch.uint8)
            for source, target in zip([data, *steps], [*steps, out], strict=True):
                device.copy([Move(target, source)], device.stores)
            device.stores.record().synchronize()
            assert plain(out) == plain(data)

    def test_streams_wait_for_events(self) -> None:
        """What one stream wrote is read by another one that waits for its event."""
        import torch

        with self.device() as device:
            data = noise(_FRAME)
            there = self.filled(device, torch.zeros(_FRAME, dtype=torch.uint8))
            outs = [torch.zeros(_FRAME, dtype=torch.uint8) for _ in range(8)]
            for number, out in enumerate(outs):
                device.copy([Move(there, data.roll(number))], device.loads)
                device.stores.wait(device.loads.record())
                device.copy([Move(out, there)], device.stores)
                device.loads.wait(device.stores.record())
            device.stores.record().synchronize()
            for number, out in enumerate(outs):
                assert plain(out) == plain(data.roll(number)), number

    def test_an_event_is_done_when_everything_before_it_is(self) -> None:
        """What was copied before an event is in place when the event says so."""
        import torch

        with self.device() as device:
            data = noise(_FRAME)
            there = self.filled(device, data)
            events: list[tuple[Event, torch.Tensor]] = []
            for _ in range(8):
                out = torch.zeros(_FRAME, dtype=torch.uint8)
                device.copy([Move(out, there)], device.stores)
                events.append((device.stores.record(), out))
            for event, out in events:
                event.synchronize()
                assert event.query()
                assert plain(out) == plain(data)

    def test_folds_see_the_copies_before_them(self) -> None:
        """A checksum is of what the stream's copies had put there by its turn."""
        import torch

        with self.device() as device:
            data = noise(_FRAME)
            there = self.filled(device, torch.zeros(_FRAME, dtype=torch.uint8))
            for number in range(4):
                device.copy([Move(there, data.roll(number))], device.stores)
                numbers = device.folds([there], device.stores)
                device.copy([Move(there, data)], device.stores)
                device.stores.record().synchronize()
                assert fold_digests(numbers) == [fold(memoryview(plain(data.roll(number))))]

    def test_tensors_live_until_their_copy_ran(self) -> None:
        """The caller may drop the tensors of a batch as soon as it is submitted."""
        import torch

        with self.device() as device:
            there = self.filled(device, torch.zeros(8 * _FRAME, dtype=torch.uint8))
            for number in range(8):
                low = number * _FRAME
                device.copy([Move(there[low : low + _FRAME], noise(_FRAME, number))], device.loads)
            expected = b"".join(plain(noise(_FRAME, number)) for number in range(8))
            assert self.bytes_of(device, there) == expected

    def test_submissions_from_many_threads(self) -> None:
        """Every call may come from any thread; batches do not mix."""
        import torch

        with self.device() as device:
            data = [noise(4096, number) for number in range(4)]
            there = [self.filled(device, piece) for piece in data]
            outs = [torch.zeros(10, 4096, dtype=torch.uint8) for _ in data]

            def submit(number: int) -> None:
                for out in outs[number]:
                    device.copy([Move(out, there[number])], device.stores)
                device.stores.record().synchronize()

            threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for out, piece in zip(outs, data, strict=True):
                assert all(plain(row) == plain(piece) for row in out)

    @pytest.mark.anyio
    async def test_waiting_leaves_the_loop_free(self) -> None:
        """Others go on while a task waits for an event; a cancelled one ends, and harms nobody."""
        import torch

        with self.device() as device:
            there = self.filled(device, noise(_FRAME))
            out = torch.zeros(_FRAME, dtype=torch.uint8)
            for _ in range(20):
                device.copy([Move(out, there)], device.stores)
            event = device.stores.record()
            turns = 0

            def turn() -> None:
                nonlocal turns
                turns += 1

            asyncio.get_running_loop().call_soon(turn)
            early = event.query()
            await device.wait(event)
            assert event.query()
            assert early or turns, "the loop stood still"
            for _ in range(20):
                device.copy([Move(out, there)], device.stores)
            with suppress(TimeoutError):  # it may be done at once
                async with asyncio.timeout(0):
                    await device.wait(device.stores.record())
            assert self.bytes_of(device, there) == plain(noise(_FRAME))

    def test_close_waits(self) -> None:
        """What was submitted before ``close`` is done after it; closing twice is fine."""
        import torch

        device = self.make()
        try:
            there = self.filled(device, noise(_FRAME))
            outs = [torch.zeros(_FRAME, dtype=torch.uint8) for _ in range(10)]
            for out in outs:
                device.copy([Move(out, there)], device.stores)
        finally:
            device.close()
        assert all(plain(out) == plain(noise(_FRAME)) for out in outs)
        device.close()


class DeviceTests(_MemoryTests, _OrderTests):
    """Every check: of the device, and of how it is used (:class:`~tierkv.testing.shuttle.Shuttle`).

    Override :meth:`make`; for a device whose model does not run in torch's own calls,
    :meth:`model`.
    """

    @pytest.mark.anyio
    async def test_stores_what_the_model_wrote_last(self) -> None:
        """A store waits for the kernels that the model had submitted before."""
        import torch

        with self.device() as device:
            shuttle = self.shuttle(device, _FRAME)
            data = [noise(_FRAME, number) for number in range(4)]
            fresh = [self.filled(device, piece) for piece in data]
            kv = [self.filled(device, torch.zeros(_FRAME, dtype=torch.uint8)) for _ in data]
            for target, source in zip(kv, fresh, strict=True):
                self.model(device, partial(target.copy_, source))
            stored = await shuttle.evict(shuttle.keep(kv))
            assert stored == [plain(piece) for piece in data]

    @pytest.mark.anyio
    async def test_freed_memory_is_not_in_use(self) -> None:
        """Device memory goes to others only when nothing submitted reads it any more."""
        with self.device() as device:
            shuttle = self.shuttle(device, _FRAME)
            for turn in range(3):
                data = [noise(_FRAME, turn * 8 + number) for number in range(8)]
                frames = shuttle.keep([self.filled(device, piece) for piece in data])
                assert await shuttle.evict(frames) == [plain(piece) for piece in data]

    @pytest.mark.anyio
    async def test_staging_is_reused_only_when_it_is_free(self) -> None:
        """More frames than staging slots arrive, each in its place."""
        import torch

        with self.device() as device:
            shuttle = self.shuttle(device, _FRAME)
            data = [plain(noise(_FRAME, number)) for number in range(10)]
            kv = [self.filled(device, torch.zeros(_FRAME, dtype=torch.uint8)) for _ in data]
            await shuttle.load(data, kv)
            device.loads.record().synchronize()
            assert [self.bytes_of(device, target) for target in kv] == data

    @pytest.mark.anyio
    async def test_a_load_is_in_place_when_it_returns(self) -> None:
        """The model may use what was loaded without waiting for anything."""
        import torch

        with self.device() as device:
            shuttle = self.shuttle(device, _FRAME)
            data = [plain(noise(_FRAME, number)) for number in range(2)]
            kv = [self.filled(device, torch.zeros(_FRAME, dtype=torch.uint8)) for _ in data]
            await shuttle.load(data, kv)
            seen = [torch.zeros(_FRAME, dtype=torch.uint8) for _ in data]
            moves = [Move(out, target) for out, target in zip(seen, kv, strict=True)]
            device.copy(moves, device.stores)  # a stream that waits for nobody
            device.stores.record().synchronize()
            assert [plain(out) for out in seen] == data
