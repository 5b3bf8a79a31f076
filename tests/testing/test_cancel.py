"""The driver itself is tested on stores whose faults are known."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from tierkv.testing import CancelStep, cancel_at_each_step

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.every_loop,
    pytest.mark.usefixtures("no_task_leaks"),
]


class Pair:
    """Two tiers; a key must be in one of them at every moment."""

    def __init__(self) -> None:
        self.fast, self.slow = {"k"}, set[str]()

    async def pop_then_write(self) -> str:
        self.fast.discard("k")
        await asyncio.sleep(0)
        self.slow.add("k")
        return "moved"

    async def write_then_pop(self) -> str:
        await asyncio.sleep(0)
        self.slow.add("k")
        await asyncio.sleep(0)
        self.fast.discard("k")
        return "moved"

    async def shielded_pop_then_write(self) -> str:
        with anyio.CancelScope(shield=True):
            return await self.pop_then_write()
        raise AssertionError("nobody cancels this scope")

    @property
    def held(self) -> bool:
        return bool(self.fast | self.slow)


async def _runs(method: str, kind: str) -> list[tuple[CancelStep, bool]]:
    pairs: list[Pair] = []

    def make() -> object:
        pairs.append(Pair())
        return getattr(pairs[-1], method)()

    kinds = ("scope",) if kind == "scope" else ("native",)
    return [
        (run, pairs[-1].held)
        async for run in cancel_at_each_step(make, kinds)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_it_reaches_every_suspension_once(kind: str) -> None:
    runs = await _runs("write_then_pop", kind)

    assert [(run.kind, run.step, run.outcome) for run, _ in runs] == [
        (kind, 1, "cancelled"),
        (kind, 2, "cancelled"),
        (kind, 3, "completed"),
    ]
    assert [run.value for run, _ in runs] == [None, None, "moved"]
    assert all(held for _, held in runs)


@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_it_catches_a_key_in_neither_tier(kind: str) -> None:
    runs = await _runs("pop_then_write", kind)

    assert [held for _, held in runs] == [False, True]


async def test_a_shield_passes_the_scope_kind_and_fails_the_native_kind() -> None:
    scope = await _runs("shielded_pop_then_write", "scope")
    native = await _runs("shielded_pop_then_write", "native")

    # the shielded run is cancelled at step 1 and finishes nevertheless
    assert [(run.outcome, held) for run, held in scope] == [
        ("swallowed", True),
        ("completed", True),
    ]
    assert [(run.outcome, held) for run, held in native] == [
        ("cancelled", False),
        ("completed", True),
    ]


async def test_both_kinds_run_by_default_and_see_real_waits() -> None:
    async def wait() -> int:
        event = asyncio.Event()
        handle = asyncio.get_running_loop().call_later(0.005, event.set)
        try:
            await event.wait()
        finally:
            handle.cancel()
        return 7

    runs = [run async for run in cancel_at_each_step(wait)]

    assert [(run.kind, run.step, run.outcome, run.value) for run in runs] == [
        ("scope", 1, "cancelled", None),
        ("scope", 2, "completed", 7),
        ("native", 1, "cancelled", None),
        ("native", 2, "completed", 7),
    ]


@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_an_error_of_the_operation_is_not_hidden(kind: str) -> None:
    async def broken() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            raise KeyError("broken")

    kinds = ("scope",) if kind == "scope" else ("native",)
    with pytest.raises(KeyError, match="broken"):
        async for _ in cancel_at_each_step(broken, kinds):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_an_operation_that_never_ends_is_reported(kind: str) -> None:
    async def endless() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    kinds = ("scope",) if kind == "scope" else ("native",)
    with pytest.raises(AssertionError, match="not completed within 5"):
        async for _ in cancel_at_each_step(endless, kinds, limit=5):  # type: ignore[arg-type]
            pass
