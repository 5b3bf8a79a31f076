"""Vectored file I/O: pieces of frames, merged into few large calls, aligned for O_DIRECT.

Pieces that are adjacent in a file become one ``preadv``/``pwritev``. With O_DIRECT, offset,
length and address must be multiples of 4 KiB: aligned pieces go straight between the file and the
given memory, a last partial page travels through a page of its own, and whatever is not aligned
at all bounces through a small buffer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from tierkv.abc import IoResult, IoStatus
from tierkv.buffers import Arena, ArenaBuffer
from tierkv_backends.results import failure

__all__ = ["PAGE", "Piece", "Scratch", "Transfer", "list_at", "move", "open_at", "write_all"]

PAGE: Final = 4096
_IOV_MAX: Final = os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024
_CALL_MAX: Final = 1 << 30  # one call moves at most 2 GiB - 4 KiB on Linux
_BOUNCE: Final = 1 << 20

_Call = Callable[[int, Sequence[memoryview], int], int]


class Piece(NamedTuple):
    """Bytes of one item that are adjacent in one file.

    Attributes:
        item: Index of the item in its batch.
        fd: File.
        offset: First byte in the file.
        memory: Source or target.
    """

    item: int
    fd: int
    offset: int
    memory: memoryview


class Scratch:
    """Pooled aligned pages for pieces that cannot go straight; grows beyond its pool on demand."""

    def __init__(self, nbytes: int) -> None:
        self._arena = Arena(nbytes)

    def take(self, nbytes: int) -> ArenaBuffer:
        """Return an aligned buffer; the caller releases it."""
        buffer = self._arena.allocate(nbytes)
        if buffer is None:
            buffer = Arena(-(-nbytes // PAGE) * PAGE).allocate(nbytes)
            assert buffer is not None  # an arena of its own, exactly that large
        return buffer


class _Step(NamedTuple):
    """An aligned piece; ``copy_to`` is filled from its memory after a read."""

    piece: Piece
    copy_to: memoryview | None = None


@dataclass(slots=True)
class Transfer:
    """One batch of reads, or one of writes.

    Attributes:
        writing: Direction.
        direct: Whether the files are open with O_DIRECT.
        scratch: Pool for bounce buffers.
        failed: Results of the items that did not go well, by item.
        bounced: Bytes that went through a bounce buffer.
        calls: System calls made.
    """

    writing: bool
    direct: bool
    scratch: Scratch
    failed: dict[int, IoResult] = field(default_factory=dict)
    bounced: int = 0
    calls: int = 0

    def run(self, pieces: Sequence[Piece]) -> None:
        """Move all pieces; failures end up in ``failed``, per item. Blocks."""
        held: list[ArenaBuffer] = []
        try:
            steps = [_Step(piece) for piece in pieces if len(piece.memory)]
            if self.direct:
                steps = [made for step in steps for made in self._align(step.piece, held)]
            steps.sort(key=lambda step: (step.piece.fd, step.piece.offset))
            for group in _groups(steps):
                self._move(group)
        finally:
            for buffer in held:
                buffer.release()

    def _align(self, piece: Piece, held: list[ArenaBuffer]) -> list[_Step]:
        item, fd, offset, memory = piece
        if offset % PAGE or _address(memory) % PAGE:
            self._bounce(piece)
            return []
        whole = len(memory) // PAGE * PAGE
        steps = [_Step(Piece(item, fd, offset, memory[:whole]))] if whole else []
        rest = memory[whole:]
        if len(rest):
            page = self.scratch.take(PAGE)
            held.append(page)
            if self.writing:
                _fill(page.memory, rest)
            target = None if self.writing else rest
            steps.append(_Step(Piece(item, fd, offset + whole, page.memory), target))
            self.bounced += len(rest)
        return steps

    def _bounce(self, piece: Piece) -> None:
        # frames start at page boundaries and are written whole, so only reads start inside a page
        item, fd, offset, memory = piece
        low = offset // PAGE * PAGE
        stop = offset + len(memory)
        self.bounced += len(memory)
        buffer = self.scratch.take(min(_BOUNCE, -(-(stop - low) // PAGE) * PAGE))
        try:
            while low < stop and item not in self.failed:
                window = buffer.memory[: -(-(stop - low) // PAGE) * PAGE]
                first = max(offset, low)
                last = min(stop, low + len(window))
                mine = memory[first - offset : last - offset]
                if self.writing:
                    _fill(window, mine)
                self._move([_Step(Piece(item, fd, low, window))])
                if not self.writing:
                    _copy(window[first - low : last - low], mine)
                low += len(window)
        finally:
            buffer.release()

    def _move(self, group: list[_Step]) -> None:
        first = group[0].piece
        views = [step.piece.memory for step in group]
        align = PAGE if self.direct else 1
        try:
            done, calls = move(first.fd, views, first.offset, writing=self.writing, align=align)
        except OSError as error:
            if len(group) > 1:  # find out whose fault it is: the others need not suffer
                for step in group:
                    self._move([step])
                return
            self.failed.setdefault(first.item, failure(error))
            return
        self.calls += calls
        for step in group:
            size = len(step.piece.memory)
            # the padding of a last page may lie behind the end of a file cut short
            wanted = size if step.copy_to is None else len(step.copy_to)
            if done < wanted:
                self.failed.setdefault(step.piece.item, IoResult(IoStatus.SHORT))
            elif step.copy_to is not None:
                _copy(step.piece.memory[:wanted], step.copy_to)
            done = max(0, done - size)


def open_at(root: int, name: str, flags: int) -> int:
    """Open a file of a root directory; private if it is made.

    Raises:
        OSError: also if ``name`` is a symbolic link: whoever could put it there must not choose
            which file of ours is written.
    """
    safe = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a named pipe holds nobody up
    return os.open(name, flags | safe, 0o600, dir_fd=root)


def list_at(root: int) -> list[str]:
    """Names in a root directory, as one moment had them.

    Opened anew each time: listings through one descriptor share a place in the directory, and two
    threads would take names away from each other, or find them twice.

    Raises:
        OSError: if it cannot be read.
    """
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def move(
    fd: int, views: Sequence[memoryview], offset: int, *, writing: bool, align: int
) -> tuple[int, int]:
    """Read or write all of ``views`` at ``offset``, however short the single calls are.

    Args:
        fd: File.
        views: Memory, in file order.
        offset: First byte in the file.
        writing: Direction.
        align: Granularity at which a call may start again after a short count (1, or 4 KiB).

    Returns:
        Bytes moved, less than all only at the end of a file being read; and system calls made.

    Raises:
        OSError: of the medium; also if a write makes no progress.
    """
    call: _Call = os.pwritev if writing else os.preadv
    done = calls = 0
    while views:
        calls += 1
        try:
            moved = call(fd, views, offset + done)
        except InterruptedError:
            continue
        moved -= moved % align
        if moved <= 0:
            if writing:
                raise OSError(errno.EIO, "the file accepts no more bytes")
            break
        done += moved
        views = _advance(views, moved)
    return done, calls


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however short the single calls are.

    Raises:
        OSError: of the medium; also if a write makes no progress.
    """
    view = memoryview(data)
    while len(view):
        try:
            done = os.pwrite(fd, view[:_CALL_MAX], offset)
        except InterruptedError:
            continue
        if done <= 0:
            raise OSError(errno.EIO, "the file accepts no more bytes")
        view = view[done:]
        offset += done


def _address(memory: memoryview) -> int:
    """Address of the first byte."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _groups(steps: Sequence[_Step]) -> list[list[_Step]]:
    groups: list[list[_Step]] = []
    fd = end = -1
    size = 0
    for step in steps:
        piece = step.piece
        length = len(piece.memory)
        joins = piece.fd == fd and piece.offset == end
        if not joins or len(groups[-1]) >= _IOV_MAX or size + length > _CALL_MAX:
            groups.append([])
            size = 0
        groups[-1].append(step)
        fd, end = piece.fd, piece.offset + length
        size += length
    return groups


def _advance(views: Sequence[memoryview], moved: int) -> list[memoryview]:
    rest = list(views)
    index = 0
    while index < len(rest) and moved >= len(rest[index]):
        moved -= len(rest[index])
        index += 1
    rest = rest[index:]
    if rest and moved:
        rest[0] = rest[0][moved:]
    return rest


def _copy(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _fill(page: memoryview, data: memoryview) -> None:
    array = np.frombuffer(page, np.uint8)
    array[: len(data)] = np.frombuffer(data, np.uint8)
    array[len(data) :] = 0
