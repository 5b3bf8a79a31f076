"""The ``device`` tier passes the shipped suite on the CPU, simulated, wrapped, and on a GPU."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierkv.config import Tier
from tierkv.testing.faults import inject
from tierkv.testing.resident import ResidentBackendTests
from tierkv_backends.device import DeviceBackend

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import Backend

_SEEDS = itertools.cycle(range(50))


class TestCpu(ResidentBackendTests):
    def make(self, root: Path, capacity: int) -> Backend:
        return DeviceBackend(Tier("device", capacity, device="cpu"))


@pytest.mark.every_loop
class TestSimulated(ResidentBackendTests):
    """Each check on another seed: copies run late, and memory is spoiled when it is freed."""

    def make(self, root: Path, capacity: int) -> Backend:
        return DeviceBackend(Tier("device", capacity, device=f"sim:{next(_SEEDS)}"))


class _OnOneLoop(ResidentBackendTests):
    """What differs from the others in nothing that a loop could see."""

    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, Any]]:
        return "asyncio", {"use_uvloop": False}


class TestWithoutFaults(_OnOneLoop):
    def make(self, root: Path, capacity: int) -> Backend:
        return inject(DeviceBackend(Tier("device", capacity, device="cpu")))


class TestOneChunk(_OnOneLoop):
    def make(self, root: Path, capacity: int) -> Backend:
        options = {"chunk": capacity}
        return DeviceBackend(Tier("device", capacity, device="cpu", options=options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
class TestCuda(_OnOneLoop):
    def make(self, root: Path, capacity: int) -> Backend:
        return DeviceBackend(Tier("device", capacity, device="cuda:0"))
