"""Everything that callers do, at random and cancelled at random, against a model that never errs.

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
from tierkv.errors import (
    BackendError,
    ConfigError,
    LoadIncomplete,
    SessionBusyError,
    StoreIncomplete,
)
from tierkv.session.batches import StoreRequest
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
class Storm:
    """Callers of one engine.

    Attributes:
        rig: The engine.
        space: Its space.
        seed: Of what happens.
        tenants: Whose sessions they are.
        lossy: Tolerance of lossy sessions; 0: there are none.
        sizes: Tiers that are resized, and between which bytes.
        cuts: Share of operations that are cancelled.
        names: Operations to choose from; empty: all.
    """

    rig: Rig
    space: Space
    seed: int
    tenants: tuple[str, ...] = ("",)
    lossy: float = 0.0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    cuts: float = 0.5
    names: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.truth = Truth(self.space.layout)
        self.ended: list[kit.Memory] = []

    def count(self, what: str, number: int = 1) -> None:
        """Note that something happened."""
        self.counts[what] = self.counts.get(what, 0) + number

    async def run(self, callers: int, rounds: int) -> None:
        """Let several callers act at once."""
        async with anyio.create_task_group() as group:
            for number in range(callers):
                group.start_soon(self._caller, random.Random(f"{self.seed}-{number}"), rounds)

    async def _caller(self, dice: random.Random, rounds: int) -> None:
        acts: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "store": self._store,
            "load": self._load,
            "layers": self._layers,
            "store_layers": self._store_layers,
            "many": self._many,
            "prefetch": self._prefetch,
            "sessions": self._sessions,
            "flush": self._flush,
            "resize": self._resize,
            "look": self._look,
        }
        weights = {"store": 4, "load": 4, "layers": 2, "store_layers": 2}
        names = list(self.names or acts)
        for _ in range(rounds):
            name = dice.choices(names, [weights.get(n, 1) for n in names])[0]
            try:
                await self._perhaps_cut(dice, acts[name])
                self.count(name)
            except TimeoutError:
                self.count("cut")
            except SessionBusyError:
                self.count("busy")

    async def _perhaps_cut(
        self, dice: random.Random, act: Callable[[random.Random], Awaitable[None]]
    ) -> None:
        if dice.random() >= self.cuts:
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

    # ------------------------------------------------------------------ what callers do

    def _who(self, dice: random.Random) -> tuple[int, int, dict[str, Any]]:
        family, variant = dice.randrange(FAMILIES), dice.randrange(VARIANTS)
        options: dict[str, Any] = {"tenant": dice.choice(self.tenants)}
        if dice.random() < 0.2:
            options["ttl"] = dice.choice(("20ms", "1h"))
        if self.lossy and dice.random() < 0.3:
            options["fidelity"] = "lossy"
        return family, variant, options

    def _session(self, family: int, variant: int, options: dict[str, Any]) -> tierkv.Session:
        name = f"s{family}-{variant}-{options.get('fidelity', 'exact')}"
        return self.rig.engine.session(name, **options)

    @staticmethod
    def _length(dice: random.Random) -> int:
        blocks = dice.randrange(1, BLOCKS + 1)
        return blocks * kit.BLOCK - dice.choice((0, 0, 0, 5))

    def _given(self, family: int, variant: int, length: int, session: tierkv.Session) -> kit.Memory:
        """Memory of a model that has computed a prompt: its own copy."""
        memory = kit.Memory(self.space.layout, length)
        truth = self.truth.of(family, variant, length)
        for mine, theirs in ((memory.layers, truth.layers), (memory.states, truth.states)):
            for index, tensors in theirs.items():
                for name, tensor in tensors.items():
                    mine[index][name].copy_(tensor)
        return memory

    def _spoil(self, memory: kit.Memory) -> None:
        """The caller uses its memory for something else; nobody may touch it any more."""
        for group in (memory.layers, memory.states):
            for tensors in group.values():
                for tensor in tensors.values():
                    tensor.fill_(55.0)
        self.ended.append(memory)

    def _right(
        self, back: kit.Memory, who: tuple[int, int], tokens: int, session: tierkv.Session
    ) -> None:
        truth = self.truth.of(*who, tokens) if tokens else None
        if truth is None:
            return
        if session.lossy:
            assert near(back, truth, tokens, self.lossy), f"too far off: {session}"
        else:
            assert back.same(truth, tokens), f"wrong bytes: {session}, {tokens} tokens"
        self.count("tokens", tokens)

    async def _store(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        length = self._length(dice)
        async with self._session(family, variant, options) as session:
            memory = self._given(family, variant, length, session)
            start = dice.choice((0, 0, 16, 40))
            try:
                result = await session.store(
                    prompt(family, variant, length),
                    memory.view,
                    min(start, length),
                    tail=dice.random() < 0.3,
                )
                self.count("stored", result.stored)
            finally:
                self._spoil(memory)

    async def _store_layers(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        length = self._length(dice)
        async with self._session(family, variant, options) as session:
            memory = self._given(family, variant, length, session)
            numbers = [x.index for g in self.space.layout.groups for x in g.layers]
            if dice.random() < 0.1:
                numbers.pop()
            try:
                ids = prompt(family, variant, length)
                async with session.store_layers(ids, memory.view) as saver:
                    for number in numbers:
                        await saver.layer(number)
                        if dice.random() < 0.3:
                            await asyncio.sleep(0)
            except StoreIncomplete:
                self.count("incomplete")
            finally:
                self._spoil(memory)

    async def _load(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        length = self._length(dice)
        back = kit.Memory(self.space.layout, length)
        deadline = dice.choice((None, None, None, "1ms", "50ms", 0))
        try:
            async with self._session(family, variant, options) as session:
                if dice.random() < 0.1:
                    session.computed(1000, dice.choice((1e-4, 1.0)))
                async with session.match(prompt(family, variant, length)) as match:
                    result = await match.load(into=back.view, deadline=deadline)
                assert result.tokens <= match.tokens
                self._right(back, (family, variant), result.tokens, session)
                if not self.space.layout.groups[0].window and not back.states:
                    assert back.untouched(result.tokens)
        finally:
            self._spoil(back)

    async def _layers(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        length = self._length(dice)
        back = kit.Memory(self.space.layout, length)
        try:
            async with self._session(family, variant, options) as session:
                async with session.match(prompt(family, variant, length)) as match:
                    try:
                        wanted = dice.choice((None, match.worth))
                        async for _ in match.layers(into=back.view, tokens=wanted):
                            if dice.random() < 0.1:
                                return
                    except LoadIncomplete:
                        self.count("incomplete")
                        return
                tokens = match.tokens if wanted is None else wanted
                self._right(back, (family, variant), tokens, session)
        finally:
            self._spoil(back)

    async def _many(self, dice: random.Random) -> None:
        whos = [self._who(dice) for _ in range(dice.randrange(1, 4))]
        lengths = [self._length(dice) for _ in whos]
        sessions = [self._session(*who) for who in whos]
        ids = [prompt(f, v, n) for (f, v, _), n in zip(whos, lengths, strict=True)]
        given = [
            self._given(f, v, n, s) for (f, v, _), n, s in zip(whos, lengths, sessions, strict=True)
        ]
        backs = [kit.Memory(self.space.layout, n) for n in lengths]
        engine = self.rig.engine
        try:
            async with _AllOpen(sessions):
                if dice.random() < 0.5:
                    await engine.store_many(
                        [
                            StoreRequest(s, i, g.view)
                            for s, i, g in zip(sessions, ids, given, strict=True)
                        ]
                    )
                async with engine.match_many(list(zip(sessions, ids, strict=True))) as matches:
                    results = await engine.load_many(
                        [(m, b.view) for m, b in zip(matches, backs, strict=True)],
                        deadline=dice.choice((None, "5ms")),
                    )
                    for number, result in enumerate(results):
                        who = whos[number][:2]
                        self._right(backs[number], who, result.tokens, sessions[number])
        finally:
            for memory in (*given, *backs):
                self._spoil(memory)

    async def _prefetch(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        options.pop("ttl", None)
        ids = prompt(family, variant, self._length(dice))
        job = await self.rig.engine.prefetch(tokens=ids, **options)
        if dice.random() < 0.5:
            await job.wait()

    async def _sessions(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        async with self._session(family, variant, options) as session:
            act = dice.randrange(4)
            if act == 0:
                session.destroy()
            elif act == 1:
                session.clear()
            elif act == 2:
                session.info()
            else:
                try:
                    session.fork(f"fork-{dice.randrange(3)}").destroy()
                except ConfigError:
                    self.count("no fork")

    async def _flush(self, dice: random.Random) -> None:
        try:
            await self._sync(dice)
        except BackendError:
            self.count("not synced")  # as it says: the tier does not answer

    async def _sync(self, dice: random.Random) -> None:
        if dice.random() < 0.5:
            await self.rig.engine.flush()
            return
        family, variant, options = self._who(dice)
        async with self._session(family, variant, options) as session:
            await session.flush()

    async def _resize(self, dice: random.Random) -> None:
        if self.sizes:
            name = dice.choice(sorted(self.sizes))
            self.rig.engine.resize(name, dice.randint(*self.sizes[name]))

    async def _look(self, dice: random.Random) -> None:
        family, variant, options = self._who(dice)
        async with self._session(family, variant, options) as session:
            session.explain(prompt(family, variant, self._length(dice)))
            self.rig.engine.stats()
            self.rig.engine.sessions()
            self.rig.engine.metrics.scrape()
            held = session.get_nowait(dice.randrange(BLOCKS))
            if held is not None:
                with held:
                    held.verify()

    async def check(self) -> None:
        """At rest nothing is leaked, and nothing was written after a call had ended."""
        await self.rig.at_rest()
        for memory in self.ended:
            for group in (memory.layers, memory.states):
                for tensors in group.values():
                    for tensor in tensors.values():
                        assert bool((tensor == 55.0).all()), "written after the call had ended"


class _AllOpen:
    def __init__(self, sessions: list[tierkv.Session]) -> None:
        self._sessions = sessions
        self._opened: list[tierkv.Session] = []

    async def __aenter__(self) -> None:
        for session in self._sessions:
            await session.__aenter__()
            self._opened.append(session)

    async def __aexit__(self, *error: Any) -> None:
        for session in self._opened:
            await session.__aexit__(None, None, None)


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
