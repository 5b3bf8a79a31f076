"""Engines on any chain of tiers, and what copies between them must keep."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, wrap
from tierkv.abc import IoStatus, ReadRequest
from tierkv.blocks import part_id
from tierkv.decisions.types import EvictReason
from tierkv.frame import decode_header, page_round
from tierkv.mover.copies import Copy
from tierkv.mover.core import stored_part
from tierkv.sections import open_frame, verify
from tierkv.session import SessionState
from tierkv.testing.accelerator import SimDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Demote
    from tierkv.testing.faults import Fault

SPACE = kit.space()
FRAME = 12 * 1024  # what one block of SPACE takes in a tier
WAYS = (
    "host+nvme",
    "device+host",
    "device+nvme",
    "nvme+file",
    "device+host+nvme",
    "sim+nvme",
    "sim+host+nvme",
)
"""Chains of tiers, fastest first; ``sim`` is a simulated device, whose copies take their time."""


def tiers(ways: str, path: Path, sizes: Sequence[int | str], **options: Any) -> list[tierkv.Tier]:
    """Tiers by name, fastest first."""
    out = []
    for number, (kind, size) in enumerate(zip(ways.split("+"), sizes, strict=True)):
        more = {key: value[number] for key, value in options.items()}
        if kind in ("nvme", "file"):
            more["path"] = str(path / kind)
        if kind in ("device", "sim"):
            more["device"] = "cpu" if kind == "device" else "sim:5"
        out.append(tierkv.Tier("device" if kind == "sim" else kind, size, name=kind, **more))
    return out


@asynccontextmanager
async def opened(
    chain: Sequence[tierkv.Tier],
    faults: Mapping[str, Sequence[Fault]] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """An engine on these tiers that is watched: no part may ever be in neither of two tiers."""
    backends = wrap(chain, faults)
    settings = {"space": SPACE, "tick": 60, **settings}
    async with tierkv.open(tiers=chain, backends=list(backends.values()), **settings) as engine:
        rig = Rig(engine, backends)
        decisions = engine.core.decisions
        dropped = decisions.dropped

        def watched(parts: Any, tier: int, reason: EvictReason, now: float) -> Any:
            drops = dropped(parts, tier, reason, now)
            if reason is EvictReason.DEMOTED:
                for drop in drops:
                    slower = decisions.state(drop.part, now).tiers
                    assert slower
                    assert slower[0] > tier
            return drops

        decisions.dropped = watched  # type: ignore[method-assign]
        yield rig
        for level in engine.core.levels:
            if level.resident is not None and isinstance(level.resident.device, SimDevice):
                # no memory was given back while a copy still touched it
                assert level.resident.device.counters.hazards == 0


def small(ways: str, path: Path, **options: Any) -> list[tierkv.Tier]:
    """The fastest tier takes two conversations, the next a few, the last one everything."""
    count = len(ways.split("+"))
    first = "512KiB" if ways.startswith("nvme") else 8 * FRAME
    sizes = [first, *["512KiB"] * (count - 2), "8MiB"]
    through = [True, *[False] * (count - 1)]
    return tiers(ways, path, sizes, write_through=through, **options)


async def store(rig: Rig, seed: int, blocks: int = 4) -> None:
    """One conversation of four blocks."""
    kv = kit.Memory(SPACE.layout, 16 * blocks, seed)
    async with rig.engine.session(f"s{seed}") as session:
        assert (await session.store(kit.tokens(blocks, seed=seed), kv.view)).skipped == 0


async def loaded(rig: Rig, seed: int, blocks: int = 4) -> int:
    """Tokens that a load brought, which are the right ones."""
    kv = kit.Memory(SPACE.layout, 16 * blocks, seed)
    async with rig.engine.session(f"s{seed}") as session:
        count, back = await load(session, kit.tokens(blocks, seed=seed))
        assert back.same(kv, count)
        return count


async def copied_to(rig: Rig, tier: int) -> list[StoredPart]:
    """What a tier holds; every frame in it is whole, and has the checksums of that tier."""
    core = rig.engine.core
    level = core.levels[tier]
    out = []
    for part, generation, nbytes in list(core.decisions.parts(tier)):
        memory = memoryview(bytearray(page_round(level.backend.longest(nbytes))))
        (result,) = await level.backend.read(
            [ReadRequest(part, generation, 0, len(memory))], [memory]
        )
        assert result.status is IoStatus.OK
        header = open_frame(memory, SPACE, part, generation, decode_header(memory).root)
        verify(header, memory)
        if level.resident is None:
            assert not header.folded
        out.append(stored_part(header))
    return out


async def demote(rig: Rig, tier: int = 0, keep: int = 0) -> list[Demote]:
    """Start the copies by which a tier gives away what it holds, down to ``keep`` bytes."""
    core = rig.engine.core
    room = core.decisions.capacity(tier) - keep
    drops, demotes = core.decisions.make_room(tier, room, tenant="", now=core.clock())
    core.free(drops)
    rig.engine.runtime.behind.demote(demotes)
    return list(demotes)


async def move(rig: Rig, target: int) -> None:
    """Bring everything into one tier, and out of those above it."""
    core, behind = rig.engine.core, rig.engine.runtime.behind
    for tier in range(target):
        level = core.levels[tier]
        behind.add(
            [
                Copy(part, generation, level.backend.longest(nbytes), tier, target)
                for part, generation, nbytes in core.decisions.parts(tier)
            ]
        )
        await rig.settle()
        left = [(p, g) for p, g, _ in core.decisions.parts(tier)]
        while left:  # leaves first
            drops = core.decisions.dropped(left, tier, EvictReason.CAPACITY, core.clock())
            core.free(drops)
            assert drops
            gone = {drop.part for drop in drops}
            left = [(p, g) for p, g in left if p not in gone]


def parts_of(tokens: list[int]) -> list[PartId]:
    """Parts of a prompt, in order."""
    state = SessionState("", "", SPACE, b"")
    state.chain.follow(tokens)
    return [part_id(key, 0) for key in state.chain.keys]
