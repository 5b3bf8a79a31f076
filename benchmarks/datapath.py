"""Bytes through the engine against the bare copy: RAM against memcpy, disk against O_DIRECT.

Both sides of a pair move the same bytes in turns, one torch thread each, through memory that was
written before and is too much for the caches. The engine's side is the whole call
(``match.load``, ``session.store``): lookups, leases, headers and, unless the row says otherwise,
the checksum of every byte. The other side only copies. ``ratio_to_memcpy`` is their time / ours,
pair by pair, median with quartiles (1 = as fast as the copy). Bounds hold where one call moves a
batch; rows with one frame a call show what a call costs by itself. ``machine_code`` says whether
the extra ``fast`` was there, which the bounds of RAM ask for: without it (or with TIERKV_FAST=0)
the same bytes take library calls.

Run with ``python -m benchmarks.datapath [--json]``; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from unittest import mock

import torch

import tierkv
import tierkv.mover.rowcopies
import tierkv.pipeline.raw
from benchmarks import disk
from benchmarks.report import About, Paired, arguments, emit, paired
from benchmarks.running import OnLoop
from tierkv.jit import copying, walking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.report import Cell
    from tierkv.abc import View

__all__ = ["Frames", "HostTier", "rows"]

_MIB = 1 << 20
_HEADS, _DIM = 8, 128
_PLACES = 4  # batches that a put cycles through, on both sides
_BATCH = 256 * _MIB  # what 2,048 tokens of a model with 128 KiB of KV a token take
_DISK_BATCH = 128 * _MIB
_ROUNDS_S = 0.02  # shorter things are run several times in each half of a pair
SIZES = (2 * _MIB, 8 * _MIB, 32 * _MIB)
BOUNDS = {
    "host get": 0.85,
    "host get, view of the engine's": 0.85,
    "host get, unverified": 0.85,
    "host put": 0.70,
    "host put, checksum patched out": 0.85,
    "scatter to dense, unverified": 0.9,
    "scatter to NHD pages, unverified": 0.9,
    "nvme read": 0.85,
    "nvme write": 0.85,
}


@dataclass(frozen=True, slots=True)
class Frames:
    """Blocks of one size, as a model with 8 heads of 128 dimensions in bfloat16 has them.

    Attributes:
        nbytes: Payload bytes of one frame.
        count: Frames that one call moves.
        calls: Calls of one measurement, each with frames and memory of its own: together they
            are far more than the processor's caches hold.
    """

    nbytes: int
    count: int
    calls: int = 1

    @property
    def total(self) -> int:
        """Frames of one measurement."""
        return self.count * self.calls

    @property
    def tokens(self) -> int:
        """Tokens of a block: 64, and more where 32 layers would not fill the frame."""
        return max(64, self.nbytes // (32 * 2 * _HEADS * _DIM * 2))

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return max(1, self.nbytes // (2 * _HEADS * self.tokens * _DIM * 2))

    @property
    def section(self) -> tuple[int, int, int]:
        """Shape ``[heads, tokens, dim]`` of one tensor of one layer."""
        return _HEADS, self.tokens, _DIM

    @property
    def space(self) -> tierkv.Space:
        """A space whose frames are these."""
        layout = tierkv.Layout.uniform(self.layers, _HEADS, _DIM, "bfloat16")
        return tierkv.Space(tierkv.Identity("bench", "1"), layout, block_tokens=self.tokens)

    def ids(self, seed: int) -> list[int]:
        """Token ids of the prompt of one call; each seed makes another one."""
        return [seed] * (self.tokens * self.count)


def _filled(*shape: int) -> torch.Tensor:
    """Random bits in memory that is real; no NaN matters, since bits are only copied."""
    return torch.randint(0, 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)


def _pages(frames: Frames, *, owned: bool = False) -> list[View]:
    """Paged HND memory, where every tensor of a block is contiguous; a view for each call."""
    shape, step = (frames.total, *frames.section), frames.count
    pools = [(_filled(*shape), _filled(*shape)) for _ in range(frames.layers)]
    firsts = range(0, frames.total, step)
    ids = [list(range(first, first + step)) for first in firsts]
    return [tierkv.views.paged(pools, some, owned=owned) for some in ids]


def _nhd(frames: Frames) -> tuple[View, list[torch.Tensor]]:
    """Pages as ``[tokens, heads, dim]``, and what a block's tensors are in them."""
    shape = (frames.count, frames.tokens, _HEADS, _DIM)
    pools = [(_filled(*shape), _filled(*shape)) for _ in range(frames.layers)]
    order = range(frames.count)
    view = tierkv.views.paged(pools, list(order), page_tokens=frames.tokens, order="NHD")
    return view, [pool[page].permute(1, 0, 2) for page in order for kv in pools for pool in kv]


def _dense(frames: Frames) -> tuple[View, list[torch.Tensor]]:
    """One tensor per layer for the whole prompt, and what a block's tensors are in it."""
    shape = (_HEADS, frames.count * frames.tokens, _DIM)
    layers = [(_filled(*shape), _filled(*shape)) for _ in range(frames.layers)]
    starts = range(0, shape[1], frames.tokens)
    places = [t[:, s : s + frames.tokens] for s in starts for kv in layers for t in kv]
    return tierkv.views.dense(layers), places


class HostTier(OnLoop):
    """An engine with a RAM tier that holds what one measurement moves, and room for more."""

    def __init__(self, frames: Frames, views: Sequence[View], *, verify: bool = True) -> None:
        self.frames, self.views = frames, views
        super().__init__()
        self._seed = 1
        self._verify = verify

    async def _open(self) -> None:
        frames = self.frames
        room = _PLACES * frames.total * (frames.nbytes + (64 << 10))
        tier = tierkv.Tier("host", room, options={"touch": room})
        self._engine = await self.stack.enter_async_context(
            tierkv.open(
                tiers=[tier], space=frames.space, verify_host=self._verify, metrics_port=None
            )
        )
        self._session = await self.stack.enter_async_context(self._engine.session("bench"))
        for _ in range(_PLACES):  # every page of the tier was written once
            await self._put()

    async def _hold(self) -> None:
        first = self._seed - self.frames.calls
        self._matches = []
        for seed in range(first, self._seed):
            session = self._engine.session(f"reader-{seed}")
            entered = await self.stack.enter_async_context(session)
            match = entered.match(self.frames.ids(seed))
            self._matches.append(await self.stack.enter_async_context(match))

    def lease(self) -> None:
        """Open the matches that :meth:`get` loads from."""
        self.run(self._hold())

    def get(self, times: int = 1) -> None:
        """Load everything into the views, call by call."""
        self.run(self._get(times))

    async def _get(self, times: int) -> None:
        tokens = self.frames.count * self.frames.tokens
        for _ in range(times):
            for match, view in zip(self._matches, self.views, strict=True):
                loaded = await match.load(view)
                assert loaded.tokens == tokens

    def put(self, times: int = 1) -> None:
        """Store everything as new blocks, call by call; the oldest ones go."""
        self.run(self._puts(times))

    async def _puts(self, times: int) -> None:
        for _ in range(times):
            await self._put()

    async def _put(self) -> None:
        for view in self.views:
            stored = await self._session.store(self.frames.ids(self._seed), view)
            assert stored.stored == self.frames.count
            self._seed += 1


class _Memcpy:
    """``copy_`` of whole frames between two places, each written before."""

    def __init__(self, frames: Frames, places: int) -> None:
        self._source = [_filled(frames.nbytes // 2) for _ in range(frames.total)]
        self._targets = [
            [_filled(frames.nbytes // 2) for _ in range(frames.total)] for _ in range(places)
        ]
        self._turn = 0

    def run(self, times: int) -> None:
        """Copy every frame, into the next place in turn."""
        for _ in range(times):
            self._turn = (self._turn + 1) % len(self._targets)
            for target, source in zip(self._targets[self._turn], self._source, strict=True):
                target.copy_(source)


def _times(fn: Callable[[int], object]) -> int:
    """How often ``fn`` has to run until the clock sees it well."""
    fn(1)
    begin = time.perf_counter()
    fn(1)
    return max(1, round(_ROUNDS_S / max(time.perf_counter() - begin, 1e-6)))


def _row(op: str, frames: Frames, pairs: Paired, times: int) -> dict[str, Cell]:
    """A row; ``a`` of the pairs is the bare copy."""
    nbytes = frames.nbytes * frames.total * times
    bound = BOUNDS.get(op) if frames.calls == 1 else None
    return {
        "op": op,
        "mib": frames.nbytes / _MIB,
        "frames": frames.count,
        "ratio_to_memcpy": pairs.ratio.median,
        "low": pairs.ratio.low,
        "high": pairs.ratio.high,
        "cpu_ratio": pairs.cpu_ratio.median,
        "gb_s": nbytes / pairs.b.median / 1e9,
        "raw_gb_s": nbytes / pairs.a.median / 1e9,
        "bound": bound,
        "ok": bound is None or pairs.ratio.median >= bound,
        "machine_code": copying.ready(),
    }


def _against(
    op: str, frames: Frames, ours: Callable[[int], object], raw: Callable[[int], object], n: int
) -> dict[str, Cell]:
    times = _times(raw)
    pairs = paired(lambda: raw(times), lambda: ours(times), n)
    return _row(op, frames, pairs, times)


class _NoSum:
    """Stands in for xxhash where blocks are gathered: it looks at nothing, and sums to zero."""

    def update(self, _: object) -> None:
        """As a checksum that is made piece by piece."""

    def digest(self) -> bytes:
        """Sixteen zeros."""
        return bytes(16)

    @staticmethod
    def xxh3_128() -> _NoSum:
        """A checksum that is made piece by piece."""
        return _NoSum()

    @staticmethod
    def xxh3_128_digest(_: memoryview) -> bytes:
        """The checksum of all at once."""
        return bytes(16)


@contextmanager
def _no_checksum() -> Iterator[None]:
    """Stores without the work of the checksum, to see what it costs; no setting does this."""
    whole, few = tierkv.mover.rowcopies, tierkv.pipeline.raw  # few sections go another way
    with (
        mock.patch.object(whole, "xxhash", _NoSum),
        mock.patch.object(few, "xxhash", _NoSum),
        mock.patch.object(few, "checksum", _NoSum.xxh3_128_digest),
        mock.patch.object(walking, "SUMS", 0),  # machine code asks for no sum
    ):
        yield


def _contiguous(frames: Frames, repeats: int) -> Iterator[dict[str, Cell]]:
    """Gets and puts of contiguous memory against memcpy of as many bytes."""
    views = _pages(frames)
    copy = _Memcpy(frames, 1)
    owned = _pages(frames, owned=True)
    for op, into, verify in (
        ("host get", views, True),
        ("host get, view of the engine's", owned, True),
        ("host get, unverified", views, False),
    ):
        with HostTier(frames, into, verify=verify) as tier:
            tier.lease()
            yield _against(op, frames, tier.get, copy.run, repeats)
    copy = _Memcpy(frames, _PLACES)
    with HostTier(frames, views) as tier:
        yield _against("host put", frames, tier.put, copy.run, repeats)
        with _no_checksum():
            op = "host put, checksum patched out"
            yield _against(op, frames, tier.put, copy.run, repeats)


def _strided(frames: Frames, repeats: int) -> Iterator[dict[str, Cell]]:
    """Loads into memory that is not contiguous against ``copy_`` on the same strides."""
    for name, make in (("dense", _dense), ("NHD pages", _nhd)):
        view, places = make(frames)
        sources = [_filled(*frames.section) for _ in places]

        def copy(
            times: int,
            places: Sequence[torch.Tensor] = places,
            sources: Sequence[torch.Tensor] = sources,
        ) -> None:
            for _ in range(times):
                for target, source in zip(places, sources, strict=True):
                    target.copy_(source)

        for what, verify in ((", unverified", False), ("", True)):
            with HostTier(frames, [view], verify=verify) as tier:
                tier.lease()
                yield _against(f"scatter to {name}{what}", frames, tier.get, copy, repeats)


def rows(
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    batch: int = _BATCH,
    directory: str | None = None,
) -> Iterator[dict[str, Cell]]:
    """Measure everything, one row at a time.

    Args:
        sizes: Payload bytes of a frame.
        repeats: Interleaved pairs.
        batch: Bytes that one call moves.
        directory: Where the disk is measured; None: the temporary directory.
    """
    for nbytes in sizes:
        count = max(1, batch // nbytes)
        yield from _contiguous(Frames(nbytes, count), repeats)
        if count > 1:
            yield from _contiguous(Frames(nbytes, 1, calls=count), repeats)
    for nbytes in sizes:
        yield from _strided(Frames(nbytes, max(1, batch // nbytes)), repeats)
    disk_batch = min(2 * batch, _DISK_BATCH)
    for row in disk.rows(directory, sizes=sizes, repeats=repeats, batch=disk_batch):
        ratio = float(row["ratio_to_odirect"] or 0)
        bound = BOUNDS[str(row["op"])]
        fine = ratio >= bound and not row["buffered_bytes"]
        yield {**row, "bound": bound, "ok": fine, "machine_code": copying.ready()}


def _short(row: dict[str, Cell]) -> dict[str, Cell]:
    """What fits a terminal."""
    ratio = row.get("ratio_to_memcpy") or row.get("ratio_to_odirect")
    keys = ("low", "high", "cpu_ratio", "bound", "ok", "machine_code")
    head = {"op": row["op"], "mib": row["mib"], "a_call": row["frames"], "ratio": ratio}
    return {**head, **{key: row[key] for key in keys}}


ABOUT: Final = About(
    measures="GB/s of a whole load or store: RAM into dense tensors and pages, and the disk",
    against="torch's copy of the same bytes (RAM), threads with O_DIRECT (disk), in turns",
    floors="with the extra fast: "
    + "; ".join(f"{name} {bound}" for name, bound in BOUNDS.items())
    + " (of the speed of the other side); exit status 1 below",
    takes="some minutes; less with --repeats 3 or --mib 2",
    needs="2 GiB of RAM and 1 GiB on the disk to measure; for the floors of RAM the extra fast",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a bound is missed."""
    parser = arguments("datapath", __doc__, ABOUT)
    parser.add_argument("--repeats", type=int, default=15, help="pairs per row")
    parser.add_argument("--mib", type=float, nargs="+", default=[2, 8, 32], help="frame sizes")
    parser.add_argument("--batch", type=float, default=_BATCH / _MIB, help="MiB of a call")
    parser.add_argument("--directory", help="on the disk to measure; default: the temporary one")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = [round(mib * _MIB) for mib in args.mib]
    found = list(rows(sizes, args.repeats, round(args.batch * _MIB), args.directory))
    emit("datapath", found if args.json else [_short(row) for row in found], args.json)
    return 0 if all(row["ok"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
