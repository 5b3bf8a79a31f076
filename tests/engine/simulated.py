"""An engine whose callers' tensors are in the memory of a simulated device."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import tierkv
from tests import kit
from tests.engine.rig import running
from tierkv.testing.accelerator import SimDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from tests.engine.rig import Rig
    from tierkv.mover.core import Core


def device_tiers(
    kinds: str, path: Path, capacity: str = "4MiB", **options: Any
) -> list[tierkv.Tier]:
    made = []
    for kind in kinds.split("+"):
        where = str(path / kind) if kind == "nvme" else None
        device = "sim:5" if kind == "device" else None
        size = "64MiB" if kind == "nvme" else capacity
        made.append(tierkv.Tier(kind, size, path=where, device=device, **options))
    return made


def device_of(core: Core) -> SimDevice:
    """The simulated device of the engine: that of its tier, or one of its own."""
    tier = core.levels[0].resident
    found = tier.device if tier is not None else core.devices.open("sim:9")
    assert isinstance(found, SimDevice)
    return found


@asynccontextmanager
async def simulated(
    kinds: str, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Rig, SimDevice]]:
    """An engine whose callers' tensors are on a simulated device."""
    capacity = settings.pop("capacity", "4MiB")
    options = settings.pop("options", {})
    monkeypatch.setattr(
        kit, "tiers", lambda *_, **__: device_tiers(kinds, path, capacity, **options)
    )
    async with running(kinds, path, **settings) as rig:
        device = device_of(rig.engine.core)
        yield rig, device
        assert device.counters.hazards == 0
        device.check()


def late(device: SimDevice, kv: kit.Memory) -> kit.Memory:
    """Memory that the model fills with ``kv`` on its stream, later."""
    target = kit.Memory(kv.layout, kv.length)

    def kernel() -> None:
        time.sleep(0.01)  # long enough that whoever does not wait reads what was there before
        for mine, theirs in ((target.layers, kv.layers), (target.states, kv.states)):
            for layer, tensors in theirs.items():
                for name, tensor in tensors.items():
                    mine[layer][name].copy_(tensor)

    device.compute.submit(kernel)
    return target
