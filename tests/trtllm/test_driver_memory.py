"""Pages of the driver's stand-in memory: how they are described, freed, poisoned, run out of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trtllm.scripted import Script
from tierkv.testing.trtllm import Mode, Prompt, Replay, Violation
from tierkv.testing.trtllm.content import KV, ROW_BYTES
from tierkv.testing.trtllm.memory import POISON, Memory
from tierkv.testing.trtllm.reference import ReferenceWorker, reference


def test_pages_describe_the_same_memory_flat_and_grouped() -> None:
    class Keeping(ReferenceWorker):
        pool: torch.Tensor
        layout: Any

        def register_kv_caches(self, pool: torch.Tensor) -> None:
            self.pool = pool
            super().register_kv_caches(pool)

        def register_kv_cache_layout(self, layout: Any) -> None:
            self.layout = layout
            super().register_kv_cache_layout(layout)

    with Replay(reference(worker=Keeping), Mode()) as flat:
        pool = flat.workers[0].pool  # type: ignore[attr-defined]
    assert pool.shape == (96, 4, KV, 4 * ROW_BYTES // KV // 2)
    assert pool.dtype == torch.bfloat16
    with Replay(reference(worker=Keeping), Mode(pool="grouped", windows=(None, 8))) as replay:
        layout = replay.workers[0].layout  # type: ignore[attr-defined]
    assert [group.layer_ids for group in layout.groups] == [(0, 2), (1, 3)]
    assert layout.as_single_pool_tensor() is None
    assert layout.group_of_layer(3).window_size == 8
    for group in layout.groups:
        first, second = group.regions
        assert first.size + second.size == first.stride == group.bytes_per_page
        assert second.address_of(2) == first.address_of(2) + first.size
        assert second.as_tensor()[2].data_ptr() == second.address_of(2)
        with pytest.raises(IndexError, match="page -1"):
            first.slot_tensor(-1)
    with Replay(reference(worker=Keeping), Mode(pool="grouped")) as replay:
        single = replay.workers[0].layout.as_single_pool_tensor()  # type: ignore[attr-defined]
    assert single.shape == pool.shape


def test_a_connector_without_layer_groups_runs_where_one_list_says_all() -> None:
    script = Script(hidden=("register_kv_cache_layout",))
    with Replay(script.connector(), Mode(pool="grouped")) as replay:
        replay.run(Prompt([1, 2, 3]))
    calls = replay.hooks.calls
    assert calls["update_state_after_alloc"] == calls["request_finished"] == 1
    ((pool,),) = script.args_of("register_kv_caches")
    assert pool.shape == (96, 4, KV, 4 * ROW_BYTES // KV // 2)


def test_freed_pages_are_poisoned_and_watched() -> None:
    memory = Memory(Mode())
    page = memory.take(0)
    memory.pools[0][0][page] = 1
    memory.give(0, page)
    assert bool((memory.pools[0][0][page] == POISON).all())
    memory.pools[0][0][page, 2, 1] = 0
    with pytest.raises(Violation, match="free-written") as caught:
        memory.check()
    assert caught.value.rule == "free-written"


def test_pages_taken_without_asking_keep_their_bytes_until_they_are_given_away() -> None:
    memory = Memory(Mode())
    page = memory.take(0)
    memory.pools[0][0][page] = 1
    memory.give(0, page, late=True)
    memory.spoil_taken()
    memory.check()
    assert bool((memory.pools[0][0][page] == 1).all())
    assert memory.take(0) == page
    memory.spoil_taken()
    assert bool((memory.pools[0][0][page] == POISON).all())


def test_pages_run_out_and_requests_wait_or_give_way() -> None:
    prompts = [Prompt(range(at, at + 20), 12) for at in range(100, 600, 100)]
    for mode in (Mode(pages=17), Mode(pool="grouped", pages=17, overlap=True)):
        with Replay(reference(), mode) as replay:
            requests = replay.run_all(prompts)
            replay.settle()
        assert [len(request.tokens) for request in requests] == [32] * 5
        asked = replay.hooks.calls["get_num_new_matched_tokens"]
        assert asked == 5 if not mode.grouped else asked > 5, "preempted ones are asked again"
