"""Loads and saves that were announced: each is reported once, and never what is not in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.trtllm.running import Made, configure
from tierkv.errors import LayoutError
from tierkv.testing.trtllm import Mode, Prompt, Replay
from tierkv.testing.trtllm.requests import Phase, Request
from tierkv_adapters.serving.jobs import Ended
from tierkv_adapters.serving.orders import LoadOrder, StepOrders
from tierkv_adapters.trtllm.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = list(range(100, 141))


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
    transfers.ended([ended(1, 8)])
    assert transfers.finished(nothing) == ([], [])  # the runtime has not announced it yet
    transfers.announced([], [1])
    assert transfers.finished(nothing) == ([], [1])
    assert transfers.finished(nothing) == ([], [])


def test_a_load_that_nobody_ordered_is_never_reported(transfers: Transfers) -> None:
    transfers.announced([], [1])
    assert transfers.finished(nothing) == ([], [])


def test_a_short_load_is_tried_again_from_where_it_ended(transfers: Transfers) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1])
    (again,) = transfers.ended([ended(1, 8)])
    assert (again.id, again.start, again.stop) == ("1", 8, 16)
    assert transfers.finished(nothing) == ([], [])
    transfers.ended([ended(1, 16)])
    assert transfers.finished(nothing) == ([], [1])
    assert transfers.counters.loads_retried == 1


def test_a_load_that_cannot_be_completed_waits_until_it_is_given_up(
    transfers: Transfers, said: list[str]
) -> None:
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1])
    while transfers.ended([ended(1, 8)]):
        pass
    assert transfers.finished(nothing) == ([], [])
    assert transfers.stuck() == [1]
    assert len(said) == 1
    assert "request 1" in said[0]
    transfers.ordered(StepOrders(ended=["1"]), [])
    assert transfers.finished(nothing) == ([], [1])
    assert transfers.stuck() == []


def test_saves_wait_for_copies_of_both_kinds(transfers: Transfers) -> None:
    busy = {2}
    transfers.ordered(load(3, 8), [])
    transfers.announced([1, 2, 3], [3])
    assert transfers.finished(busy.__contains__) == ([1], [])
    busy.clear()
    assert transfers.finished(busy.__contains__) == ([2], [])
    transfers.ordered(StepOrders(ended=["3"]), [])
    transfers.ended([ended(3, 0)])
    assert transfers.finished(busy.__contains__) == ([3], [3])


def test_a_load_that_the_runtime_takes_back_is_reported_all_the_same(transfers: Transfers) -> None:
    transfers.ordered(StepOrders(), [1])
    transfers.announced([], [1])
    assert transfers.finished(nothing) == ([], [1])


def test_of_two_loads_of_a_request_the_last_one_counts(transfers: Transfers) -> None:
    transfers.ordered(load(1, 8), [])
    transfers.ordered(load(1, 16), [])
    transfers.announced([], [1])
    transfers.ended([ended(1, 8)])
    assert transfers.finished(nothing) == ([], [])
    transfers.ended([ended(1, 16)])
    assert transfers.finished(nothing) == ([], [1])


# ---------------------------------------------------------------------- with an engine


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    made.close()


def _damage(made: Made) -> None:
    """Flip every bit of rank 0's memory tier."""
    manager = made.workers[0].manager
    assert manager is not None

    async def flip() -> None:
        memory = manager.engine.core.levels[0].backend.whole  # type: ignore[attr-defined]
        for at in range(0, len(memory), 4096):
            page = memory[at : at + 4096]
            page[:] = bytes(255 - byte for byte in page)

    manager.call(flip)


def _parked(replay: Replay, prompt: Prompt) -> Request:
    request = replay.submit(prompt)
    while request.phase is Phase.WAITING:
        replay.step()
    assert request.phase is Phase.LOADING
    return request


def test_damage_after_the_hold_is_answered_from_another_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    configure(tmp_path, monkeypatch, disk=True, host="1MiB")
    with made.replay(Mode()) as replay:
        first = replay.run(Prompt(LONG, 8))
        replay.settle()
        manager = made.workers[0].manager
        assert manager is not None
        manager.flush()
        _damage(made)
        again = replay.run(Prompt(first.tokens, 2))

        assert again.offered == 48
        assert made.workers[0].stats()["loads_stuck"] == 0


@pytest.mark.parametrize("api", ["first", "second"])
def test_damage_that_nothing_can_mend_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made, api: str
) -> None:
    configure(tmp_path, monkeypatch, host="1MiB")
    with made.replay(Mode(api=api)) as replay:  # type: ignore[arg-type]
        replay.run(Prompt(LONG, 8))
        replay.settle()
        _damage(made)
        request = _parked(replay, Prompt(LONG, 2))
        worker = made.workers[0]
        while not worker.stats()["loads_stuck"]:
            replay.step()
        for _ in range(20):
            replay.step()
        assert request.phase is Phase.LOADING  # and no later layer ever read those pages

        other = replay.run(Prompt(list(range(5, 30)), 3))  # the engine goes on
        assert other.phase in (Phase.DONE, Phase.SAVING)
        assert worker.stats()["loads_retried"] == 3
        if api == "first":  # it ends a cancelled request at once, and waits for its pages
            replay.abort(request)
            replay.run(Prompt([1, 2, 3]))
            replay.finish([request])
            replay.settle()


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
