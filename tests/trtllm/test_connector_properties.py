"""The properties T01 to T12 that a connector for TensorRT-LLM must have, each by name."""

from __future__ import annotations

import gc
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests.trtllm.running import PATIENT, Made, configure
from tierkv.testing.trtllm import FakeLlmArgs, Mode, Prompt, Replay
from tierkv.testing.trtllm.layouts import describe, flat_pool
from tierkv.testing.trtllm.memory import Memory
from tierkv.testing.trtllm.outputs import FirstOutput, SecondOutput
from tierkv.testing.trtllm.requests import Phase, Request
from tierkv_adapters.trtllm import TierKVConnectorWorker
from tierkv_adapters.trtllm.metadata import StepMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkv_adapters.serving.orders import StepOrders
    from tierkv_adapters.trtllm.deciding import Decisions

LONG = list(range(100, 141))
WINDOWS = Mode(pool="grouped", windows=(None, 12), chunk=8)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    configure(tmp_path, monkeypatch)
    made = Made()
    yield made
    made.close()


def _decisions(made: Made) -> Decisions:
    assert made.scheduler is not None
    assert made.scheduler._decisions is not None
    return made.scheduler._decisions


def _store(replay: Replay, prompt: Prompt) -> Request:
    request = replay.run(prompt)
    replay.settle()
    return request


def _orders(made: Made, replay: Replay) -> list[StepOrders]:
    """Orders of all steps from now on, as the ranks get them."""
    found: list[StepOrders] = []
    build: Callable[[Any], StepMeta] = replay.scheduler.build_connector_meta  # type: ignore[attr-defined]

    def building(output: Any) -> StepMeta:
        meta = build(output)
        found.append(pickle.loads(pickle.dumps(meta.orders)))
        return meta

    made.scheduler.build_connector_meta = building  # type: ignore[method-assign, union-attr]
    return found


def test_t01_matching_does_no_io_and_little_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    """Watched by the driver; a thousand blocks cost a few calls each, whatever the machine."""
    configure(tmp_path, monkeypatch, host="32MiB")
    prompt = Prompt([1 + at % 97 for at in range(4 * 1000 + 1)])
    with made.replay(Mode(layers=1, pages=1100)) as replay:
        replay.hooks.guarded = True
        _store(replay, prompt)
        replay.hooks.match_calls.clear()
        assert replay.run(prompt).offered == 4000
        assert max(replay.hooks.match_calls) < 30 * 1000
        replay.hooks.match_calls.clear()
        cold = Prompt([98 + at % 97 for at in range(4 * 1000 + 1)])
        assert replay.run(cold).offered == 0
        assert max(replay.hooks.match_calls) < 3000  # nothing is hashed to its end


def test_t02_what_is_offered_is_held_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    """Memory is full of what came later: held blocks stay, and are offered; one token is left."""
    configure(tmp_path, monkeypatch, host="1MiB")
    with made.replay(Mode(ranks=2)) as replay:
        first = _store(replay, Prompt(LONG, 8))
        for at in range(4, 8):
            _store(replay, Prompt(list(range(1000 * at, 1000 * at + 200)), 2))
        book = _decisions(made)._book
        assert 0 < book.used <= book.budget
        for worker in made.workers.values():
            assert worker.manager is not None
            assert worker.manager.stats().leases >= len(book.runs())
        last = list(range(7000, 7200))
        # a rank that is slow to make room leaves out a store's tail: the next turn brings it
        turns = (_store(replay, Prompt(last)).offered for _ in range(5))
        assert 196 in turns  # of 200 tokens, in blocks of 4: the last one is computed
        again = replay.run(Prompt(first.tokens))
        assert again.offered in (0, 48)  # given back for the others, or still held; never a part


def test_t03_keys_tell_everything_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Salt, adapter, media: the suite. Here: weights, dtype, layout, ranks, tokens of a page."""
    prints = set()
    variants: list[tuple[Mode, str, dict[str, Any]]] = [
        (Mode(), "tiny-1", {}),
        (Mode(), "tiny-2", {}),
        (Mode(), "tiny-1", {"dtype": "float16"}),
        (Mode(), "tiny-1", {"quant_config": {"kv": "fp8"}}),
        (Mode(layers=2), "tiny-1", {}),
        (Mode(pool="grouped"), "tiny-1", {}),
        (Mode(tokens_per_block=2), "tiny-1", {}),
        (Mode(ranks=2), "tiny-1", {}),
    ]
    for mode, weights, changes in variants:
        file = configure(tmp_path, monkeypatch)
        file.write_text(file.read_text().replace("tiny-1", weights))
        args = FakeLlmArgs.of(mode, **changes)
        made = Made()
        made.workers = {r: TierKVConnectorWorker(args, rank=r) for r in range(mode.ranks)}
        pools = Memory(mode).pools
        for worker, mine in zip(made.workers.values(), pools, strict=True):
            if mode.grouped:
                worker.register_kv_cache_layout(describe(mode, mine))
            else:
                worker.register_kv_caches(flat_pool(mine[0]))
            assert worker._facts is not None
            prints.add(worker._facts.space(None).fingerprint)
        made.close()
    assert len(prints) == 9  # the last variant has two ranks


def test_t04_an_id_comes_back_once_and_when_no_copy_is_under_way(made: Made) -> None:
    with made.replay(Mode(ranks=2, overlap=True)) as replay:
        _store(replay, Prompt(LONG, 9))
        for worker in made.workers.values():
            inner, rank = worker.get_finished, worker._rank
            assert rank is not None

            def finished(
                saved: list[int], loaded: list[int], inner: Any = inner, rank: Any = rank
            ) -> tuple[list[int], list[int]]:
                answer: tuple[list[int], list[int]] = inner(saved, loaded)
                assert not any(rank.saving(str(number)) for number in answer[0])
                return answer

            worker.get_finished = finished  # type: ignore[method-assign, assignment]
        requests = replay.run_all([Prompt(LONG, 9), Prompt([*LONG, 5], 3), Prompt(LONG[3:], 5)])
        replay.settle()  # the driver refuses ids that come twice, or that it never gave

        assert all(request.phase is Phase.DONE for request in requests)


def test_t05_an_idle_engine_finishes_its_saves(made: Made) -> None:
    """No step follows: ``get_finished`` alone lets the pages go."""
    with made.replay(Mode(ranks=2)) as replay:
        request = replay.run(Prompt(LONG, 8))
        steps = replay.hooks.calls["build_connector_meta"]
        replay.settle()

        assert replay.hooks.calls["build_connector_meta"] == steps
        assert request.phase is Phase.DONE
        assert all(worker.stats()["save_tokens"] == 48 for worker in made.workers.values())


@pytest.mark.parametrize("output", [None, FirstOutput(), SecondOutput()], ids=repr)
def test_t06_empty_steps_have_metadata_too(made: Made, output: Any) -> None:
    with made.replay(Mode()) as replay:
        meta = replay.hooks.call(replay.scheduler, "build_connector_meta", output)
        same = pickle.loads(pickle.dumps(meta))

        assert isinstance(same, StepMeta)
        assert (same.directory, same.dropped) == (meta.directory, [])
        for told in (same, None):
            replay.hooks.call(replay.workers[0], "bind_connector_meta", told)
            replay.hooks.call(replay.workers[0], "start_load_kv", None)
        assert made.workers[0].errors == 0


def test_t07_page_minus_one_is_no_page(made: Made) -> None:
    """The driver sees to it that the pool's last page is never written."""
    with made.replay(WINDOWS) as replay:
        orders = _orders(made, replay)
        first = _store(replay, Prompt(LONG, 9))
        _store(replay, Prompt(first.tokens, 3))

        loads = [load for step in orders for load in step.loads]
        pages = [list(grown.pages[1]) for step in orders for grown in step.grown if step.loads]
        assert [(load.start, load.stop) for load in loads] == [(0, 48)]
        assert -1 in pages[0]
        assert made.workers[0].stats()["loads_short"] == 0


def test_t08_clipped_reset_preempted_partial_and_aborted_requests(made: Made) -> None:
    with made.replay(Mode(pool="grouped", chunk=8, overlap=True)) as replay:
        _store(replay, Prompt(LONG, 9))
        assert _store(replay, Prompt(LONG, 2, on_device=6)).offered == 0
        assert _store(replay, Prompt(LONG, 2, honour=8)).honoured == 8
        assert _store(replay, Prompt(LONG, 2, honour=0)).honoured == 0
        _store(replay, Prompt(LONG, 2, reset=True, defer=1))
        request = replay.submit(Prompt([*LONG, 3, 4, 5, 6, 7], 20))
        while request.phase is not Phase.DECODE:
            replay.step()
        replay.preempt(request)
        for _ in range(3):
            replay.step()
        replay.abort(request)
        replay.finish([])
        replay.settle()

        stats = made.stats()
        assert (stats["partial"], stats["errors"], stats["short_of_pages"]) == (1, 0, 0)
        assert stats["clipped"] >= 2
        assert made.workers[0].stats()["loads_dropped"] >= 1
        assert made.workers[0].errors == 0


def test_t08_an_offer_that_is_cut_inside_of_a_block_is_loaded_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    """Blocks are two pages here; what has no page goes nowhere, and the rest is right."""
    configure(tmp_path, monkeypatch, block_tokens=8)
    with made.replay(Mode(pool="grouped", chunk=8)) as replay:
        first = _store(replay, Prompt(LONG, 9))
        clipped = _store(replay, Prompt(first.tokens, 3, honour=12))
        assert (clipped.offered, clipped.honoured) == (48, 12)
        assert made.workers[0].stats()["load_tokens"] == 16
        assert _store(replay, Prompt(first.tokens, 3)).offered == 48


def test_t09_no_exception_leaves_a_hook(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with made.replay(Mode()) as replay:
        _store(replay, Prompt(LONG))

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("planted")

        decisions, worker, scheduler = _decisions(made), made.workers[0], made.scheduler
        assert scheduler is not None
        targets: list[tuple[object, str]] = [
            (decisions, "offer"),
            (decisions, "allocated"),
            (decisions, "_wish_stored"),
            (decisions, "finished"),
            (worker._rank, "begin"),
            (worker._rank, "start_saves"),
        ]
        for at, (target, name) in enumerate(targets):
            with monkeypatch.context() as patch:
                patch.setattr(target, name, broken)
                before = scheduler.errors + decisions.errors + worker.errors
                request = replay.run(Prompt([at, 8, 7, 6, 5, 4, 3, 2, 1]))
                replay.settle()
                assert request.phase is Phase.DONE
                assert scheduler.errors + decisions.errors + worker.errors > before


def test_t10_saves_are_incremental_and_of_computed_tokens_only(made: Made) -> None:
    with made.replay(Mode(chunk=8, overlap=True)) as replay:
        orders = _orders(made, replay)
        request = replay.run(Prompt(LONG, 20))
        told = len(orders)
        outputs = replay.outputs[-told:]
        replay.settle()

        upto, saves = 0, 0
        for step, output in zip(orders, outputs, strict=True):
            rows = [*output.new_requests, *output.cached_requests]
            computed = max((r.computed_position + r.num_scheduled_tokens for r in rows), default=0)
            for save in step.saves:
                assert (save.id, save.start) == (str(request.id), upto)
                assert save.stop <= computed
                upto, saves = save.stop, saves + 1
        assert saves > 8  # by chunks, then block by block as tokens are decoded
        assert 52 <= upto <= len(request.tokens) - 1
        assert len(orders) == told


@pytest.mark.parametrize("mode", [Mode(api="first"), Mode(), Mode(pool="grouped")], ids=repr)
def test_t11_both_generations_both_registrations(made: Made, mode: Mode) -> None:
    with made.replay(mode) as replay:
        first = _store(replay, Prompt(LONG, 8, salt="s"))
        again = _store(replay, Prompt(first.tokens, 2, salt="s"))
        registered = "register_kv_cache_layout" if mode.grouped else "register_kv_caches"

        assert again.offered == 48
        assert replay.hooks.calls[registered] == 1


def test_the_ranks_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_thread_leaks: None, no_fd_leaks: None
) -> None:
    configure(tmp_path, monkeypatch, disk=True)
    made = Made()
    with made.replay(Mode(ranks=2)) as replay:
        _store(replay, Prompt(LONG))
        assert made.scheduler is not None
        folder = made.scheduler._directory
    gc.collect()
    assert not os.path.exists(folder)


def test_what_was_stored_before_a_restart_is_brought_from_disk_and_offered_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch, disk=True)
    made = Made()
    with made.replay(Mode(ranks=2)) as replay:
        first = _store(replay, Prompt(LONG, 8))
        for worker in made.workers.values():
            assert worker.manager is not None
            worker.manager.flush()
    with made.replay(Mode(ranks=2)) as replay:
        offered = [_store(replay, Prompt(first.tokens, 1)).offered for _ in range(2)]

        assert offered == [0, 48]


def test_before_all_ranks_are_connected_nothing_is_offered_or_stored(made: Made) -> None:
    with Replay(made.connector(), Mode(ranks=2)) as replay:
        early = replay.run(Prompt(LONG, 4))
        assert made.scheduler is not None
        assert made.scheduler.ready(PATIENT)

        assert (early.offered, made.stats()["early"]) == (0, 1)
        assert _store(replay, Prompt(LONG, 4)).offered == 0


def test_settings_of_the_adapter_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    configure(tmp_path, monkeypatch, serving="save_decoded = false\nmin_load_tokens = 20")
    with made.replay(Mode()) as replay:
        first = _store(replay, Prompt(LONG, 20))
        assert _store(replay, Prompt(first.tokens)).offered == 40
        assert _store(replay, Prompt([*LONG[:16], 1, 2])).offered == 0
