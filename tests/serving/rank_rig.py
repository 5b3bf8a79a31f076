"""Page pools whose every byte tells which token prefix it belongs to, and a rank over them."""

from __future__ import annotations

import hashlib
import random
from array import array
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

import tierkv
from tierkv.abc import Move
from tierkv.blocking import CacheManager
from tierkv.layout import GroupKind, Space
from tierkv.registry import resolve
from tierkv.testing.faults import Fault, inject
from tierkv_adapters.serving.orders import Grown, LoadOrder, RequestFacts, SaveOrder, StepOrders
from tierkv_adapters.serving.pages import PagedLayer, PageGroup, PagePools, opaque
from tierkv_adapters.serving.rank import Ended, Rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tierkv.testing.accelerator import SimDevice
    from tierkv_adapters.serving.settings import RankSettings

PAGES = 128
GUARD = 60.0
"""Seconds after which a test that waits has failed: no measure of speed."""
KINDS = ("full", "opaque", "latent", "sliding", "state")


def groups_of(kind: str, page: int = 4) -> list[PageGroup]:
    """Page groups of a small model; every group has a pool of its own."""

    def pool(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(PAGES, heads, page, dim, dtype=dtype)

    def kv(index: int, heads: int = 2) -> PagedLayer:
        # K and V of a page beside each other, tokens before heads
        both = torch.zeros(PAGES, 2, page, heads, 8, dtype=torch.bfloat16).permute(0, 1, 3, 2, 4)
        return PagedLayer(index, {"k": both[:, 0], "v": both[:, 1]})

    def bytes_of(index: int) -> PagedLayer:
        plain = torch.zeros(PAGES, page, 3, 8, dtype=torch.float32).transpose(1, 2)
        return PagedLayer(index, {"page": opaque(plain, page)}, "test:order")

    full = PageGroup(GroupKind.FULL, None, page, (kv(0), kv(2, 1)))
    if kind == "full":
        return [full]
    if kind == "opaque":
        return [PageGroup(GroupKind.FULL, None, page, (bytes_of(0), bytes_of(1)))]
    if kind == "latent":
        layer = PagedLayer(0, {"latent": pool(1, 24, torch.float16)})
        return [PageGroup(GroupKind.LATENT, None, page, (layer,))]
    if kind == "sliding":
        return [PageGroup(GroupKind.SLIDING, 10, page, (bytes_of(1), bytes_of(3))), full]
    state = PagedLayer(1, {"ssm": torch.zeros(PAGES, 3, 5, dtype=torch.float32)})
    return [full, PageGroup(GroupKind.STATE, None, page, (state,))]


@lru_cache(maxsize=100_000)
def pattern(seen: bytes, layer: int, name: str, nbytes: int) -> torch.Tensor:
    """What a layer holds of the token whose whole prefix has this digest."""
    seed = hashlib.blake2b(seen + bytes([layer]) + name.encode(), digest_size=8).digest()
    base = np.resize(np.frombuffer(seed, np.uint8), nbytes)
    return torch.from_numpy(base ^ np.arange(nbytes, dtype=np.uint64).astype(np.uint8))


@lru_cache(maxsize=100_000)
def _longer(seen: bytes, token: int) -> bytes:
    return hashlib.blake2b(seen + token.to_bytes(4, "little"), digest_size=8).digest()


def digests(tokens: Sequence[int]) -> list[bytes]:
    """A digest of every prefix of the tokens, from the one of one token on."""
    return list(accumulate(tokens, _longer, initial=b""))[1:]


class Pages:
    """The pools, and a forward pass that fills them."""

    def __init__(
        self,
        groups: Sequence[PageGroup],
        device: SimDevice | None = None,
        numbered: Literal["together", "apart"] = "together",
    ) -> None:
        self.groups = list(groups)
        self.pools = PagePools(groups, numbered=numbered)
        self.device = device

    def _tensors(self) -> Iterator[tuple[int, PageGroup, int, str, torch.Tensor]]:
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                for name, tensor in layer.tensors.items():
                    yield number, group, layer.index, name, tensor

    def due(
        self, tokens: Sequence[int], pages: Sequence[Sequence[int]], start: int, stop: int
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(token, the slot of the pool, what it should hold) for every slot of these tokens."""
        seen = digests(tokens[:stop])
        for number, group, layer, name, tensor in self._tensors():
            size = group.page_tokens
            for at in range(start, stop):
                page = pages[number][at // size]
                if page < 0 or (not group.per_token and (at + 1) % size):
                    continue
                slot = tensor[page][:, at % size] if group.per_token else tensor[page]
                raw = pattern(seen[at], layer, name, slot.numel() * slot.element_size())
                yield at, slot, raw.view(slot.dtype).view(slot.shape)

    def compute(
        self, tokens: Sequence[int], pages: Sequence[Sequence[int]], start: int, stop: int
    ) -> None:
        """Fill the pages as a forward pass over tokens ``[start, stop)`` does."""
        moves = [Move(slot, value) for _, slot, value in self.due(tokens, pages, start, stop)]
        if self.device is not None:
            self.device.copy(moves, self.device.compute)
            return
        for slot, value in moves:
            slot.copy_(value)

    def wrong(
        self, tokens: Sequence[int], pages: Sequence[Sequence[int]], start: int, stop: int
    ) -> list[int]:
        """Tokens of ``[start, stop)`` of which a slot does not hold what it should."""
        if self.device is not None:
            self.device.compute.record().synchronize()
        bad = set()
        for at, slot, value in self.due(tokens, pages, start, stop):
            if not torch.equal(
                slot.contiguous().view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
            ):
                bad.add(at)
        return sorted(bad)

    def needed(self, stop: int, number: int) -> int:
        """First token of which a group needs memory, for what follows ``stop`` tokens."""
        group = self.groups[number]
        if not group.per_token:
            return max(0, stop - 1)
        return 0 if group.window is None else max(0, stop - group.window + 1)

    def spoil(self, pages: Sequence[int]) -> None:
        """What somebody else writes into pages."""
        for _, _, _, _, tensor in self._tensors():
            for page in pages:
                tensor[page].view(torch.uint8).fill_(0xDD)

    def spoilt(self, pages: Sequence[int]) -> bool:
        """Whether they hold that, and nothing else."""
        return all(
            bool((tensor[page].view(torch.uint8) == 0xDD).all())
            for _, _, _, _, tensor in self._tensors()
            for page in pages
        )


class RankRig:
    """A rank, its engine, its pools, and a free list for them."""

    def __init__(
        self,
        kind: str = "full",
        *,
        page: int = 4,
        block: int = 8,
        path: Path | None = None,
        tiers: str = "host",
        faults: Mapping[str, Sequence[Fault]] | None = None,
        device: SimDevice | None = None,
        settings: RankSettings | None = None,
        rank: type[Rank] = Rank,
        numbered: Literal["together", "apart"] = "together",
        capacity: int | str = "8MiB",
        **config: Any,
    ) -> None:
        self.pages = Pages(groups_of(kind, page), device, numbered)
        layout = self.pages.pools.layout(block)
        self.space = Space(tierkv.Identity("m", "rev1"), layout, block)
        self.block = block
        specs = [
            tierkv.Tier(k, capacity, path=str(path)) if k == "nvme" else tierkv.Tier(k, capacity)
            for k in tiers.split("+")
        ]
        backends = [
            inject(resolve("backends", spec.kind)(spec), *(faults or {}).get(spec.name, ()))
            for spec in specs
        ]
        self.manager = CacheManager(tiers=specs, backends=backends, **config)
        self.manager.open()
        if device is not None:
            self.manager.call(self._add, device)
        self.rank = rank(self.manager, self.pages.pools, self._space, settings=settings)
        share = PAGES // len(self.pages.groups)
        self.free = {
            n: list(range(n * share, (n + 1) * share)) for n in range(len(self.pages.groups))
        }
        self.ids = 0

    async def _add(self, device: SimDevice) -> None:
        self.manager.engine.core.devices.add(device)

    def _space(self, adapter: object) -> Space:
        return self.space

    def __enter__(self) -> RankRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.rank.close()
        self.manager.close()
        if self.pages.device is not None:
            self.pages.device.close()

    # ------------------------------------------------------------------ pages

    def take(self, tokens: int, *, window: bool = False) -> list[list[int]]:
        """Fresh pages for a request; ``window``: none for what lies before the windows.

        Every group has page numbers of its own, so that one number is one owner's.
        """
        out = []
        for number, group in enumerate(self.pages.groups):
            count = -(-tokens // group.page_tokens)
            first = self.pages.needed(tokens, number) // group.page_tokens if window else 0
            own = [self.free[number].pop(0) for _ in range(first, count)]
            out.append([-1] * first + own)
        return out

    # ------------------------------------------------------------------ steps

    def step(self, *, taken: Sequence[int] = (), **orders: Any) -> StepOrders:
        """Orders of one step; pages taken of any group, as no number is in two of them."""
        each = (array("q", taken),) * len(self.pages.groups)
        return StepOrders(taken=each if taken else (), **orders)

    def grown(
        self, name: str, tokens: Sequence[int], pages: Sequence[Sequence[int]], **more: Any
    ) -> Grown:
        """Tokens and pages of a request."""
        return Grown(name, array("I", tokens), tuple(array("q", p) for p in pages), **more)

    def until(self, *wanted: tuple[str, str]) -> dict[tuple[str, str], Ended]:
        """Poll until these (request, kind) have ended."""
        found: dict[tuple[str, str], Ended] = {}
        for _ in range(int(GUARD / 0.002)):
            for ended in self.rank.poll():
                assert (ended.id, ended.kind) not in found, "told twice"
                found[ended.id, ended.kind] = ended
            if all(each in found for each in wanted):
                return found
            self.rank.drain(0.002)
        raise AssertionError(f"{wanted} did not end: {found}")

    def save(
        self, name: str, tokens: Sequence[int], facts: RequestFacts | None = None
    ) -> tuple[list[list[int]], Ended]:
        """A request that computes its prompt and stores it; it goes on living."""
        pages = self.take(len(tokens))
        stop = len(tokens) // self.block * self.block
        orders = self.step(
            fresh=[facts or RequestFacts(name)],
            grown=[self.grown(name, tokens, pages)],
            taken=[p for each in pages for p in each],
            saves=[SaveOrder(name, 0, stop)],
        )
        self.rank.begin(orders)
        self.rank.start_loads()
        self.pages.compute(tokens, pages, 0, len(tokens))
        self.rank.start_saves()
        return pages, self.until((name, "save"))[name, "save"]

    def load(
        self,
        name: str,
        tokens: Sequence[int],
        stop: int | None = None,
        *,
        start: int = 0,
        deadline: float | None = None,
        facts: RequestFacts | None = None,
    ) -> tuple[list[list[int]], Ended]:
        """A request whose prompt is brought in."""
        stop = len(tokens) // self.block * self.block if stop is None else stop
        pages = self.begin_load(name, tokens, stop, start=start, deadline=deadline, facts=facts)
        return pages, self.until((name, "load"))[name, "load"]

    def begin_load(
        self,
        name: str,
        tokens: Sequence[int],
        stop: int,
        *,
        start: int = 0,
        deadline: float | None = None,
        facts: RequestFacts | None = None,
    ) -> list[list[int]]:
        """The same, without waiting for it."""
        pages = self.take(stop, window=True)
        orders = self.step(
            fresh=[facts or RequestFacts(name)],
            grown=[self.grown(name, tokens, pages)],
            taken=[p for each in pages for p in each if p >= 0],
            loads=[LoadOrder(name, start, stop, deadline)],
        )
        self.rank.begin(orders)
        if start:
            self.pages.compute(tokens, pages, 0, start)
        self.rank.start_loads()
        return pages

    def right(self, tokens: Sequence[int], pages: Sequence[Sequence[int]], stop: int) -> bool:
        """Whether the pages hold what a request needs that goes on after ``stop`` tokens."""
        for number in range(len(self.pages.groups)):
            only = [p if n == number else [-1] * len(p) for n, p in enumerate(pages)]
            if self.pages.wrong(tokens, only, self.pages.needed(stop, number), stop):
                return False
        return True

    def flush(self) -> None:
        """Let the copies to slower tiers end."""
        self.manager.flush()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids."""
    return [random.Random(seed * 1_000_003 + i).randrange(50_000) for i in range(length)]


def start_save(rig: RankRig, name: str, ids: Sequence[int]) -> list[list[int]]:
    """A request that computes its prompt and stores it, which is not waited for."""
    pages = rig.take(len(ids))
    rig.rank.begin(
        rig.step(
            fresh=[RequestFacts(name)],
            grown=[rig.grown(name, ids, pages)],
            saves=[SaveOrder(name, 0, len(ids))],
        )
    )
    rig.pages.compute(ids, pages, 0, len(ids))
    rig.rank.start_saves()
    return pages
