"""A serving engine under pressure over tiers that fail: pages hold what they should, or are told.

A small engine of its own admits, computes, preempts, resumes and aborts requests at random, gives
freed pages to others at once and spoils them. Every page says which token prefix it is of.
"""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import GUARD, KINDS, RankRig, prompt
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.faults import Corrupting, Failing
from tierkv_adapters.serving.orders import LoadOrder, RequestFacts, SaveOrder, StepOrders
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv_adapters.serving.rank import Ended

SCALE = float(os.environ.get("TIERKV_SCALE", "1"))
_CHUNK = 16
_LONGEST = 56


class FlakyCalls(Failing):
    """One call in ten fails."""

    def __init__(self, seed: int) -> None:
        super().__init__("read", "write")
        self._random = random.Random(seed)

    def due(self, operation: str) -> bool:
        """Whether this one does."""
        return self._random.random() < 0.1 and super().due(operation)


class FlakyBytes(Corrupting):
    """One read in ten is damaged somewhere in its payload."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def due(self, operation: str) -> bool:
        """Whether this one is."""
        self.where = 0.5 + self._random.random() / 16
        return self._random.random() < 0.1 and super().due(operation)


def _said(beginning: int, rest: int) -> list[int]:
    return [*prompt(16, beginning), *prompt(_LONGEST - 16, rest)]


@dataclass
class _Request:
    name: str
    ids: list[int]
    told: int = 0  # token ids that the rank has heard of
    pages: list[list[int]] = field(default_factory=list)
    computed: int = 0
    saved: int = 0
    goal: int = 0  # up to where a load under way goes; 0: none is
    gone: bool = False


class _Engine:
    """Schedules, computes and checks; see the module."""

    def __init__(self, rig: RankRig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.requests: dict[str, _Request] = {}
        self.waiting: list[_Request] = []
        self.orders = StepOrders()
        self.taken: list[int] = []
        self.loads = self.told = self.count = self.loaded = 0

    # ------------------------------------------------------------------ pages

    def _missing(self, request: _Request, tokens: int) -> list[int]:
        held = request.pages or [[] for _ in self.rig.pages.groups]
        sizes = [group.page_tokens for group in self.rig.pages.groups]
        return [max(0, -(-tokens // s) - len(h)) for s, h in zip(sizes, held, strict=True)]

    def _free(self, request: _Request) -> None:
        for number, pages in enumerate(request.pages):
            self.rig.free[number] = [*(p for p in pages if p >= 0), *self.rig.free[number]]
        request.pages = []

    def _grow(self, request: _Request, tokens: int, *, window: bool = False) -> bool:
        """Give a request pages up to ``tokens``, new ones altogether if it has none."""
        fresh, missing = not request.pages, self._missing(request, tokens)
        if any(count > len(self.rig.free[n]) for n, count in enumerate(missing)):
            return False
        if fresh:
            request.pages = self.rig.take(tokens, window=window)
            new = [list(each) for each in request.pages]
        else:
            new = [[self.rig.free[n].pop(0) for _ in range(c)] for n, c in enumerate(missing)]
            for pages, more in zip(request.pages, new, strict=True):
                pages += more
        self.taken += [page for pages in new for page in pages if page >= 0]
        known = request.ids[request.told : tokens]
        request.told = max(request.told, tokens)
        self.orders.grown.append(self.rig.grown(request.name, known, new, replace=fresh))
        return True

    def _slide(self, request: _Request) -> None:
        """Take pages that left a window away, and tell nobody."""
        for number, group in enumerate(self.rig.pages.groups):
            if group.window is None:
                continue
            first = self.rig.pages.needed(request.computed, number) // group.page_tokens
            for at in range(min(first, len(request.pages[number]))):
                if request.pages[number][at] >= 0:
                    self.rig.free[number].insert(0, request.pages[number][at])
                    request.pages[number][at] = -1

    # ------------------------------------------------------------------ requests

    def _admit(self) -> None:
        self.count += 1
        length = self.random.randrange(8, _LONGEST)
        ids = _said(self.random.randrange(2), self.random.randrange(4))
        request = _Request(f"r{self.count}", ids[:length])
        session = f"chat{self.random.randrange(3)}" if self.random.random() < 0.3 else None
        self.orders.fresh.append(RequestFacts(request.name, session=session))
        self.requests[request.name] = request
        self.waiting.append(request)

    def _start(self, request: _Request) -> None:
        """Give a waiting request its pages: it is loaded, or computed."""
        whole = len(request.ids) // self.rig.block * self.rig.block
        if whole and self.random.random() < 0.7:
            if self._grow(request, whole, window=True):
                request.goal = whole
                deadline = self.random.choice([None, 5.0])
                self.orders.loads.append(LoadOrder(request.name, 0, whole, deadline))
                self.loads += 1
                self.waiting.remove(request)
        elif self._grow(request, len(request.ids)):
            self.waiting.remove(request)

    def _preempt(self, request: _Request) -> None:
        self.orders.voided.append(request.name)
        self._free(request)
        request.computed = 0
        self.waiting.append(request)

    def _end(self, request: _Request) -> None:
        self.orders.ended.append(request.name)
        request.gone = True
        if request in self.waiting:
            self.waiting.remove(request)
        if not request.goal:  # else its pages are its own until its load was told
            self._free(request)
            del self.requests[request.name]

    def _running(self) -> list[_Request]:
        return [r for r in self.requests.values() if r.pages and not r.goal and not r.gone]

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        """Decide, let the rank have its orders, compute, and hear what ended."""
        self.orders, self.taken = StepOrders(), []
        for request in list(self.requests.values()):
            if not request.gone and self.random.random() < 0.05:
                self._end(request)
        for request in self._running():
            if self.random.random() < 0.08:
                self._preempt(request)
        if len(self.requests) < 8 and self.random.random() < 0.6:
            self._admit()
        for request in list(self.waiting):
            if self.random.random() < 0.5:
                self._start(request)
        chunks = self._plan()
        self.orders.taken = (array("q", self.taken),)
        rank = self.rig.rank
        rank.begin(self.orders)
        self.rig.pages.spoil(self.taken)
        rank.start_loads()
        if self.random.random() < 0.3:  # some engines wait; and else steps are too fast for loads
            rank.wait_loads(request.name for request in self.requests.values() if request.goal)
        for request, stop in chunks:
            self.rig.pages.compute(request.ids, request.pages, request.computed, stop)
            request.computed = stop
        rank.start_saves()
        running = self._running()
        for request in running:
            self._slide(request)
        if running:  # nothing wrote into pages that are somebody's
            one = self.random.choice(running)
            assert self.rig.right(one.ids, one.pages, one.computed)
        self.hear(rank.poll())

    def _plan(self) -> list[tuple[_Request, int]]:
        chunks = []
        for request in self._running():
            if any(request.name == grown.id and grown.replace for grown in self.orders.grown):
                request.saved = min(request.saved, request.computed)
            if request.computed == len(request.ids):  # decode
                request.ids.append(self.random.randrange(2))
                if len(request.ids) > _LONGEST:
                    self._end(request)
                    continue
            stop = min(len(request.ids), request.computed + _CHUNK)
            if not self._grow(request, stop):
                continue  # there are no pages for it now
            chunks.append((request, stop))
            start = max(request.saved, request.computed // self.rig.block * self.rig.block)
            whole = stop // self.rig.block * self.rig.block
            if start < whole:
                self.orders.saves.append(SaveOrder(request.name, start, whole))
                request.saved = whole
        return chunks

    def hear(self, ends: list[Ended]) -> None:
        """Take in what ended; check what was loaded."""
        for ended in ends:
            if ended.kind == "save":
                continue
            self.told += 1
            request = self.requests[ended.id]
            assert request.goal, "told twice"
            goal, request.goal = request.goal, 0
            assert 0 <= ended.tokens <= goal
            if request.gone:
                self._free(request)
                del self.requests[ended.id]
                continue
            if ended.tokens:
                assert self.rig.right(request.ids, request.pages, ended.tokens)
            self.loaded += ended.tokens
            if ended.tokens == goal:
                request.computed = request.saved = goal
            else:  # as after a preemption: other pages, computed anew
                self.orders = StepOrders()
                self._preempt(request)
                self.rig.rank.begin(self.orders)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiers", ["host", "nvme", "host+nvme"])
def test_storm(kind: str, tiers: str, tmp_path: Path, no_thread_leaks: None) -> None:
    _storm(kind, tiers, tmp_path, seed=len(kind) + len(tiers), steps=40)


@pytest.mark.parametrize("kind", KINDS)
def test_storm_on_a_device(kind: str, tmp_path: Path, no_thread_leaks: None) -> None:
    _storm(kind, "host+nvme", tmp_path, seed=len(kind), steps=20, device=True)


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_long_storm(kind: str, seed: int, tmp_path: Path, no_thread_leaks: None) -> None:
    tiers = ("host", "nvme", "host+nvme", "host+nvme")[seed]
    _storm(kind, tiers, tmp_path, seed=seed, steps=max(60, int(2000 * SCALE)), device=seed == 3)


def _storm(
    kind: str, tiers: str, path: Path, *, seed: int, steps: int, device: bool = False
) -> None:
    faults = [FlakyCalls(seed), FlakyBytes(seed)]
    with RankRig(
        kind,
        path=path,
        tiers=tiers,
        faults={"nvme": faults} if "nvme" in tiers else {"host": faults},
        device=SimDevice(f"sim:{seed}", delay=1e-4) if device else None,
        settings=RankSettings(fence_patience=GUARD, sessions=2),
    ) as rig:
        for fault in faults:
            fault.active = False
        for number in range(4):  # half of what will be said was said before
            for length in range(8, _LONGEST, 8):
                free = {group: list(pages) for group, pages in rig.free.items()}
                rig.save("before", _said(number % 2, number // 2)[:length])
                rig.rank.begin(rig.step(ended=["before"]))
                rig.free = free
        for fault in faults:
            fault.active = True
        engine = _Engine(rig, seed)
        rig.free = {number: pages[:40] for number, pages in rig.free.items()}  # too few for all
        for number in range(20 * steps):
            if number >= steps and engine.loaded:  # a short storm may meet nothing but faults
                break
            engine.step()
        orders = StepOrders(ended=list(engine.requests))
        for request in engine.requests.values():
            request.gone = True
        rig.rank.begin(orders)
        assert rig.rank.drain(GUARD)
        engine.hear(rig.rank.poll())
        assert engine.told == engine.loads
        assert engine.loaded > 0
        assert rig.rank.counters.errors == 0
        assert rig.manager.stats().leases == 0
        names = {info.id for info in rig.manager.call(rig.manager.asessions)}
        assert all(name.startswith("chat") for name in names)
