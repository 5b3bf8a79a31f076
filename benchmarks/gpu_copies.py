"""Copies between host and device memory: how fast, and how far compute hides them.

Rows of :mod:`benchmarks.gpu_check`.
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.report import paired
from tierkv.abc import Move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.report import Cell
    from tierkv.abc import Device, Stream

__all__ = ["Row", "copies", "overlap", "row"]

_MIB = 1 << 20
_CHUNK = 64 * _MIB
_COPY_BOUND, _OVERLAP_BOUND = 0.9, 0.7
Row = dict[str, "Cell"]


def row(what: str, value: Cell, bound: str = "-", *, ok: bool = True) -> Row:
    """One line of the report."""
    return {"what": what, "value": value, "bound": bound, "ok": ok}


def _pieces(there: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[str, list[Move]]]:
    """Ways in which frames in host memory meet memory in the device, as copies into the device."""
    yield "whole", [Move(there, host)]
    size = min(65_536, there.numel())
    rows, others = there.view(-1, size), host.view(-1, size)
    order = torch.randperm(len(rows)).tolist()
    yield "64 KiB pieces, shuffled", [Move(rows[at], others[n]) for n, at in enumerate(order)]
    # a section [heads, 64 tokens, dim] of a frame, in pages of 16 tokens
    heads, page, dim = 8, 16, 128
    sections = host.view(torch.int16).view(-1, heads, 4 * page, dim)
    for name, shape in (("HND", (heads, page, dim)), ("NHD", (page, heads, dim))):
        pages = there.view(torch.int16).view(-1, *shape)
        turned = pages if name == "HND" else pages.transpose(1, 2)
        pairs = [
            (turned[4 * n + q], s[:, q * page : (q + 1) * page])
            for n, s in enumerate(sections)
            for q in range(4)
        ]
        yield f"pages of 16 tokens, {name}", [Move(t, s) for t, s in pairs]


def copies(device: Device, where: str, nbytes: int, repeats: int) -> Iterator[Row]:
    """Batches between registered host memory and the device, against one copy of torch's."""
    gpu = where != "cpu"
    arena = mmap.mmap(-1, nbytes)
    chunks = [memoryview(arena)[a : a + _CHUNK] for a in range(0, nbytes, _CHUNK)]
    pinned = sum(device.pin(chunk) for chunk in chunks)
    yield row(
        "chunks of host memory registered",
        f"{pinned} of {len(chunks)}",
        ok=not gpu or pinned == len(chunks),
    )
    host = torch.frombuffer(arena, dtype=torch.uint8)
    there, raw = device.allocate(nbytes), torch.ones(nbytes, dtype=torch.uint8, device=where)
    mine = torch.ones(nbytes, dtype=torch.uint8, pin_memory=gpu)
    assert there is not None
    there.fill_(1)
    host.fill_(1)
    for name, moves in _pieces(there, host):
        back = [Move(source, target) for target, source in moves]
        for way, stream, batch, plain in (
            ("H2D", device.loads, moves, (raw, mine)),
            ("D2H", device.stores, back, (mine, raw)),
        ):

            def ours(batch: list[Move] = batch, stream: Stream = stream) -> None:
                device.copy(batch, stream)
                stream.record().synchronize()

            def theirs(plain: tuple[torch.Tensor, torch.Tensor] = plain) -> None:
                plain[0].copy_(plain[1], non_blocking=True)
                if gpu:
                    torch.cuda.synchronize()

            seen, bounded = paired(theirs, ours, repeats), gpu and name == "whole"
            bound = f">= {_COPY_BOUND}" if bounded else "-"
            ok = not bounded or seen.ratio.median >= _COPY_BOUND
            yield row(f"{way}, {name}: of a raw pinned copy", seen.ratio.median, bound, ok=ok)
            yield row(f"{way}, {name}: GB/s", nbytes / seen.b.median / 1e9)
    for chunk in chunks:
        device.unpin(chunk)
        chunk.release()


def overlap(device: Device, where: str, nbytes: int) -> Row:
    """Share of the shorter of compute and copies that the longer one hides."""
    gpu = where != "cpu"
    there = device.allocate(nbytes)
    assert there is not None
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=gpu)
    a = torch.ones(4096 if gpu else 256, 4096 if gpu else 256, device=where)
    rounds = 1  # of a kernel, until they take as long as the copy

    def compute() -> None:
        for _ in range(rounds):
            a @ a

    def copy() -> None:
        device.copy([Move(there, host)], device.loads)

    def timed(*things: Callable[[], None]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for thing in things:
                thing()
            device.loads.record().synchronize()
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return sorted(times)[2]

    copying = timed(copy)
    rounds = max(1, round(copying / timed(compute)))
    computing, both = timed(compute), timed(compute, copy)
    hidden = (computing + copying - both) / min(computing, copying)
    ok = not gpu or hidden >= _OVERLAP_BOUND
    return row(
        "overlap of compute and copies", hidden, f">= {_OVERLAP_BOUND}" if gpu else "-", ok=ok
    )
