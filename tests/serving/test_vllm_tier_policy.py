"""tierkv's policies over the chunks of vLLM's CPU tier."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.registry import names, resolve
from tierkv_adapters.vllm.tier.policy import OrderedChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPACITY = 12


@dataclass(eq=False)
class Status:
    """As vLLM's ``ChunkStatus``: -1 until it is filled, then how many read it."""

    ref_cnt: int = -1


def name(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8 + bytes(4)


def chunks(policy: str = "lru", capacity: int = CAPACITY, **options: Any) -> OrderedChunks:
    return OrderedChunks(
        resolve("policies", policy), capacity, by_request=options.get("by_request", True)
    )


def fill(book: OrderedChunks, keys: Sequence[bytes]) -> None:
    """Insert chunks as vLLM does: all from head to tail, and filled a little later."""
    made = [Status() for _ in keys]
    for key, status in zip(keys, made, strict=True):
        book.insert(key, status)
    for key, status in zip(keys, made, strict=True):
        status.ref_cnt = 0
        book.evictable(key)


def gone(book: OrderedChunks, count: int, protected: Sequence[bytes] = ()) -> list[bytes] | None:
    taken = book.evict(count, set(protected))
    return None if taken is None else [key for key, _ in taken]


A, B, C, D, E, F = (name(number) for number in range(6))


@pytest.mark.parametrize("policy", [n for n in names("policies") if n != "adaptive"])
def test_the_tail_of_a_request_goes_before_its_head(policy: str) -> None:
    book = chunks(policy)
    fill(book, [A, B, C])
    book.finished([A, B, C], reused=set())
    taken = gone(book, 2)
    assert taken is not None
    assert A not in taken, "without its head the rest of a prompt is of no use"


def test_chunks_of_running_requests_go_last() -> None:
    book = chunks()
    fill(book, [A, B])
    book.finished([A, B], reused=set())
    fill(book, [C, D])  # of a request that still runs
    assert gone(book, 3) == [B, A, C]


def test_use_again_is_one_access() -> None:
    book = chunks("lfu")
    fill(book, [A])
    book.finished([A], reused=set())
    fill(book, [B])
    book.finished([A, B], reused={A})
    fill(book, [C])
    book.finished([C], reused=set())
    assert gone(book, 2) is not None
    assert book.get(A) is not None, "used twice; the others once each"


def test_what_returns_is_remembered() -> None:
    # an eviction leaves a ghost, and the chunk's return counts it: lrfu keeps it over newer ones
    book = chunks("lrfu", capacity=4)
    fill(book, [A])
    book.finished([A], reused=set())
    for _ in range(4):
        book.finished([A], reused={A})
    assert gone(book, 1) == [A]
    fill(book, [A])
    book.finished([A], reused=set())
    fill(book, [B])
    book.finished([B], reused=set())
    assert gone(book, 1) == [B]


def test_eviction_is_all_or_nothing() -> None:
    book = chunks()
    fill(book, [A, B, C])
    book.finished([A, B, C], reused=set())
    status = book.get(B)
    assert status is not None
    status.ref_cnt = 1
    book.pinned(B)
    assert gone(book, 3) is None
    assert gone(book, 2, protected=[A]) is None
    assert len(book) == 3
    status.ref_cnt = 0
    book.evictable(B)
    assert gone(book, 2, protected=[A]) == [C, B], "as if nobody had asked before"
    assert gone(book, 0) == []


def test_a_chunk_that_was_never_filled_leaves_no_trace() -> None:
    book = chunks()
    book.insert(A, Status())
    book.remove(A)
    book.remove(A)
    book.finished([A], reused=set())
    assert len(book) == 0
    assert gone(book, 1) is None


def test_a_request_that_ends_before_its_chunks_are_filled() -> None:
    book = chunks()
    status = Status()
    book.insert(A, status)
    book.finished([A], reused=set())
    assert gone(book, 1) is None
    status.ref_cnt = 0
    book.evictable(A)
    assert gone(book, 1) == [A]


def test_somebody_elses_young_chunk_counts_when_it_was_used() -> None:
    book = chunks("lfu")
    fill(book, [A])  # its request runs on
    book.finished([A], reused={A})  # another one used it, and is over
    fill(book, [B])
    book.finished([B], reused=set())
    book.finished([A], reused=set())  # now it is over, too: no second insertion
    assert gone(book, 1) == [B]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=40))
def test_lru_is_the_lru_of_requests(requests: list[tuple[int, int]]) -> None:
    # against the plainest model of the rule: tail first, head last, an eviction from the front
    book = chunks("lru", capacity=8)
    model: OrderedDict[bytes, None] = OrderedDict()
    for prompt, length in requests:
        keys = [name(prompt * 10 + number) for number in range(length)]
        fresh = [key for key in keys if key not in model]
        over = len(model) + len(fresh) - 8
        if over > 0:
            wanted = [key for key in model if key not in keys][:over]
            assert gone(book, over, keys) == wanted
            for key in wanted:
                del model[key]
        fill(book, fresh)
        book.finished(keys, reused=set(keys) - set(fresh))
        for key in reversed(keys):
            model.pop(key, None)
            model[key] = None


class Ordered(RuleBasedStateMachine):
    """Any calls that vLLM may make, in any order, over each policy."""

    policy = "lru"
    by_request = True

    def __init__(self) -> None:
        super().__init__()
        self.book = chunks(self.policy, by_request=self.by_request)
        self.there: dict[bytes, Status] = {}

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True))
    def insert(self, numbers: list[int]) -> None:
        fresh = [name(n) for n in numbers if name(n) not in self.there]
        if len(self.there) + len(fresh) <= CAPACITY:
            for key in fresh:
                self.there[key] = Status()
                self.book.insert(key, self.there[key])

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        status = self.there[key]
        if status.ref_cnt < 0:
            if data.draw(st.booleans()):
                status.ref_cnt = 0
                self.book.evictable(key)
            else:
                del self.there[key]
                self.book.remove(key)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        status = self.there[key]
        if status.ref_cnt == 0:
            status.ref_cnt = 1
            self.book.pinned(key)
        elif status.ref_cnt > 0:
            status.ref_cnt = 0
            self.book.evictable(key)

    @rule(numbers=st.lists(st.integers(0, 30), max_size=6, unique=True), data=st.data())
    def finish(self, numbers: list[int], data: st.DataObject) -> None:
        keys = [name(n) for n in numbers]
        reused = {key for key in keys if key in self.there and self.there[key].ref_cnt >= 0}
        self.book.finished(keys, reused if data.draw(st.booleans()) else set())
        self.book.touch(keys)

    @rule(count=st.integers(0, CAPACITY), numbers=st.lists(st.integers(0, 30), max_size=3))
    def evict(self, count: int, numbers: list[int]) -> None:
        protected = {name(n) for n in numbers}
        able = {k for k, s in self.there.items() if s.ref_cnt == 0 and k not in protected}
        taken = self.book.evict(count, protected)
        assert (taken is not None) == (count <= len(able))
        for key, status in taken or ():
            assert key in able
            assert self.there.pop(key) is status
        assert taken is None or len({key for key, _ in taken}) == count

    @rule()
    def clear(self) -> None:
        self.book.clear()
        self.there.clear()

    @invariant()
    def same(self) -> None:
        assert len(self.book) == len(self.there)
        assert all(self.book.get(key) is status for key, status in self.there.items())


@pytest.mark.parametrize("by_request", [True, False])
@pytest.mark.parametrize("policy", names("policies"))
def test_no_order_of_calls_loses_a_chunk(policy: str, by_request: bool) -> None:
    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test

    kind = type(f"Ordered_{policy}", (Ordered,), {"policy": policy, "by_request": by_request})
    run_state_machine_as_test(kind, settings=settings(max_examples=10, stateful_step_count=30))
