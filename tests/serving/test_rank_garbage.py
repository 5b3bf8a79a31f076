"""Orders of every kind of nonsense: each load is answered once, and the rank goes on."""

from __future__ import annotations

import os
import random
from array import array
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import GUARD, KINDS, PAGES, RankRig, prompt
from tierkv.blocks import Media
from tierkv_adapters.serving.orders import Grown, LoadOrder, RequestFacts, SaveOrder, StepOrders
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from pathlib import Path

SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))
_IDS = ("a", "b", "c")
_PLACES = (0, 0, 0, 8, 16, 24, 32, 40, 48, 48, 48, 4, 7, -8, 1 << 40)
_PAGES = (0, PAGES - 1, PAGES, -1, -2, 1 << 40)
_NAMES = (None, None, "s", "", "\0/../x", "a" * 300)


class _Nonsense:
    """Makes steps up, most of which are nearly right."""

    def __init__(self, seed: int, groups: int) -> None:
        self.chance = random.Random(seed)
        self.groups = groups
        self.ordered: Counter[str] = Counter()

    def step(self, *, first: bool) -> StepOrders:
        pick, happens = self.chance.choice, self._happens
        orders = StepOrders(reset=happens(0.03))
        if happens(0.08):
            orders.ended = [pick(_IDS)]
        if happens(0.2):
            orders.voided = [pick(_IDS)]
        orders.fresh = [self._facts(id) for id in _IDS if first or happens(0.1)]
        orders.grown = [self._grown(pick(_IDS)) for _ in range(pick((1, 2, 3)))]
        if happens(0.5):
            lists = [array("q", [self._page() for _ in range(5)]) for _ in range(self.groups)]
            orders.taken = tuple(lists[: pick((1, self.groups))])
        for _ in range(pick((0, 1, 2))):
            order = LoadOrder(pick(_IDS), pick(_PLACES), pick(_PLACES), pick((None, 5.0, 0.0, -1)))
            orders.loads.append(order)
            self.ordered[order.id] += 1
        orders.saves = [SaveOrder(pick(_IDS), pick(_PLACES), pick(_PLACES)) for _ in range(2)]
        return orders

    def _happens(self, share: float) -> bool:
        return self.chance.random() < share

    def _page(self) -> int:
        return self.chance.choice(_PAGES) if self.chance.random() < 0.02 else self._any()

    def _any(self) -> int:
        return self.chance.randrange(PAGES)

    def _facts(self, id: str) -> RequestFacts:
        pick = self.chance.choice
        media = pick(((), (Media(1 << 40, b"z"),), (Media(3, b"x"),)))
        salt, ttl = pick((b"", b"s")), pick((None, None, -1.0, 0.0))
        return RequestFacts(id, pick(_NAMES), pick(("", "t")), ttl, salt, media=media)

    def _grown(self, id: str) -> Grown:
        pick = self.chance.choice
        tokens = array("I", prompt(pick((0, 8, 48, 48, 5)), pick((0, 1))))
        count = pick((self.groups,) * 6 + (0, self.groups + 1))
        pages = [[self._page() for _ in range(pick((0, 12, 12, 12)))] for _ in range(count)]
        return Grown(id, tokens, tuple(array("q", each) for each in pages), pick((False, True)))


def _told(rig: RankRig) -> Counter[str]:
    return Counter(ended.id for ended in rig.rank.poll() if ended.kind == "load")


def _run(seed: int, kind: str, tiers: str, path: Path) -> None:
    with RankRig(kind, tiers=tiers, path=path, settings=RankSettings(fence_patience=0.05)) as rig:
        nonsense, told = _Nonsense(seed, len(rig.pages.groups)), Counter[str]()
        for number in range(40):
            rig.rank.begin(nonsense.step(first=number == 0))
            rig.rank.start_loads()
            if nonsense.chance.random() < 0.3:
                rig.rank.wait_loads(_IDS)
            rig.rank.start_saves()
            told += _told(rig)
        assert rig.rank.drain(GUARD)
        assert told + _told(rig) == nonsense.ordered
        assert not rig.rank.busy()
        rig.rank.begin(rig.step(ended=list(_IDS)))
        rig.rank.begin(rig.step(reset=True))  # pages of nonsense were stored, too
        assert rig.save("d", prompt(48))[1].tokens == 48
        pages, ended = rig.load("e", prompt(48))
        assert ended.tokens == 48
        assert rig.right(prompt(48), pages, 48)
        assert rig.manager.stats().leases == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiers", ["host", "nvme"])
def test_nonsense_harms_nobody(
    kind: str, tiers: str, tmp_path: Path, no_thread_leaks: None
) -> None:
    _run(len(kind), kind, tiers, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_much_nonsense_harms_nobody(kind: str, tmp_path: Path, no_thread_leaks: None) -> None:
    for seed in range(max(2, int(100 * SCALE))):
        folder = tmp_path / str(seed)
        _run(seed, kind, ("host", "nvme", "host+nvme")[seed % 3], folder)
