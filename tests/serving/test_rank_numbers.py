"""Page numbers that count per group, as those of TensorRT-LLM's layer groups do."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import GUARD, RankRig, prompt, start_save
from tests.serving.test_rank_races import Slow
from tierkv_adapters.serving.orders import LoadOrder, RequestFacts, StepOrders
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

pytestmark = pytest.mark.usefixtures("no_thread_leaks")

IDS = prompt(48)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Copies that wait."""
    found = Slow(monkeypatch)
    yield found
    found.go.set()


def _taken(group: int, pages: list[int]) -> StepOrders:
    lists = [array("q"), array("q")]
    lists[group].extend(page for page in pages if page >= 0)
    return StepOrders(taken=(lists[0], lists[1]))


@pytest.mark.parametrize(("numbered", "tokens"), [("apart", 48), ("together", 0)])
def test_a_load_goes_on_while_another_group_gets_pages_of_its_numbers(
    numbered: Literal["together", "apart"], tokens: int, slow: Slow
) -> None:
    """A load given up cannot be told to TensorRT-LLM: its request would wait for ever."""
    with RankRig("sliding", numbered=numbered, settings=RankSettings(fence_patience=0.1)) as rig:
        slow.go.set()
        rig.save("a", IDS)
        slow.go.clear()
        slow.entered.clear()
        pages = rig.take(48, window=True)
        orders = rig.step(
            fresh=[RequestFacts("b")],
            grown=[rig.grown("b", IDS, pages)],
            loads=[LoadOrder("b", 0, 48)],
        )
        rig.rank.begin(orders)
        rig.rank.start_loads()
        assert slow.entered.wait(GUARD)
        if numbered == "together":
            slow.go.set()
        rig.rank.begin(_taken(0, pages[1]))
        slow.go.set()
        ended = rig.until(("b", "load"))["b", "load"]
        if numbered == "apart":
            assert ended.reason is None
            assert rig.right(IDS, pages, 48)
            assert rig.rank.counters.fence_waits == 0
        else:
            assert ended.tokens in (tokens, 48)
            assert rig.rank.counters.fence_waits == 1


@pytest.mark.parametrize("numbered", ["apart", "together"])
def test_a_waiting_save_keeps_pages_that_another_group_got(
    numbered: Literal["together", "apart"], slow: Slow
) -> None:
    with RankRig("sliding", numbered=numbered) as rig:
        start_save(rig, "a", prompt(48, 1))
        assert slow.entered.wait(GUARD)
        pages = start_save(rig, "b", IDS)
        rig.rank.begin(_taken(0, pages[1]))  # the numbers of the other group's pages
        slow.go.set()
        ended = rig.until(("a", "save"), ("b", "save"))["b", "save"]
        assert ended.tokens == (48 if numbered == "apart" else 0)


@pytest.mark.parametrize("numbered", ["apart", "together"])
def test_a_window_s_page_stays_its_request_s_though_another_group_got_its_number(
    numbered: Literal["together", "apart"],
) -> None:
    with RankRig("sliding", numbered=numbered) as rig:
        pages = start_save(rig, "a", IDS)
        assert rig.until(("a", "save"))["a", "save"].tokens == 48
        rig.rank.begin(_taken(1, pages[0]))
        book = rig.rank._requests
        request = book.get("a")
        assert request is not None
        kept = request.cut(0, 48, book._taken, writing=False)[0]
        assert list(kept) == (pages[0] if numbered == "apart" else [-1] * len(pages[0]))
