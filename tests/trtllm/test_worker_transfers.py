"""Loads and saves that were announced: each is reported once, and never what is not in place."""

from __future__ import annotations

import pytest

from tierkv.errors import LayoutError
from tierkv_adapters.serving.jobs import Ended
from tierkv_adapters.serving.orders import LoadOrder, StepOrders
from tierkv_adapters.trtllm.transfers import Transfers


def ended(number: int, tokens: int, kind: str = "load") -> Ended:
    return Ended(str(number), kind, 0, tokens, None, 0.1, 1)  # type: ignore[arg-type]


def load(number: int, stop: int) -> StepOrders:
    return StepOrders(loads=[LoadOrder(str(number), 0, stop)])


def nothing(_: int) -> bool:
    return False


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def transfers(said: list[str]) -> Transfers:
    return Transfers(said.append)


def test_a_load_is_reported_once_whichever_comes_first(transfers: Transfers) -> None:
    transfers.ordered(load(1, 8), [])
    transfers.ended([ended(1, 8)], 0.0)
    assert transfers.finished(nothing) == ([], [])  # the runtime has not announced it yet
    transfers.announced([], [1], 0.0)
    assert transfers.finished(nothing) == ([], [1])
    assert transfers.finished(nothing) == ([], [])


def test_a_load_that_nobody_ordered_is_never_reported(transfers: Transfers) -> None:
    transfers.announced([], [1], 0.0)
    assert transfers.finished(nothing) == ([], [])


def test_a_short_load_is_tried_again_from_where_it_ended(transfers: Transfers) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1], 0.0)
    (again,) = transfers.ended([ended(1, 8)], 0.0)
    assert (again.id, again.start, again.stop) == ("1", 8, 16)
    assert transfers.finished(nothing) == ([], [])
    transfers.ended([ended(1, 16)], 0.0)
    assert transfers.finished(nothing) == ([], [1])
    assert transfers.counters.loads_retried == 1


def _fall_short(transfers: Transfers, now: float, tokens: int = 8) -> None:
    """Let load 1 fall short in all of its tries."""
    while transfers.ended([ended(1, tokens)], now):
        pass


def test_a_load_that_cannot_be_completed_waits_until_it_is_given_up(
    transfers: Transfers, said: list[str]
) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1], 0.0)
    _fall_short(transfers, 0.0)
    assert transfers.finished(nothing) == ([], [])
    assert transfers.stuck() == [1]
    assert len(said) == 1
    assert "request 1" in said[0]
    transfers.ordered(StepOrders(ended=["1"]), [])
    assert transfers.finished(nothing) == ([], [1])
    assert transfers.stuck() == []
    assert transfers.lost(1e9, 0.0) is None


def test_a_load_that_fell_short_is_tried_again_from_time_to_time(
    transfers: Transfers, said: list[str]
) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1], 0.0)
    _fall_short(transfers, 0.0)
    assert transfers.ended([], 0.9) == []
    (again,) = transfers.ended([], 1.0)
    assert (again.start, again.stop) == (8, 16)
    assert transfers.ended([], 5.0) == []  # it is under way
    assert transfers.ended([ended(1, 8)], 5.0) == []
    assert len(transfers.ended([], 6.0)) == 1
    transfers.ended([ended(1, 16)], 6.1)
    assert transfers.finished(nothing) == ([], [1])
    counters = transfers.counters
    assert (counters.loads_stuck, counters.loads_mended, counters.loads_retried) == (1, 1, 5)
    assert len(said) == 1
    assert transfers.lost(1e9, 0.0) is None


@pytest.mark.parametrize("retried", [False, True])
def test_what_has_fallen_short_for_long_is_lost(transfers: Transfers, *, retried: bool) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1], 0.0)
    assert transfers.lost(100.0, 30.0) is None  # it is under way, as long as that takes
    _fall_short(transfers, 100.0)
    if retried:
        assert transfers.ended([], 129.0)
        assert transfers.lost(1e9, 30.0) is None  # a try is under way
        transfers.ended([ended(1, 8)], 129.5)  # it does not begin the wait anew
    assert transfers.lost(129.9, 30.0) is None
    found = transfers.lost(130.0, 30.0)
    assert found is not None
    assert found.startswith("tokens 8 to 16 of request 1 are lost")
    assert transfers.lost(1e9, None) is None
    transfers.ordered(load(1, 16), [])  # the runtime asked again: a new load
    assert transfers.lost(1e9, 30.0) is None


@pytest.mark.parametrize(
    ("reason", "advice"), [("damaged", "memory errors"), ("removed", "was reset"), ("failed", "")]
)
def test_what_is_lost_tells_what_to_look_for(
    transfers: Transfers, reason: str, advice: str
) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1], 0.0)
    while transfers.ended([ended(1, 8)._replace(reason=reason)], 0.0):
        pass
    found = transfers.lost(30.0, 30.0)
    assert found is not None
    assert advice in found
    assert found.endswith("another copy") == (not advice)


def test_an_announced_load_that_no_step_orders_is_lost_in_the_end(transfers: Transfers) -> None:
    transfers.announced([], [1, 2], 10.0)
    assert transfers.lost(39.0, 30.0) is None
    transfers.ordered(load(1, 16), [2])  # it was late; the other one is off
    assert transfers.lost(1e9, 30.0) is None
    transfers.announced([], [3], 50.0)
    found = transfers.lost(80.0, 30.0)
    assert found == "request 3 waits for a load that no step has ordered"


def test_saves_wait_for_copies_of_both_kinds(transfers: Transfers) -> None:
    busy = {2}
    transfers.ordered(load(3, 8), [])
    transfers.announced([1, 2, 3], [3], 0.0)
    assert transfers.finished(busy.__contains__) == ([1], [])
    busy.clear()
    assert transfers.finished(busy.__contains__) == ([2], [])
    transfers.ordered(StepOrders(ended=["3"]), [])
    transfers.ended([ended(3, 0)], 0.0)
    assert transfers.finished(busy.__contains__) == ([3], [3])


def test_a_load_that_the_runtime_takes_back_is_reported_all_the_same(transfers: Transfers) -> None:
    transfers.ordered(StepOrders(), [1])
    transfers.announced([], [1], 0.0)
    assert transfers.finished(nothing) == ([], [1])


def test_of_two_loads_of_a_request_the_last_one_counts(transfers: Transfers) -> None:
    transfers.ordered(load(1, 8), [])
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1], 0.0)
    transfers.ended([ended(1, 8)], 0.0)
    assert transfers.finished(nothing) == ([], [])
    transfers.ended([ended(1, 16)], 0.0)
    assert transfers.finished(nothing) == ([], [1])


def test_a_buffer_that_is_no_kv_of_tokens_is_refused() -> None:
    from types import SimpleNamespace as Of

    from tierkv_adapters.trtllm.pools import layout_groups

    def region(role: str, expansion: int = 1) -> Of:
        import torch

        buffer = Of(layer_id=3, role=role, expansion=expansion)
        return Of(buffers=(buffer,), as_tensor=lambda dtype: torch.zeros(4, 32, dtype=dtype))

    def layout(*regions: Of, number: int = 0) -> Of:
        group = Of(layer_group_id=number, window_size=None, regions=regions)
        return Of(tokens_per_block=4, groups=(group,))

    (good,) = layout_groups(layout(region("key"), region("value")))
    assert [layer.index for layer in good.layers] == [0, 1]
    for bad, match in (
        (layout(region("ssm_state")), "ssm_state"),
        (layout(region("key", 2)), "tokens_per_block"),
        (layout(), "no memory regions"),
        (layout(region("key"), number=1), "without gaps"),
    ):
        with pytest.raises(LayoutError, match=match):
            layout_groups(bad)
