"""What the synchronous face costs: 32 threads on a manager against 32 tasks on an engine.

Both have a RAM tier of their own and do the same turns: match and load a prefix, store one new
block. Rounds are interleaved in pairs in one process; ``ratio`` is the median over the pairs of
manager throughput / engine throughput. Run with ``python -m benchmarks.sync [--json]``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import anyio
import torch

import tierkv
from benchmarks.report import About, arguments, emit, paired
from benchmarks.running import OnLoop
from tierkv.blocking import CacheManager

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from benchmarks.report import Cell

SESSIONS = 32
BLOCK = 64
CAPACITY = "768MiB"
LIMIT = 0.8


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of turn: a model's layout, how many blocks of prefix are loaded, turns per round."""

    name: str
    layout: tierkv.Layout
    prefix: int
    turns: int

    @property
    def space(self) -> tierkv.Space:
        """Space of all sessions."""
        return tierkv.Space(tierkv.Identity("bench", "1"), self.layout, block_tokens=BLOCK)


CASES = (
    Case("256K in, 64K out", tierkv.Layout.uniform(2, 2, 64, "float16"), 4, 16),
    Case("4M in, 512K out", tierkv.Layout.uniform(8, 4, 64, "float16"), 8, 4),
)


class Chat:
    """One session's memory and prompts: a fixed prefix, then a block that is new in each turn."""

    def __init__(self, case: Case, number: int) -> None:
        self.name = f"chat-{number}"
        self.prefix = [number * 100_000 + i for i in range(case.prefix * BLOCK)]
        self._turn = number * 1_000_000
        layers = [
            tuple(torch.rand(heads, (case.prefix + 1) * BLOCK, dim).half() for heads, dim in shapes)
            for shapes in (
                [t.shape for t in layer.tensors] for layer in case.layout.groups[0].layers
            )
        ]
        self.view = tierkv.views.dense([(k, v) for k, v in layers])

    def prompt(self) -> list[int]:
        """Token ids of the next turn, the new block included."""
        self._turn += 1
        return [*self.prefix, *([self._turn] * BLOCK)]


class OnEngine(OnLoop):
    """32 tasks on an engine."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chats = [Chat(case, number) for number in range(SESSIONS)]
        super().__init__()

    async def _open(self) -> None:
        tiers = [tierkv.Tier("host", CAPACITY)]
        self._engine = await self.stack.enter_async_context(
            tierkv.open(tiers=tiers, space=self.case.space)
        )
        for chat in self.chats:
            async with self._engine.session(chat.name) as session:
                await session.store(chat.prefix, chat.view)

    def round(self) -> None:
        """All sessions take their turns."""
        self.run(self._round())

    async def _round(self) -> None:
        async with anyio.create_task_group() as group:
            for chat in self.chats:
                group.start_soon(self._turns, chat)

    async def _turns(self, chat: Chat) -> None:
        for _ in range(self.case.turns):
            async with self._engine.session(chat.name) as session:
                ids = chat.prompt()
                async with session.match(ids) as match:
                    loaded = await match.load(chat.view)
                stored = await session.store(ids, chat.view, start=loaded.tokens)
            assert (loaded.tokens, stored.stored) == (len(chat.prefix), 1)


class OnManager:
    """32 threads on a manager; they live as long as it does."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chats = [Chat(case, number) for number in range(SESSIONS)]
        self._manager = CacheManager(tiers=[tierkv.Tier("host", CAPACITY)], space=case.space)
        self._begin = threading.Barrier(SESSIONS + 1)
        self._end = threading.Barrier(SESSIONS + 1)
        self._over = False
        self._threads = [threading.Thread(target=self._work, args=(c,)) for c in self.chats]

    def __enter__(self) -> Self:
        self._manager.open()
        for chat in self.chats:
            self._manager.create_session(chat.name)
            self._manager.store(chat.prefix, chat.view, session=chat.name)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        if not self._begin.broken:
            self._begin.wait()
        for thread in self._threads:
            thread.join()
        self._manager.close()

    def round(self) -> None:
        """All sessions take their turns."""
        self._begin.wait()
        self._end.wait()

    def _work(self, chat: Chat) -> None:
        try:
            while True:
                self._begin.wait()
                if self._over:
                    return
                with self._manager.use_session(chat.name):
                    for _ in range(self.case.turns):
                        self._turn(chat)
                self._end.wait()
        except BaseException:
            self._begin.abort()  # a benchmark that failed must not wait for its other threads
            self._end.abort()
            raise

    def _turn(self, chat: Chat) -> None:
        ids = chat.prompt()
        loaded = self._manager.load(ids, chat.view)
        stored = self._manager.store(ids, chat.view, start=loaded.tokens)
        assert (loaded.tokens, stored.stored) == (len(chat.prefix), 1)


def measure(case: Case, repeats: int) -> dict[str, Cell]:
    """One row; times are per turn."""
    with OnEngine(case) as engine, OnManager(case) as manager:
        done = paired(engine.round, manager.round, repeats)
    turns = SESSIONS * case.turns
    return {
        "turn": case.name,
        "engine_us": done.a.median / turns * 1e6,
        "manager_us": done.b.median / turns * 1e6,
        "ratio": done.ratio.median,
        "ratio_q1": done.ratio.low,
        "ratio_q3": done.ratio.high,
        "engine_cpu_us": done.cpu_a.median / turns * 1e6,
        "manager_cpu_us": done.cpu_b.median / turns * 1e6,
        "ok": done.ratio.median >= LIMIT,
    }


ABOUT: Final = About(
    measures="throughput of 32 threads on a CacheManager, the synchronous face",
    against="32 tasks on an engine doing the same turns, in turns",
    floors=f"{LIMIT} of the engine's throughput; exit status 1 below",
    takes="half a minute of CPU; less with --repeats 5",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a limit is missed."""
    parser = arguments("sync", __doc__, ABOUT)
    parser.add_argument("--repeats", type=int, default=21, help="pairs of rounds per row")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(case, args.repeats) for case in CASES]
    emit("sync", rows, args.json)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
