"""Copies and checksums in machine code: what slices and xxhash make of the same memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from tierkv import jit
from tierkv.jit import copying
from tierkv.jit.copying import Place, Run, table_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

if jit.host() is None:
    pytest.skip("TIERKV_FAST=0", allow_module_level=True)

HEADER = 128  # bytes of a frame before its sections


def memory(nbytes: int, shift: int = 0) -> Bytes:
    """Memory that begins ``shift`` bytes behind a page."""
    return np.frombuffer(mmap.mmap(-1, nbytes + shift + 4096), np.uint8)[shift : shift + nbytes]


def address(array: Bytes) -> int:
    """Where it begins."""
    return int(array.__array_interface__["data"][0])


def padded(nbytes: int) -> int:
    """Whole stripes."""
    return -(-nbytes // 64) * 64


class World:
    """Frames of two sections each, and tensors with rows at some steps for them.

    Args:
        shape: Frames, heads, units, rows, width.
        gaps: Bytes between heads, rows, units.
        shift: Where the tensors begin, behind a multiple of 64.
        apart: Bytes between frames, behind a multiple of 64.
        past: Whether to write past the caches.
        seed: Of the bytes.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        gaps: tuple[int, int, int] = (0, 0, 0),
        shift: int = 0,
        apart: int = 0,
        past: bool = False,
        seed: int = 1,
    ) -> None:
        self.frames, self.heads, self.units, self.rows, self.width = shape
        self.row = self.width + gaps[1]
        self.head = self.row * self.rows + gaps[0]
        self.unit = self.head * self.heads + gaps[2]
        self.nbytes = self.heads * self.units * self.rows * self.width
        rng = np.random.default_rng(seed)
        self.tensors = [memory(self.unit * self.units * self.frames, shift) for _ in range(2)]
        for tensor in self.tensors:
            tensor[:] = rng.integers(0, 256, len(tensor), dtype=np.uint8)
        self.stride = HEADER + 2 * padded(self.nbytes) + apart
        self.memory = memory(self.stride * self.frames)
        self.memory[:] = 0xAA
        places = [
            Place(
                HEADER + number * padded(self.nbytes),
                address(tensor),
                number,
                self.heads,
                self.head,
                self.rows,
                self.row,
                self.width,
                padded(self.nbytes) // 64,
            )
            for number, tensor in enumerate(self.tensors)
        ]
        # units of a frame backwards; the second tensor has its frames backwards, too
        frames, units = np.arange(self.frames), np.arange(self.units)[::-1]
        ahead = (frames[:, None] * self.units + units) * self.unit
        shifts = np.array([ahead, ahead[::-1]], np.int64)
        self.shifts = shifts
        at = address(self.memory) + frames * self.stride
        self.run = Run(table_of(places), at, shifts, 2 * padded(self.nbytes), past)

    def section(self, frame: int, number: int) -> Bytes:
        """A section in its frame, with padding."""
        low = frame * self.stride + HEADER + number * padded(self.nbytes)
        return self.memory[low : low + padded(self.nbytes)]

    def rows_of(self, frame: int, number: int) -> list[Bytes]:
        """Each row of a section in its tensor, in the frame's order."""
        tensor, shifts = self.tensors[number], self.shifts[number, frame].tolist()
        starts = [
            shift + head * self.head + row * self.row
            for head in range(self.heads)
            for shift in shifts
            for row in range(self.rows)
        ]
        return [tensor[at : at + self.width] for at in starts]

    def due(self) -> list[list[bytes]]:
        """The checksums that the frames' bytes have now."""
        every = range(self.frames)
        return [[xxhash.xxh3_128_digest(self.section(f, n).data) for n in range(2)] for f in every]

    def check_frames(self, low: int = 0, high: int | None = None) -> None:
        """Frames hold what the tensors hold, and zeros as padding."""
        for frame in range(low, self.frames if high is None else high):
            for number in range(2):
                found = self.section(frame, number)
                assert np.array_equal(
                    found[: self.nbytes], np.concatenate(self.rows_of(frame, number))
                )
                assert not found[self.nbytes :].any()


shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.one_of(st.integers(1, 40).map(lambda n: 64 * n), st.integers(22, 2500)),
)
steps = st.one_of(st.just(0), st.integers(0, 5).map(lambda n: 64 * n), st.integers(0, 99))
gaps = st.tuples(steps, steps, steps)


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes.filter(lambda s: s[1] * s[2] * s[3] * s[4] > 192),
    gaps=gaps,
    shift=st.sampled_from([0, 1, 8, 32, 64, 100]),
    apart=st.sampled_from([0, 16, 64, 4096]),
    past=st.booleans(),
    seed=st.integers(0, 99),
)
def test_frames_and_rows_of_any_shape(
    shape: tuple[int, int, int, int, int],
    gaps: tuple[int, int, int],
    shift: int,
    apart: int,
    past: bool,
    seed: int,
) -> None:
    world = World(shape, gaps, shift, apart, past, seed)
    found = world.run.gather(0, world.frames)
    world.check_frames()
    due = world.due()
    assert [list(sums) for sums in found] == due
    for frame in range(world.frames):  # nothing but sections was written
        low = frame * world.stride
        assert (world.memory[low : low + HEADER] == 0xAA).all()
        assert (world.memory[low + world.stride - apart : low + world.stride] == 0xAA).all()
    before = [tensor.copy() for tensor in world.tensors]
    for tensor in world.tensors:
        tensor[:] = 0x55
    world.run.expect(0, due)
    assert world.run.scatter(0, world.frames, 0, world.frames, bool(seed % 2)) == -1
    world.check_frames()
    for frame in range(world.frames):
        for number in range(2):
            for row in world.rows_of(frame, number):
                row[:] = 0x55
    assert all((tensor == 0x55).all() for tensor in world.tensors), "it wrote between rows"
    assert world.run.scatter(0, world.frames) == -1
    world.check_frames()
    for tensor in world.tensors:
        tensor[:] = 0x55
    for frame in range(world.frames):  # others are summed meanwhile
        assert world.run.scatter(frame, frame + 1, frame + 1, world.frames, bool(seed % 3)) == -1
    world.check_frames()
    assert all(
        ((mine == old) | (mine == 0x55)).all()
        for mine, old in zip(world.tensors, before, strict=True)
    )


@pytest.mark.parametrize("stripes", [*range(4, 70), 127, 128, 129, 1024, 1040, 4097])
def test_the_checksum_is_xxh3_for_each_number_of_stripes(stripes: int) -> None:
    """Blocks are 16 stripes; the last block is special, full or not."""
    world = World((1, 1, 1, 1, 64 * stripes), seed=stripes)
    assert [list(sums) for sums in world.run.gather(0, 1)] == world.due()


@settings(max_examples=60, deadline=None)
@given(width=st.integers(193, 9000), past=st.booleans(), data=st.data())
def test_damage_of_any_byte_is_found(width: int, past: bool, data: st.DataObject) -> None:
    """Of the padding, too; frames before the damage are told to be right."""
    world = World((3, 1, 1, 1, width), past=past)
    world.run.gather(0, 3)
    world.run.expect(0, world.due())
    frame = data.draw(st.integers(0, 2))
    section = world.section(frame, data.draw(st.integers(0, 1)))
    at = data.draw(st.integers(0, len(section) - 1))
    section[at] ^= 1 << data.draw(st.integers(0, 7))
    assert world.run.scatter(0, 0, 0, 3) == frame
    assert world.run.scatter(0, 1, 1, 3) == (frame if frame else -1)
    assert world.run.scatter(0, 3, 0, 3) == frame
    assert world.run.scatter(0, 0, frame, frame + 1) == frame
    assert world.run.scatter(0, 3, 0, frame) == -1
    assert world.run.scatter(0, 0, frame + 1, 3) == -1


@pytest.mark.parametrize("width", [320, 1024, 1500])
def test_frames_behind_a_wrong_one_are_left_alone(width: int) -> None:
    """Also where sums lag behind copies: each of many short sections takes a step of its own."""
    for wrong in range(4):
        world = World((4, 1, 1, 1, width))
        world.run.gather(0, 4)
        world.run.expect(0, world.due())
        world.section(wrong, 1)[7] ^= 1
        for tensor in world.tensors:
            tensor[:] = 0
        assert world.run.scatter(0, 4, 0, 4) == wrong
        for frame in range(wrong + 1, 4):
            assert not any(row.any() for n in range(2) for row in world.rows_of(frame, n))
        world.check_frames(0, wrong)


def test_only_the_frames_asked_for_are_touched() -> None:
    world = World((4, 2, 1, 3, 320), past=True)
    world.run.gather(1, 3)
    world.check_frames(1, 3)
    for frame in (0, 3):
        assert (world.section(frame, 0) == 0xAA).all()
    for tensor in world.tensors:
        tensor[:] = 0
    world.run.scatter(1, 2)
    for frame, number in ((0, 0), (2, 0), (3, 1)):
        assert not any(row.any() for row in world.rows_of(frame, number))
    world.check_frames(1, 2)


def test_without_sums_the_bytes_are_the_same() -> None:
    world = World((2, 2, 1, 3, 320))
    world.run.gather(0, 2, sums=False)
    world.check_frames()


def test_memory_is_read_even_where_rows_share_it() -> None:
    """An expanded tensor: steps of zero."""
    world = World((1, 3, 1, 2, 256), gaps=(-2 * 256, 0, 2 * 256 * 3))
    assert world.head == 0
    assert [list(sums) for sums in world.run.gather(0, 1)] == world.due()
    world.check_frames()


def test_another_thread_sees_what_a_call_has_written() -> None:
    """Stores past the caches are ordered before the call returns."""
    world = World((8, 1, 1, 1, 65536), past=True)
    world.run.gather(0, 8)
    expected = [np.concatenate(world.rows_of(f, n)) for f in range(8) for n in range(2)]
    turn = threading.Barrier(2, timeout=60)
    wrong: list[int] = []

    def reader() -> None:
        for _ in range(40):
            turn.wait()
            found = [row for f in range(8) for n in range(2) for row in world.rows_of(f, n)]
            wrong.extend(
                1 for a, b in zip(found, expected, strict=True) if not np.array_equal(a, b)
            )
            turn.wait()

    other = threading.Thread(target=reader)
    other.start()
    try:
        for _ in range(40):
            for tensor in world.tensors:
                tensor[:] = 0
            world.run.scatter(0, 8)
            turn.wait()
            turn.wait()
    finally:
        other.join(60)
    assert not wrong


def test_the_gil_is_released() -> None:
    """ctypes keeps it only for what is called as part of Python itself."""
    kept: Any = ctypes.PYFUNCTYPE(None)
    calls: list[Any] = list(copying._code())
    assert kept._flags_ & 4
    assert not any(type(call)._flags_ & 4 for call in calls)


def test_short_sections_are_left_to_others() -> None:
    place = Place(0, 0, 0, 1, 0, 1, 0, 192, 3)
    assert not copying.suits([place])
    assert not copying.suits([])
    assert copying.suits([place._replace(width=193, stripes=4)])
