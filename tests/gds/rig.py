"""An nvme tier that reaches the memory of the driver's double."""

from __future__ import annotations

import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

from tests.gds.double import DoubleDevice
from tierkv.abc import OK, DirectIo, IoStatus, ReadRequest
from tierkv.config import Tier
from tierkv.testing.bench import Bench, contents
from tierkv.workers import Workers
from tierkv_backends.nvme import NvmeBackend
from tierkv_backends.nvme.direct import DeviceFiles

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tierkv.abc import IoResult, StoredPart

PAGE = 4096


@functools.cache
def device() -> DoubleDevice:
    """The device of this process."""
    return DoubleDevice()


class Gds(Bench):
    """An open nvme backend and the double's memory."""

    way: DirectIo

    @property
    def files(self) -> DeviceFiles:
        """Kvikio's side of the tier."""
        files = self.backend._devices  # type: ignore[attr-defined]
        assert isinstance(files, DeviceFiles)
        return files

    def memory(self, nbytes: int) -> torch.Tensor:
        """Device memory, whole pages."""
        tensor = device().allocate(max(1, -(-nbytes // PAGE)) * PAGE)
        assert tensor is not None
        return tensor

    def loaded(self, stored: StoredPart) -> torch.Tensor:
        """Device memory that holds a part's frame; the padding holds something else."""
        tensor = self.memory(stored.nbytes)
        tensor[: stored.nbytes] = torch.frombuffer(bytearray(contents(stored)), dtype=torch.uint8)
        return tensor

    async def put(self, *parts: StoredPart) -> list[IoResult]:
        """Write from the device; spoils the memory at once, as whoever reuses it would."""
        items = [(stored, self.loaded(stored)) for stored in parts]
        results = await self.way.write_device(items)
        for _, tensor in items:
            tensor.fill_(0xEE)
        return results

    async def get(self, *parts: StoredPart) -> list[bytes | IoStatus]:
        """Read whole frames into the device."""
        into = [self.memory(stored.nbytes) for stored in parts]
        requests = [ReadRequest(p.part, p.generation, 0, p.nbytes) for p in parts]
        results = await self.way.read_device(requests, into)
        return [
            tensor[: stored.nbytes].numpy().tobytes() if result == OK else result.status
            for stored, tensor, result in zip(parts, into, results, strict=True)
        ]


@asynccontextmanager
async def opened(root: Path, capacity: int = 96 << 20, **options: Any) -> AsyncIterator[Gds]:
    """An open backend that reaches the double."""
    workers = Workers(threads=2)
    await workers.start()
    try:
        options = {"io": "gds", **options}
        backend = NvmeBackend(Tier("nvme", capacity, path=str(root / "kv"), options=options))
        found = await backend.open(workers)
        try:
            bench = Gds(backend, workers, found)
            way = backend.direct(device())
            assert way is not None
            bench.way = way
            yield bench
        finally:
            await backend.aclose()
    finally:
        await workers.aclose()
