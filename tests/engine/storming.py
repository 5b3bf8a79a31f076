"""Everything that callers do, at random and cancelled at random, against what must come back."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import anyio

from tests import kit
from tests.engine.storm_world import BLOCKS, World, perhaps_cut, prompt
from tierkv.errors import (
    BackendError,
    ConfigError,
    LoadIncomplete,
    SessionBusyError,
    StoreIncomplete,
)
from tierkv.session.batches import StoreRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import tierkv


class Storm(World):
    """Callers of one engine."""

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
            "tell": self._tell,
        }
        weights = {"store": 4, "load": 4, "layers": 2, "store_layers": 2}
        names = list(acts)
        for _ in range(rounds):
            name = dice.choices(names, [weights.get(n, 1) for n in names])[0]
            try:
                await perhaps_cut(dice, acts[name], self.cuts)
                self.count(name)
            except TimeoutError:
                self.count("cut")
            except SessionBusyError:
                self.count("busy")

    # ------------------------------------------------------------------ what callers do

    async def _store(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        length = self.length(dice)
        async with self.session(family, variant, options) as session:
            memory = self.given(family, variant, length, session)
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
                self.spoil(memory)

    async def _store_layers(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        length = self.length(dice)
        async with self.session(family, variant, options) as session:
            memory = self.given(family, variant, length, session)
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
                self.spoil(memory)

    async def _load(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        length = self.length(dice)
        back = kit.Memory(self.space.layout, length)
        deadline = dice.choice((None, None, None, "1ms", "50ms", 0))
        try:
            async with self.session(family, variant, options) as session:
                if dice.random() < 0.1:
                    session.computed(1000, dice.choice((1e-4, 1.0)))
                async with session.match(prompt(family, variant, length)) as match:
                    result = await match.load(into=back.view, deadline=deadline)
                assert result.tokens <= match.tokens
                self.right(back, (family, variant), result.tokens, session)
                if not self.space.layout.groups[0].window and not back.states:
                    assert back.untouched(result.tokens)
        finally:
            self.spoil(back)

    async def _layers(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        length = self.length(dice)
        back = kit.Memory(self.space.layout, length)
        try:
            async with self.session(family, variant, options) as session:
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
                self.right(back, (family, variant), tokens, session)
        finally:
            self.spoil(back)

    async def _many(self, dice: random.Random) -> None:
        whos = [self.who(dice) for _ in range(dice.randrange(1, 4))]
        lengths = [self.length(dice) for _ in whos]
        sessions = [self.session(*who) for who in whos]
        ids = [prompt(f, v, n) for (f, v, _), n in zip(whos, lengths, strict=True)]
        given = [
            self.given(f, v, n, s) for (f, v, _), n, s in zip(whos, lengths, sessions, strict=True)
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
                        self.right(backs[number], who, result.tokens, sessions[number])
        finally:
            for memory in (*given, *backs):
                self.spoil(memory)

    async def _prefetch(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        options.pop("ttl", None)
        ids = prompt(family, variant, self.length(dice))
        job = await self.rig.engine.prefetch(tokens=ids, **options)
        if dice.random() < 0.5:
            await job.wait()

    async def _sessions(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        async with self.session(family, variant, options) as session:
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
        family, variant, options = self.who(dice)
        async with self.session(family, variant, options) as session:
            await session.flush()

    async def _resize(self, dice: random.Random) -> None:
        if self.sizes:
            name = dice.choice(sorted(self.sizes))
            self.rig.engine.resize(name, dice.randint(*self.sizes[name]))

    async def _look(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        async with self.session(family, variant, options) as session:
            session.explain(prompt(family, variant, self.length(dice)))
            self.rig.engine.stats()
            self.rig.engine.sessions()
            self.rig.engine.metrics.scrape()
            held = session.get_nowait(dice.randrange(BLOCKS))
            if held is not None:
                with held:
                    held.verify()

    async def _tell(self, dice: random.Random) -> None:
        family, variant, options = self.who(dice)
        async with self.session(family, variant, options) as session:
            known = len(session.token_ids)
            if dice.random() < 0.7:
                session.hint(
                    next_in=dice.choice((None, 0, 0.05, 1e308)),
                    stop_reason=dice.choice(("tool_use", "\ud800", f"{dice.randrange(99)}")),
                )
            start = dice.randrange(known + 1)
            session.score([dice.random() for _ in range(known - start)], start)

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
