"""An engine whose first tier is in the memory of a simulated (or the stand-in) device."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import tierkv
from tests import kit
from tests.engine.rig import Rig, load
from tierkv.registry import resolve
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.faults import inject
from tierkv_backends.device import DeviceBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from tierkv.abc import Backend
    from tierkv.testing.faults import Fault, Faulty

SPACE = kit.space()
FRAME = 12 * 1024
"""What one block of SPACE takes in a tier."""
DEVICES = ("cpu", "sim:11")


def make_tiers(
    kinds: str, path: Path, device: str = "cpu", room: int | str = "4MiB", **others: int | str
) -> list[tierkv.Tier]:
    """Tiers by name, fastest first; ``room`` on the device, and 64 MiB elsewhere or ``others``."""
    settings: dict[str, dict[str, Any]] = {
        "device": {"device": device},
        "host": {},
        "nvme": {"path": str(path / "nvme")},
        "file": {"path": str(path / "file")},
    }
    sizes = {"device": room, **others}
    return [
        tierkv.Tier(kind, sizes.get(kind, "64MiB"), **settings[kind]) for kind in kinds.split("+")
    ]


class DeviceRig(Rig):
    """An engine with a tier on a device."""

    @property
    def tier(self) -> DeviceBackend:
        """The backend of the device tier, without its faults."""
        inner = self.backends["device"].inner
        assert isinstance(inner, DeviceBackend)
        return inner

    @property
    def sim(self) -> SimDevice:
        """Its device, where it is a simulated one."""
        assert isinstance(self.tier.device, SimDevice)
        return self.tier.device

    def used(self, tier: str = "device") -> int:
        """Bytes that the decisions count there."""
        return self.engine.stats().used[tier]

    def parts(self, tier: int = 0) -> set[bytes]:
        """What a tier holds."""
        return {part for part, _, _ in self.engine.core.decisions.parts(tier)}

    async def clean(self) -> None:
        """At rest, and no device memory waits or is out beside the frames."""
        await self.at_rest()
        stats = self.tier.stats()
        assert stats.details["waiting_bytes"] == 0
        pool = self.tier._pool
        assert pool is not None
        assert pool.used == stats.live_bytes


@asynccontextmanager
async def on_device(
    tiers: Sequence[tierkv.Tier],
    faults: Mapping[str, Sequence[Fault]] | None = None,
    sim: SimDevice | None = None,
    **settings: Any,
) -> AsyncIterator[DeviceRig]:
    """An open engine; afterwards no memory may have been given back under running work.

    Args:
        tiers: Its tiers; the first is the device's.
        faults: By tier.
        sim: The device, instead of the one that the tier names.
        **settings: Of the engine.
    """
    backends: dict[str, Faulty] = {}
    for tier in tiers:
        plain: Backend
        if tier.kind == "device":
            plain = DeviceBackend(tier, sim)
        else:
            plain = resolve("backends", tier.kind)(tier)
        backends[tier.name] = inject(plain, *(faults or {}).get(tier.name, ()))
    settings = {"space": SPACE, **settings}
    async with tierkv.open(tiers=tiers, backends=list(backends.values()), **settings) as engine:
        rig = DeviceRig(engine, backends)
        engine.core.devices.add(rig.tier.device)
        yield rig
    device = rig.tier.device
    if isinstance(device, SimDevice):
        device.close()
        assert device.counters.hazards == 0, "memory was given back under running work"


def said(seed: int, blocks: int = 4) -> tuple[list[int], kit.Memory]:
    """A prompt and its KV."""
    return kit.tokens(blocks, seed=seed), kit.Memory(SPACE.layout, 16 * blocks, seed)


async def stored(rig: Rig, seed: int, blocks: int = 4, **who: Any) -> tierkv.StoreResult:
    """Store one conversation."""
    ids, kv = said(seed, blocks)
    async with rig.engine.session(f"s{seed}", **who) as session:
        return await session.store(ids, kv.view)


async def loaded(rig: Rig, seed: int, blocks: int = 4, **who: Any) -> int:
    """Tokens that a load of a conversation brings; they are the right ones, and no other came."""
    ids, kv = said(seed, blocks)
    async with rig.engine.session(f"s{seed}", **who) as session:
        count, back = await load(session, ids)
        assert back.same(kv, count)
        assert back.untouched(count)
        return count
