"""The guide in :mod:`tierkv_adapters.serving` can be followed: an adapter made by it, in small.

``ToyAdapter`` is the adapter, its comments the steps of the guide; ``ToyEngine`` is the serving
engine that it is for, which knows nothing of tierkv but five calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from array import array
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from tierkv.blocks import AdapterId, Identity, Media
from tierkv.decisions.types import GroupRule
from tierkv.layout import GroupKind, Space
from tierkv.testing.adapters import AdapterTests, Answer, Ask, Served
from tierkv_adapters.remote import LocalFeed
from tierkv_adapters.serving.managers import open_manager
from tierkv_adapters.serving.negative import NegativeCache
from tierkv_adapters.serving.orders import RequestFacts
from tierkv_adapters.serving.pages import PagedLayer, PageGroup, PagePools, block_tokens_for, opaque
from tierkv_adapters.serving.planner import Planner
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.replicas import ReplicaIndex
from tierkv_adapters.serving.settings import ServingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv_adapters.serving.orders import StepOrders

PAGE = 4
PAGES = 96
GUARD_S = 60.0

pytestmark = pytest.mark.usefixtures("no_thread_leaks")


class ToyAdapter:
    """tierkv in the toy engine; each comment is a step of the guide."""

    def __init__(self, pool: torch.Tensor, settings: dict[str, object]) -> None:
        chosen = ServingSettings.parse(settings)  # 6. settings
        layers = (PagedLayer(0, {"page": opaque(pool, PAGE)}, "toy:hashes"),)  # 1. pages
        groups = (PageGroup(GroupKind.FULL, None, PAGE, layers),)
        pools, size = PagePools(groups), block_tokens_for(groups, chosen.block_tokens)
        layout = pools.layout(size)

        def space(adapter: AdapterId | None) -> Space:  # 2. identity
            loras = () if adapter is None else (adapter,)
            engine = (("engine", "toy"),)
            identity = Identity("toy", "rev1", shard=(0, 1), adapters=loras, extra=engine)
            return Space(identity, layout, size)

        self.manager = open_manager(chosen.config, None, 0, 1).manager
        self.rank = Rank(self.manager, pools, space)  # 3. the rank's side
        index = ReplicaIndex(1)
        self.planner = Planner(  # 4. the scheduler's side
            lambda adapter: [space(adapter)],
            [GroupRule(group.kind, group.window) for group in groups],
            index,
            NegativeCache(chosen.retry_after),
            chosen,
            page_tokens=[group.page_tokens for group in groups],
        )
        self.feed = LocalFeed(self.manager, index, 0)  # 5. the index
        assert self.feed.start(GUARD_S)

    def lookup(self, request: Request) -> int:
        """Tokens that are loaded if the request gets pages."""
        ask, name = request.ask, request.name
        salt = b"" if ask.salt is None else ask.salt.encode()
        lora = AdapterId(f"lora-{ask.adapter}", "v1") if ask.adapter else None
        media = (Media(4, hashlib.sha256(ask.media).digest()),) if ask.media else ()
        facts = RequestFacts(name, salt=salt, adapter=lora, media=media)
        self.planner.admit(facts, request.tokens)
        return self.planner.offer(name, 0, time.monotonic(), leave=1)

    def begin(self) -> StepOrders:
        """Before anything writes pages."""
        orders = self.planner.step()
        self.rank.begin(orders)
        return orders

    def ended(self) -> dict[str, int]:
        """Loads that are over, and how many leading tokens are in place."""
        done = {end.id: end for end in self.rank.poll() if end.kind == "load"}
        for name, end in done.items():
            if end.reason is None:
                self.planner.loaded(name)
            else:
                self.planner.failed(name, end.tokens, time.monotonic())
        return {name: end.tokens for name, end in done.items()}

    def settle(self) -> None:
        assert self.rank.drain(GUARD_S)
        self.manager.flush()
        self.manager.call(asyncio.sleep, 0.01)  # the index hears a turn of the loop later

    def close(self) -> None:
        assert self.rank.close()
        self.feed.close()
        self.manager.close()


@dataclass(eq=False)
class Request:
    """One request of the toy engine."""

    ask: Ask
    name: str
    tokens: array[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    loading: bool = False
    over: bool = False

    @property
    def made(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.ask.tokens) :])


class ToyEngine:
    """One scheduler, one worker. KV of a token is a hash of the KV before it."""

    def __init__(self, root: Path) -> None:
        host = {"kind": "host", "capacity": "4MiB"}
        disk = {"kind": "nvme", "capacity": "16MiB", "path": str(root / "kv")}
        root.mkdir(parents=True, exist_ok=True)
        self.pool = torch.zeros(PAGES, PAGE, 32, dtype=torch.uint8)
        self.adapter = ToyAdapter(
            self.pool, {"config": {"tiers": [host, disk]}, "block_tokens": PAGE}
        )
        self.free = list(range(PAGES))
        self.alive: list[Request] = []
        self.started = 0

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        requests = [self._submit(ask) for ask in asks]
        self._run(requests)
        return [Answer(request.made, request.reused) for request in requests]

    def expect(self, ask: Ask) -> None:
        """Loads come from any tier: there is nothing to prepare."""

    def give_up(self, ask: Ask, steps: int) -> None:
        request = self._submit(ask)
        for _ in range(steps):
            self._step()
        if request in self.alive and not request.over:
            self._finish(request)
        self._run([request])

    def settle(self) -> None:
        self.adapter.settle()

    def close(self) -> None:
        self.adapter.close()

    def _submit(self, ask: Ask) -> Request:
        self.started += 1
        request = Request(ask, f"r{self.started}", array("I", ask.tokens))
        self.alive.append(request)
        return request

    def _run(self, requests: Sequence[Request]) -> None:
        end = time.monotonic() + GUARD_S
        while any(request in self.alive for request in requests):
            assert time.monotonic() < end, "a request hangs"
            self._step()

    # ------------------------------------------------------------------ a step

    def _step(self) -> None:
        planner, batch = self.adapter.planner, []
        for request in self.alive:
            if not request.pages and not request.over:
                self._place(request)
            if request.loading or request.over:
                continue
            known = planner.known(request.name) or 0
            planner.advance(
                request.name,
                tokens=request.tokens[known:],
                pages=[()],
                computed=len(request.tokens),
            )
            batch.append(request)
        orders = self.adapter.begin()
        for pages in orders.taken:
            self.pool[list(pages)] = 0xEE  # what was there is nobody's any more
        self.adapter.rank.start_loads()
        for request in batch:
            self._forward(request)
        self.adapter.rank.start_saves()
        for name, tokens in self.adapter.ended().items():
            request = next(each for each in self.alive if each.name == name)
            request.loading, request.computed, request.reused = False, tokens, tokens
        for request in batch:
            if len(request.made) == request.ask.max_tokens:
                self._finish(request)
        for request in [each for each in self.alive if each.over and not each.loading]:
            self.alive.remove(request)
            self.free += request.pages

    def _place(self, request: Request) -> None:
        """Give a request all of its pages, and the load that it was offered."""
        count = self.adapter.lookup(request)
        needed = -(-(len(request.tokens) + request.ask.max_tokens) // PAGE)
        request.pages = [self.free.pop(0) for _ in range(needed)]
        request.loading = count > 0
        planner = self.adapter.planner
        if count:
            planner.accept(request.name, [request.pages], count)
        else:
            planner.advance(request.name, tokens=(), pages=[request.pages], computed=0)

    def _forward(self, request: Request) -> None:
        """Compute the KV of what is new, and the next token from the last KV."""
        ask = request.ask
        for at in range(request.computed, len(request.tokens)):
            last = self._kv(request, at - 1) if at else repr(ask.adapter).encode()
            seen = ask.media if 4 <= at < 8 else b""
            made = hashlib.sha256(last + bytes([request.tokens[at]]) + seen).digest()
            page = request.pages[at // PAGE]
            self.pool[page, at % PAGE] = torch.tensor(list(made), dtype=torch.uint8)
        request.computed = len(request.tokens)
        request.tokens.append(1 + self._kv(request, request.computed - 1)[0] % 255)

    def _kv(self, request: Request, at: int) -> bytes:
        return bytes(self.pool[request.pages[at // PAGE], at % PAGE].tolist())

    def _finish(self, request: Request) -> None:
        """A request is over; its pages are free once no load writes to them."""
        self.adapter.planner.finish(request.name)
        request.over = True


class TestTheGuide(AdapterTests):
    kv_files: ClassVar[tuple[str, ...]] = ("segment-*", "journal-*")

    def make(self, root: Path) -> Served:
        return ToyEngine(root)


def test_nothing_is_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an adapter writes is below the roots of its tiers, and nowhere else."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(elsewhere))
    with closing(ToyEngine(tmp_path / "root")) as engine:
        for _ in range(2):
            engine.answer([Ask(tuple(range(1, 30)))])
            engine.settle()
    assert list(elsewhere.rglob("*")) == []
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"kv"}
