"""Every device path on this machine's GPU, in a few minutes: right, fast, overlapping.

Checks the conformance suites of devices and of device tiers, round trips of engines over
device, host and nvme tiers with dense and paged views in device memory (whole, layer by layer,
layer-wise stores), checksums made on the device against those of the host, codecs in device memory
against those of the host, the speed of copies from and to pinned memory against torch's own, how
far copies hide behind compute, and which way device memory goes to files. Run it where a GPU is::

    python -m benchmarks.gpu_check [--json]

Without one it says so and ends with 0. ``--device cpu`` runs the same code on the stand-in, whose
speeds have no bounds. Exit status 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

import tierkv
from benchmarks import gpu_codecs
from benchmarks.gpu_copies import copies, overlap, row
from benchmarks.report import About, arguments, emit
from tierkv.abc import Move
from tierkv.abc.direct import DirectBackend
from tierkv.config import Tier
from tierkv.device import Devices, fold, fold_digests
from tierkv.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.gpu_copies import Row
    from tierkv.abc import Backend, Device, View

__all__ = ["rows"]

_MIB = 1 << 20
_BLOCK, _HEADS, _DIM, _LAYERS = 16, 4, 64, 6
_TIERS = ("device", "device+host", "device+nvme", "device+host+nvme", "host", "nvme", "host+nvme")
_VIEWS = (("dense", "paged HND"), ("paged HND", "dense"), ("paged NHD", "paged NHD"))


# --------------------------------------------------------------------------- suites


def _suites(name: str, folder: Path) -> Iterator[Row]:
    """The suites that a plug-in has to pass."""
    from tierkv.testing import backend_mutants, device_mutants
    from tierkv.testing.devices import DeviceTests
    from tierkv.testing.resident import ResidentBackendTests

    class OnDevice(DeviceTests):
        def make(self) -> Device:
            return Devices().open(name)

        def model(self, device: Device, work: Callable[[], object]) -> None:
            if name != "cpu":  # a kernel of about 10 ms, so that a missing wait shows
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            work()

    def tier(_: Path, capacity: int) -> Backend:
        backend: Backend = resolve("backends", "device")(Tier("device", capacity, device=name))
        return backend

    make: Any = tier  # the suite's runner asks for a class; a function does as well

    failed = asyncio.run(device_mutants.failing_checks(OnDevice()))
    yield from _verdict("suite of devices", failed, OnDevice)
    failed = asyncio.run(backend_mutants.failing_checks(ResidentBackendTests, make, folder))
    yield from _verdict("suite of device tiers", failed, ResidentBackendTests)


def _tests() -> Iterator[Row]:
    """What only a GPU can show, where the tests are at hand."""
    tests = Path(__file__).parent.parent / "tests"
    for name in ("device", "codecs"):
        if (tests / name).is_dir():
            command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [sys.executable, *command, str(tests / name)], stdout=sys.stderr, check=False
            )
            yield row(f"pytest -m gpu tests/{name}", done.returncode, "0", ok=not done.returncode)


def _verdict(what: str, failed: dict[str, str], suite: type) -> Iterator[Row]:
    for name, why in failed.items():
        print(f"{what}: {name}: {why}", file=sys.stderr)
    total = sum(name.startswith("test_") for name in dir(suite))
    yield row(f"{what}: {total} checks, failed", len(failed), "0", ok=not failed)


# --------------------------------------------------------------------------- round trips


def _view(kind: str, blocks: int, where: str, fill: bool) -> tuple[View, list[torch.Tensor]]:
    """Caller memory in the device, random or zero; the view and its tensors in order of tokens."""
    make: Callable[..., torch.Tensor] = torch.randn if fill else torch.zeros
    tokens = blocks * _BLOCK
    if kind == "dense":
        dense = [
            tuple(make(_HEADS, tokens, _DIM, device=where) for _ in "kv") for _ in range(_LAYERS)
        ]
        return tierkv.views.dense([(k, v) for k, v in dense]), [t for kv in dense for t in kv]
    order = torch.randperm(2 * blocks)[:blocks].tolist()
    nhd = kind == "paged NHD"
    shape = (2 * blocks, _BLOCK, _HEADS, _DIM) if nhd else (2 * blocks, _HEADS, _BLOCK, _DIM)
    pools = [tuple(make(shape, device=where) for _ in "kv") for _ in range(_LAYERS)]
    view = tierkv.views.paged(
        [(k, v) for k, v in pools], order, page_tokens=_BLOCK, order="NHD" if nhd else "HND"
    )
    pages = [pool[order] for kv in pools for pool in kv]
    if fill:
        return view, [_tokens(p, nhd=nhd) for p in pages]
    return view, [_Late(pool, order, nhd) for kv in pools for pool in kv]  # type: ignore[misc]


def _tokens(pages: torch.Tensor, *, nhd: bool) -> torch.Tensor:
    """Pages in order, as ``[heads, tokens, dim]``."""
    heads = pages.permute(2, 0, 1, 3) if nhd else pages.permute(1, 0, 2, 3)
    return heads.reshape(_HEADS, -1, _DIM)


class _Late:
    """The pages of a pool, to be looked at once something was loaded into them."""

    def __init__(self, pool: torch.Tensor, order: list[int], nhd: bool) -> None:
        self._pool, self._order, self._nhd = pool, order, nhd

    def cpu(self) -> torch.Tensor:
        """What is in the pages now."""
        return _tokens(self._pool[self._order], nhd=self._nhd).cpu()


async def _trip(tiers: list[Tier], where: str, write: str, read: str, *, layers: bool) -> bool:
    """Store from one kind of view and load into another, cold as well; whether bits are kept."""
    layout = tierkv.Layout.uniform(_LAYERS, _HEADS, _DIM, "float32")
    space = tierkv.Space(tierkv.Identity("gpu", "1"), layout, block_tokens=_BLOCK)
    blocks = 40
    ids = list(range(blocks * _BLOCK))
    source, right = _view(write, blocks, where, fill=True)
    for restarted in (False, True):
        async with (
            tierkv.open(tiers=tiers, space=space, staging="16MiB") as engine,
            engine.session("trip") as session,
        ):
            if not restarted:
                await _store(session, ids, source, layers=layers)
                await session.flush()
            elif tiers[-1].kind != "nvme":
                break
            target, got = _view(read, blocks, where, fill=False)
            async with session.match(ids) as match:
                if layers:
                    async for _ in match.layers(target):
                        pass
                    tokens = match.tokens
                else:
                    tokens = (await match.load(target)).tokens
            same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(right, got, strict=True))
            if tokens != len(ids) or not same:
                return False
    return True


async def _store(session: Any, ids: list[int], source: View, *, layers: bool) -> None:
    if not layers:
        await session.store(ids, source)
        return
    async with session.store_layers(ids, source) as saver:
        for layer in range(_LAYERS):
            await saver.layer(layer)


def _trips(name: str, where: str, folder: Path) -> Iterator[Row]:
    for number, kinds in enumerate(_TIERS):
        bad = []
        for write, read in _VIEWS:
            for layers in (False, True):
                path = folder / f"{number}-{write}-{read}-{layers}"
                tiers = [
                    Tier(
                        kind,
                        "64MiB" if kind == "nvme" else "12MiB",
                        path=str(path) if kind == "nvme" else None,
                        device=name if kind == "device" else None,
                    )
                    for kind in kinds.split("+")
                ]
                try:
                    good = asyncio.run(_trip(tiers, where, write, read, layers=layers))
                except Exception as error:  # noqa: BLE001 - a path that raises is not right
                    print(f"{kinds}, {write} to {read}: {error!r}", file=sys.stderr)
                    good = False
                if not good:
                    bad.append(f"{write} to {read}{', by layers' if layers else ''}")
        yield row(f"round trips over {kinds}: wrong", ", ".join(bad) or 0, "0", ok=not bad)


def _folds(device: Device) -> Row:
    """Checksums on the device are those of the host."""
    wrong = 0
    for nbytes in (64, 4096, 65_536 + 64, 3 * _MIB + 4096):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        there = device.allocate(nbytes)
        assert there is not None
        device.copy([Move(there, data)], device.loads)
        numbers = device.folds([there], device.loads)
        device.loads.record().synchronize()
        wrong += fold_digests(numbers.cpu()) != [
            fold(memoryview(bytearray(data.numpy().tobytes())))
        ]
    return row("checksums that differ from the host's", wrong, "0", ok=not wrong)


# --------------------------------------------------------------------------- the rest


def _codecs(name: str) -> Iterator[Row]:
    """Codecs in device memory, where Triton is installed."""
    if name == "cpu" or importlib.util.find_spec("triton") is None:
        yield row("codecs in device memory", "no Triton, or no device")
        return
    for what, value, exact in gpu_codecs.seen(name):
        yield row(what, value, "0" if exact else "-", ok=not (exact and value))


async def _files(device: Device, folder: Path) -> Row:
    """Which way a frame goes from device memory to files."""
    from tierkv.workers import Workers

    workers = Workers()
    await workers.start()
    backend: Backend = resolve("backends", "nvme")(Tier("nvme", "64MiB", path=str(folder)))
    try:
        await backend.open(workers)
        way = backend.direct(device) if isinstance(backend, DirectBackend) else None
        mode = backend.stats().mode
    finally:
        await backend.aclose()
        await workers.aclose()
    how = "straight from the device" if way is not None else "through host memory"
    return row("files", f"{how}, {mode}")


def rows(name: str, *, mib: int = 256, repeats: int = 15) -> Iterator[Row]:
    """Check everything.

    Args:
        name: The device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``.
        mib: Size of the copies.
        repeats: Interleaved pairs of copies.
    """
    with tempfile.TemporaryDirectory(prefix="tierkv-gpu-") as place:
        folder = Path(place)
        (folder / "suite").mkdir()
        yield from _suites(name, folder / "suite")
        yield from _trips(name, name, folder)
        if name != "cpu":
            yield from _tests()
        devices = Devices()
        device = devices.open(name)
        getattr(device, "ready", lambda: None)()  # kernels are compiled in the background
        yield row("device", repr(device))
        try:
            yield _folds(device)
            yield from _codecs(name)
            yield from copies(device, name, mib * _MIB, repeats)
            yield overlap(device, name, mib * _MIB)
            yield asyncio.run(_files(device, folder / "files"))
        finally:
            devices.close()


ABOUT: Final = About(
    measures="every device path: right bytes, speed of copies and codecs, copies behind compute",
    against="the host's codecs and checksums to the bit; raw copies of pinned memory in turns",
    floors="a raw pinned copy, overlap with compute, and the rest in column bound; exit status 1 "
    "if a check fails",
    takes="a few minutes on a GPU; as long with --device cpu, whose speeds have no bounds",
    needs="a CUDA device (without one it says so and ends with 0); for direct files kvikio",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; exit status 1 if one fails."""
    parser = arguments("gpu_check", __doc__, ABOUT)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (the stand-in)")
    parser.add_argument("--mib", type=int, default=256, help="size of the copies")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of copies")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch sees no CUDA device here: nothing to check", file=sys.stderr)
        emit("gpu_check", [], args.json)
        return 0
    torch.set_num_threads(1)
    begin = time.perf_counter()
    found = list(rows(args.device, mib=args.mib, repeats=args.repeats))
    found.append(row("seconds in all", time.perf_counter() - begin))
    emit("gpu_check", found, args.json)
    return 0 if all(row["ok"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
