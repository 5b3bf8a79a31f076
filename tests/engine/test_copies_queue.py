"""The queue of copies and the turns on a medium: bounded, in order, and fair by rank."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anyio
import pytest

from tierkv.blocks import BlockKey, part_id
from tierkv.decisions.types import Demote
from tierkv.mover.copies import Copy, CopyQueue
from tierkv.mover.turns import Turn
from tierkv.workers import Lane

pytestmark = pytest.mark.every_loop


def _copy(number: int, *, kind: str = "write", nbytes: int = 10, **more: Any) -> Copy:
    part = part_id(BlockKey(number.to_bytes(32, "little")), 0)
    copy = Copy(part, number + 1, nbytes, **{"source": 0, "target": 1, **more})
    copy.promotion = kind == "promotion"
    if kind == "demotion":
        copy.demote = Demote(part, copy.source, copy.target, number + 1, nbytes)
    return copy


def _take(queue: CopyQueue, target: int = 1, parts: int = 100, limit: int = 10**6) -> list[int]:
    batch = queue.take(target, parts, limit, lambda copy: copy.nbytes)
    return [copy.generation - 1 for copy in batch]


def test_the_most_urgent_kind_goes_first_and_order_is_kept() -> None:
    queue = CopyQueue(2, 1000)
    kinds = ("promotion", "write", "demotion") * 2
    for number, kind in enumerate(kinds):
        assert queue.offer(_copy(number, kind=kind))
    assert len(queue) == 6
    assert queue.nbytes == 60
    assert [_take(queue) for _ in range(4)] == [[2, 5], [1, 4], [0, 3], []]
    assert queue.nbytes == 0


def test_a_batch_has_one_source_and_two_limits() -> None:
    queue = CopyQueue(3, 10_000)
    for number in range(4):
        queue.put(_copy(number, source=0, target=2))
    queue.put(_copy(4, source=1, target=2))
    queue.put(_copy(5, source=0, target=2, nbytes=5000))
    assert _take(queue, 2, parts=2) == [0, 1]
    assert _take(queue, 2, limit=19) == [2]
    assert _take(queue, 2) == [3]
    assert _take(queue, 2) == [4]
    assert _take(queue, 2, limit=100) == [5], "the first one goes, whatever its size"
    assert _take(queue, 1) == []


def test_f059_the_tail_is_refused_and_promotions_give_way() -> None:
    queue = CopyQueue(2, 100)
    promotions = [_copy(n, kind="promotion") for n in range(5)]
    taken = [queue.offer(copy) for copy in promotions]
    assert taken == [True, True, False, False, False], "no more than a quarter of the queue"
    writes = [queue.offer(_copy(100 + n)) for n in range(12)]
    assert writes == [True] * 10 + [False] * 2
    assert queue.nbytes == 100
    assert [copy.settled for copy in promotions[:2]] == [True, True]
    assert queue.find(promotions[0].part, 1) is None
    assert not queue.offer(_copy(7, kind="promotion"))
    queue.put(_copy(50, kind="demotion"))  # what makes room cannot be refused for want of room
    assert queue.nbytes == 110
    assert _take(queue) == [50]


def test_the_oldest_is_told_of_what_must_be_written() -> None:
    queue = CopyQueue(3, 1000)
    assert queue.oldest() is None
    queue.put(_copy(0, kind="promotion", since=1.0))
    assert queue.oldest() is None
    queue.put(_copy(1, since=5.0))
    queue.put(_copy(2, since=6.0))
    queue.put(_copy(3, kind="demotion", since=7.0))
    queue.put(_copy(4, since=4.0, source=1, target=2))
    assert queue.oldest() == 4.0
    assert _take(queue, 2) == [4]
    assert queue.oldest() == 5.0


def test_the_books_agree_at_random() -> None:
    dice = random.Random(3)
    queue = CopyQueue(3, 300)
    under_way: list[Copy] = []
    for number in range(2000):
        copy = _copy(
            number,
            kind=dice.choice(("write", "demotion", "promotion")),
            nbytes=dice.randrange(1, 40),
            target=dice.choice((1, 2)),
        )
        if copy.demote is not None and queue.nbytes < 500:
            queue.put(copy)
        else:
            queue.offer(copy)
        if dice.random() < 0.3:
            target = dice.choice((1, 2))
            under_way += queue.take(target, dice.randrange(1, 9), 60, lambda c: c.nbytes)
        if under_way and dice.random() < 0.5:
            queue.settle(under_way)
            under_way = []
        waiting = queue.waiting()
        assert queue.nbytes == sum(c.nbytes for c in waiting)
        assert sum(c.nbytes for c in waiting if c.promotion) <= 75
        assert all(queue.find(c.part, c.target) is c for c in [*waiting, *under_way])
    queue.drop_promotions()
    assert not [c for c in queue.waiting() if c.promotion]


@pytest.mark.anyio
async def test_turns_go_to_the_most_urgent_and_survive_cancellation() -> None:
    turn, order = Turn(), []

    async def user(name: str, lane: Lane) -> None:
        async with turn.take(lane):
            order.append(name)
            await asyncio.sleep(0)

    async with anyio.create_task_group() as group, turn.take(Lane.BACKGROUND):
        for name, lane in (
            ("p1", Lane.PREFETCH),
            ("b1", Lane.BACKGROUND),
            ("p2", Lane.PREFETCH),
            ("b2", Lane.BACKGROUND),
            ("d", Lane.DEMAND),
        ):
            group.start_soon(user, name, lane)
        await asyncio.sleep(0.001)
        assert turn.waiting == 5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await user("never", Lane.BACKGROUND)
        assert turn.waiting == 5
    assert order == ["d", "b1", "b2", "p1", "p2"]
    assert turn.waiting == 0


@pytest.mark.anyio
async def test_a_turn_granted_to_the_cancelled_goes_to_the_next() -> None:
    turn = Turn()
    got = []

    async def user(name: str) -> None:
        async with turn.take(Lane.BACKGROUND):
            got.append(name)

    async with turn.take(Lane.BACKGROUND):
        first = asyncio.ensure_future(user("first"))  # noqa: TID251 - a waiter to cancel
        second = asyncio.ensure_future(user("second"))  # noqa: TID251 - a waiter to serve
        await asyncio.sleep(0)
        assert turn.waiting == 2
    first.cancel()  # in the very turn of the loop in which it was granted
    await second
    assert got == ["second"]
    assert first.cancelled()
    async with turn.take(Lane.PREFETCH):
        assert turn.waiting == 0
