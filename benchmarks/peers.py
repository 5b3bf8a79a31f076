"""The same work on tierkv and on LMCache, side by side: times, restarts, faults.

Each row is one operation, done by both in turns (LMCache in a process of its own, see
:mod:`benchmarks.peers_env`), on one torch thread each and on the same disk. ``ratio`` > 1 says
that tierkv is ahead: CPU microseconds an operation, LMCache / tierkv; GB/s, tierkv / LMCache;
median over the pairs, with quartiles. The engine verifies checksums, LMCache has none. A cold read
of the engine ends in the caller's memory; LMCache's ends in its own pool, so that there is a second
row in which it delivers what it read as well. Copies and puts in RAM are timed eight calls at a
time, on both sides: one takes a few milliseconds, a good part of which would be what any process
takes to get going again after it waited for the other one's turn (225 ms of puts, theirs). Probes
(:mod:`benchmarks.peers_probes`) do the same damage to both: ``held`` is whether what came back was
right or a miss, in bounded time.

Run with ``python -m benchmarks.peers [--json] [--quick] [--only OP ...]``; exit status 1 if a bound
is missed, 2 if LMCache cannot be had.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

import tierkv
from benchmarks.peers_env import VERSION, Peer, find_python
from benchmarks.peers_probes import PROBES, probe
from benchmarks.peers_tierkv import BLOCK, COPIES, Disk, Ram, Timed, paged, space_of
from benchmarks.report import About, arguments, emit, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.report import Cell

__all__ = ["disk_rows", "probe_rows", "ram_rows", "restart_row"]

_CALLS = 8
_PARTS = ("ram", "disk", "restart", "probes")


# --------------------------------------------------------------------------- rows


def _pairs(
    ours: Callable[[], Timed], theirs: Callable[[], Timed], repeats: int
) -> tuple[list[Timed], list[Timed]]:
    """Both in turns; one more pair warms up."""
    a: list[Timed] = []
    b: list[Timed] = []
    for number in range(repeats + 1):
        for mine in (True, False) if number % 2 else (False, True):
            (a if mine else b).append(ours() if mine else theirs())
    return a[1:], b[1:]


def _row(
    op: str, unit: str, bound: float, pairs: tuple[list[Timed], list[Timed]]
) -> dict[str, Cell]:
    mine, its = ([t.us if unit == "CPU us" else t.gb_s for t in side] for side in pairs)
    ratios = [b / a if unit == "CPU us" else a / b for a, b in zip(mine, its, strict=True)]
    ratio = spread(ratios)
    return {
        "op": op,
        "unit": unit,
        "tierkv": spread(mine).median,
        "lmcache": spread(its).median,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "bound": bound,
        "ok": ratio.median >= bound,
    }


def _asking(peer: Peer, op: str, name: str, **args: Any) -> Callable[[], Timed]:
    return lambda: Timed(**peer.ask(op, name, **args))


def ram_rows(peer: Peer, chunks: int, leased: int, repeats: int) -> Iterator[dict[str, Cell]]:
    """64 KiB operations in RAM.

    Args:
        peer: The other side.
        chunks: Blocks that fill the tier.
        leased: Blocks that are leased (pinned) while others are put.
        repeats: Interleaved pairs.
    """
    count = max(1, min(64, (chunks - leased) // 4))
    peer.ask("make", "ram", "ram", chunks=chunks)
    with Ram(chunks) as ours:
        ours.fill(leased)
        for op, name in (("get+release", "get"), ("get, tensor, release", "get_tensor")):
            pairs = _pairs(getattr(ours, name), _asking(peer, name, "ram"), repeats)
            yield _row(f"64 KiB {op}", "CPU us", 1.0, pairs)
        # a single call is over before the caches are warm again, after the other side's turn
        theirs = _asking(peer, "copy", "ram", calls=_CALLS)
        pairs = _pairs(partial(ours.copy, _CALLS), theirs, repeats)
        yield _row(f"64 KiB copied out, {COPIES} a batch", "CPU us", 1.0, pairs)
        peer.ask("pin", "ram", count=leased)
        theirs = _asking(peer, "put_full", "ram", count=count, calls=_CALLS)
        pairs = _pairs(partial(ours.put_full, count, _CALLS), theirs, repeats)
        bound = 100.0 if leased >= 7000 else 1.0  # their scan is as long as what is pinned
        yield _row(f"64 KiB put when full, {count} a call, {leased} leased", "CPU us", bound, pairs)
    peer.ask("close", "ram")


def disk_rows(peer: Peer, directory: str, chunks: int, repeats: int) -> Iterator[dict[str, Cell]]:
    """32 MiB chunks on disk, against both of the peer's ways to write files."""
    place = Path(directory)
    with Disk(place / "tierkv", chunks) as ours:
        ours.begin()
        for mode, direct in (("buffered", False), ("O_DIRECT", True)):
            # its default is buffered files; with O_DIRECT both may reach what the disk can do
            where, bound = str(place / mode), 1.0 if direct else 1.5
            peer.ask("make", mode, "disk", directory=where, chunks=chunks, direct=direct)
            for what, sync in (("put", False), ("put, durable", True)):
                theirs = _asking(peer, "put", mode, sync=sync)
                pairs = _pairs(partial(ours.put, sync=sync), theirs, repeats)
                yield _row(f"disk {what}; theirs {mode}", "GB/s", bound, pairs)
            for end, deliver in (("its own pool", False), ("the caller's memory", True)):
                theirs = _asking(peer, "read", mode, deliver=deliver)
                pairs = _pairs(ours.read, theirs, repeats)
                yield _row(f"disk cold read; theirs {mode}, into {end}", "GB/s", bound, pairs)
            peer.ask("close", mode)


def restart_row(peer: Peer, directory: str, chunks: int = 50) -> dict[str, Cell]:
    """How much of what was stored (and, here, flushed) a new process finds."""

    async def go() -> float:
        tier = tierkv.Tier("nvme", "64MiB", path=f"{directory}/restart")
        ids, found = [n % 999 for n in range(chunks * BLOCK)], 0
        for turn in range(2):
            engine = tierkv.open(tiers=[tier], space=space_of(1, BLOCK))
            async with engine, engine.session("restart") as session:
                if not turn:
                    await session.store(ids, paged(1, chunks, BLOCK))
                    continue
                async with session.match(ids) as match:
                    found = match.tokens
        return found / len(ids)

    theirs = peer.ask("restart", directory=f"{directory}/their-restart", chunks=chunks)
    mine, its = asyncio.run(go()), theirs["found"] / theirs["operations"]
    row: dict[str, Cell] = {"op": "found after a restart", "unit": "share"}
    return row | {
        "tierkv": mine,
        "lmcache": its,
        "ratio": mine / its if its else None,
        "low": None,
        "high": None,
        "bound": None,
        "ok": mine == 1.0,
    }


def probe_rows(python: Path, directory: str, names: Sequence[str]) -> Iterator[dict[str, Cell]]:
    """The fault probes: what tierkv made of them, and what LMCache did."""
    for name in names:
        held, told = probe(name, Path(directory) / "tierkv-probes")
        try:
            with Peer(python) as peer:  # its own process: it may hang afterwards
                said = peer.ask("probe", which=name, directory=f"{directory}/their-{name}")
        except RuntimeError as error:
            said = [False, str(error)]
        yield {
            "probe": name,
            "tierkv": "held" if held else "NOT held",
            "lmcache": "held" if said[0] else "not held",
            "tierkv_told": told,
            "lmcache_told": said[1],
            "ok": held,
        }


ABOUT: Final = About(
    measures="blocks lent, copied and put in RAM; puts and cold reads on disk; what is found after "
    "a restart; eighteen faults",
    against=f"LMCache {VERSION} doing the same in a process of its own, in turns",
    floors="the ratio in each row's bound, and every probe held; exit status 1 if one is missed, 2 "
    "if LMCache cannot be had",
    takes="about half an hour; a few minutes with --quick",
    needs="LMCache, once installed from a package index into ~/.cache/tierkv, or "
    "BENCH_LMCACHE_ENV; 2 GiB of RAM, 1 GiB of disk",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a bound is missed."""
    parser = arguments("peers", __doc__, ABOUT)
    parser.add_argument("--quick", action="store_true", help="small counts: shows that it works")
    parser.add_argument("--repeats", type=int, default=15, help="pairs per row")
    parser.add_argument("--directory", help="on the disk to measure; default: the temporary one")
    parser.add_argument("--only", nargs="+", choices=_PARTS, help="these alone")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    wanted = args.only or _PARTS
    repeats = 3 if args.quick else args.repeats
    try:
        python = find_python()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="tierkv-peers-") as place:
        with Peer(python) as peer:
            if "ram" in wanted:
                chunks, leased = (400, 300) if args.quick else (8000, 7000)
                rows += ram_rows(peer, chunks, leased, repeats)
            if "restart" in wanted:
                rows.append(restart_row(peer, place, 5 if args.quick else 50))
        with Peer(python) as peer:
            if "disk" in wanted:
                rows += disk_rows(peer, place, 2 if args.quick else 12, repeats)
        probes = list(probe_rows(python, place, PROBES)) if "probes" in wanted else []
    _show(rows, probes, args.json)
    return 0 if all(row["ok"] for row in [*rows, *probes]) else 1


def _show(rows: list[dict[str, Cell]], probes: list[dict[str, Cell]], json_flag: bool) -> None:
    if json_flag:
        emit("peers", [*rows, *probes], json_flag)
        return
    for name, found, keys in (
        ("peers", rows, ("op", "unit", "tierkv", "lmcache", "ratio", "low", "bound", "ok")),
        ("fault probes", probes, ("probe", "tierkv", "lmcache", "lmcache_told")),
    ):
        if found:
            emit(name, [{key: row[key] for key in keys} for row in found], json_flag)


if __name__ == "__main__":
    raise SystemExit(main())
