"""What storms are made of: prompts whose KV is known, callers' memory, faults, and cancels.

The KV of a block is a function of its tokens, so that whoever loads knows what has to come back.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch

from tests import kit
from tierkv.testing.cancel import Stepped
from tierkv.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import tierkv
    from tests.engine.rig import Rig
    from tierkv.abc import IoResult, IoStatus, Threads
    from tierkv.layout import Layout, Space

FAMILIES, VARIANTS, BLOCKS = 4, 3, 8
SHARED = BLOCKS // 2


def prompt(family: int, variant: int, length: int) -> list[int]:
    """The first ``length`` tokens of a prompt; half a prompt is common to its family."""
    shared = kit.tokens(SHARED, seed=family)
    own = kit.tokens(BLOCKS - SHARED, seed=1000 + 10 * family + variant)
    return (shared + own)[:length]


class Truth:
    """The KV of every prompt."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._known: dict[tuple[int, int, int], kit.Memory] = {}

    def of(self, family: int, variant: int, length: int) -> kit.Memory:
        """KV of the first ``length`` tokens."""
        key = family, variant, length
        if key not in self._known:
            common = kit.Memory(self.layout, BLOCKS * kit.BLOCK, seed=500 + family)
            own = kit.Memory(self.layout, BLOCKS * kit.BLOCK, seed=700 + 10 * family + variant)
            half = SHARED * kit.BLOCK
            memory = kit.Memory(self.layout, length)
            for index, layer in memory.layers.items():
                for name, tensor in layer.items():
                    tensor.copy_(own.layers[index][name][:, :length])
                    tensor[:, :half] = common.layers[index][name][:, : min(half, length)]
            who = f"{family}-{variant if length > half else -1}-{length}"
            for index, state in memory.states.items():
                for name, tensor in state.items():
                    tensor.fill_(random.Random(f"{who}-{index}-{name}").random())
            self._known[key] = memory
        return self._known[key]


def near(back: kit.Memory, truth: kit.Memory, tokens: int, tolerance: float) -> bool:
    """Whether what a lossy load brought is as near as its codec promises."""
    for index, layer in back.layers.items():
        for name, tensor in layer.items():
            group = next(g for g in back.layout.groups if index in [x.index for x in g.layers])
            first = 0 if group.window is None else max(0, tokens - (group.window - 1))
            mine, theirs = tensor[:, first:tokens], truth.layers[index][name][:, first:tokens]
            if not torch.allclose(mine.float(), theirs.float(), atol=tolerance, rtol=0):
                return False
    return True


@dataclass
class World:
    """An engine, what is true, and what happened.

    Attributes:
        rig: The engine.
        space: Its space.
        seed: Of what happens.
        tenants: Whose sessions they are.
        lossy: Tolerance of lossy sessions; 0: there are none.
        sizes: Tiers that are resized, and between which bytes.
        cuts: Share of operations that are cancelled.
        counts: How often what happened.
    """

    rig: Rig
    space: Space
    seed: int
    tenants: tuple[str, ...] = ("",)
    lossy: float = 0.0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    cuts: float = 0.5
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.truth = Truth(self.space.layout)
        self.ended: list[kit.Memory] = []

    def count(self, what: str, number: int = 1) -> None:
        """Note that something happened."""
        self.counts[what] = self.counts.get(what, 0) + number

    def who(self, dice: random.Random) -> tuple[int, int, dict[str, Any]]:
        """Somebody: family and variant of a prompt, and options of a session."""
        family, variant = dice.randrange(FAMILIES), dice.randrange(VARIANTS)
        options: dict[str, Any] = {"tenant": dice.choice(self.tenants)}
        if dice.random() < 0.2:
            options["ttl"] = dice.choice(("20ms", "1h"))
        if self.lossy and dice.random() < 0.3:
            options["fidelity"] = "lossy"
        return family, variant, options

    def session(self, family: int, variant: int, options: dict[str, Any]) -> tierkv.Session:
        """The session of somebody."""
        name = f"s{family}-{variant}-{options.get('fidelity', 'exact')}"
        return self.rig.engine.session(name, **options)

    @staticmethod
    def length(dice: random.Random) -> int:
        """Tokens of a prompt, some of which end inside a block."""
        blocks = dice.randrange(1, BLOCKS + 1)
        return blocks * kit.BLOCK - dice.choice((0, 0, 0, 5))

    def given(self, family: int, variant: int, length: int, session: tierkv.Session) -> kit.Memory:
        """Memory of a model that has computed a prompt: its own copy."""
        memory = kit.Memory(self.space.layout, length)
        truth = self.truth.of(family, variant, length)
        for mine, theirs in ((memory.layers, truth.layers), (memory.states, truth.states)):
            for index, tensors in theirs.items():
                for name, tensor in tensors.items():
                    mine[index][name].copy_(tensor)
        return memory

    def spoil(self, memory: kit.Memory) -> None:
        """The caller uses its memory for something else; nobody may touch it any more."""
        for group in (memory.layers, memory.states):
            for tensors in group.values():
                for tensor in tensors.values():
                    tensor.fill_(55.0)
        self.ended.append(memory)

    def right(
        self, back: kit.Memory, who: tuple[int, int], tokens: int, session: tierkv.Session
    ) -> None:
        """Check what a load brought."""
        truth = self.truth.of(*who, tokens) if tokens else None
        if truth is None:
            return
        if session.lossy:
            assert near(back, truth, tokens, self.lossy), f"too far off: {session}"
        else:
            assert back.same(truth, tokens), f"wrong bytes: {session}, {tokens} tokens"
        self.count("tokens", tokens)


async def perhaps_cut(
    dice: random.Random, act: Callable[[random.Random], Awaitable[None]], share: float
) -> None:
    """Act, and in a share of the cases cancel it, one way or another.

    Raises:
        TimeoutError: if it ended by that.
    """
    if dice.random() >= share:
        await act(dice)
        return
    how = dice.randrange(3)
    if how == 0:
        with anyio.move_on_after(dice.random() * 0.02) as scope:
            await act(dice)
        if scope.cancelled_caught:
            raise TimeoutError
    elif how == 1:
        async with asyncio.timeout(dice.random() * 0.02):  # a native cancel
            await act(dice)
    else:
        step, task = dice.randrange(1, 25), asyncio.current_task()
        assert task is not None
        fired = False

        def on_step(at: int) -> None:
            nonlocal fired
            if at == step:
                fired = True
                task.cancel()

        async def work() -> None:
            await act(dice)

        try:
            await Stepped(work(), on_step)
        except asyncio.CancelledError:
            if not fired or task.uncancel() > 0:
                raise
            raise TimeoutError from None
        if fired and task.uncancel() == 0:
            try:
                await asyncio.sleep(0)  # it was absorbed, or is still on its way
            except asyncio.CancelledError:
                raise TimeoutError from None


class Sometimes(Fault):
    """Another fault, in a tenth of the calls."""

    def __init__(self, inner: Fault, seed: int) -> None:
        super().__init__(*inner.operations)
        self._inner = inner
        self._dice = random.Random(seed)

    def due(self, operation: str) -> bool:
        """Whether it acts on this call."""
        return self._inner.due(operation) and self._dice.random() < 0.1

    async def before(self, operation: str, threads: Threads | None) -> None:
        """As the other fault."""
        await self._inner.before(operation, threads)

    def refuse(self, operation: str) -> IoResult | None:
        """As the other fault."""
        return self._inner.refuse(operation)

    def spoil(self, memory: memoryview) -> IoStatus:
        """As the other fault."""
        return self._inner.spoil(memory)
