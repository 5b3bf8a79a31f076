"""The driver calls hooks as often, and with what, as TensorRT-LLM's own test of connectors says."""

from __future__ import annotations

import dataclasses
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierkv.errors import ConfigError
from tierkv.testing.trtllm import MODES, Connector, FakeLlmArgs, Mode, Prompt, Replay, Violation
from tierkv.testing.trtllm.content import KV, ROW_BYTES
from tierkv.testing.trtllm.hooks import Watch
from tierkv.testing.trtllm.memory import POISON, Memory
from tierkv.testing.trtllm.reference import ReferenceScheduler, ReferenceWorker, reference
from tierkv.testing.trtllm.requests import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
EVERY = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


class Script:
    """Both sides of a connector that does as it is told, and remembers what it was given."""

    def __init__(
        self,
        offer: tuple[int, bool] = (0, False),
        *,
        saving: bool = False,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self.offer = offer
        self.hidden = hidden
        self.saving = saving
        self.given: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name.endswith("by_layer_group") or name in self.hidden:
            raise AttributeError(name)

        def hook(*args: Any) -> Any:
            self.given.append((name, args))
            if name == "get_num_new_matched_tokens":
                return self.offer
            if name == "request_finished":
                return self.saving
            if name == "get_finished":
                return args
            return None

        return hook

    def args_of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.given if called == name]

    def connector(self) -> Connector:
        return Connector(scheduler=lambda _args: self, worker=lambda _args, _rank: self)


def _mode(overlap: bool, **how: Any) -> Mode:
    return Mode(overlap=overlap, tokens_per_block=32, pages=32, **how)


@BOTH
def test_calls_of_a_plain_request(overlap: bool) -> None:
    script = Script()
    with Replay(script.connector(), _mode(overlap)) as replay:
        replay.run(Prompt([1, 2, 3], max_tokens=8))

    layers = replay.mode.layers
    assert replay.hooks.calls == {
        "register_forward_pass_callable": 1,
        "register_kv_caches": 1,
        "wait_for_initialization": 1,
        "get_num_new_matched_tokens": 1,
        "update_state_after_alloc": 1,
        "build_connector_meta": 8,
        "bind_connector_meta": 8,
        "start_load_kv": 8,
        "wait_for_layer_load": 8 * layers,
        "save_kv_layer": 8 * layers,
        "wait_for_save": 8,
        "request_finished": 1,
        "get_finished": 8 + overlap,
    }
    assert len(script.args_of("update_state_after_alloc")[0][1]) == 1
    assert len(script.args_of("request_finished")[0][1]) == 1
    for name in ("wait_for_layer_load", "save_kv_layer"):
        seen = [layer for layer, _stream in script.args_of(name)]
        assert seen == list(range(layers)) * 8


@BOTH
def test_order_of_calls_in_a_step(overlap: bool) -> None:
    with Replay(Script().connector(), _mode(overlap, layers=2)) as replay:
        replay.run(Prompt([1, 2, 3], max_tokens=1))

    ends = ["request_finished", "get_finished"]
    assert replay.hooks.log == [
        "register_forward_pass_callable",
        "register_kv_caches",
        "wait_for_initialization",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "bind_connector_meta",
        "start_load_kv",
        *["wait_for_layer_load", "save_kv_layer"] * 2,
        "wait_for_save",
        *(["get_finished", *ends] if overlap else ends),
    ]


@BOTH
def test_outputs_of_a_plain_request(overlap: bool) -> None:
    with Replay(Script().connector(), _mode(overlap)) as replay:
        replay.run(Prompt([7] * 48, max_tokens=32))

    assert len(replay.outputs) == 32
    (first,) = replay.outputs[0].new_requests
    assert (len(first.new_tokens), len(first.new_block_ids)) == (48, 2)
    assert (first.computed_position, first.num_scheduled_tokens) == (0, 48)
    for number, output in enumerate(replay.outputs[1:], 1):
        assert output.new_requests == []
        (data,) = output.cached_requests
        assert len(data.new_tokens) == (0 if overlap and number == 1 else 1)
        assert data.num_scheduled_tokens == 1
        border = (data.computed_position + overlap) % 32 == 0
        assert len(data.new_block_ids) == border


@BOTH
def test_outputs_of_chunked_prefill(overlap: bool) -> None:
    script = Script()
    with Replay(script.connector(), _mode(overlap, chunk=128)) as replay:
        replay.run(Prompt([7] * 256, max_tokens=32))

    (first,) = replay.outputs[0].new_requests
    (second,) = replay.outputs[1].cached_requests
    shown = [
        (len(d.new_tokens), len(d.new_block_ids), d.computed_position, d.num_scheduled_tokens)
        for d in (first, second)
    ]
    assert shown == [(256, 8, 0, 128), (0, 0, 128, 128)]
    (third,) = replay.outputs[2].cached_requests
    assert (len(third.new_tokens), third.num_scheduled_tokens) == (0 if overlap else 1, 1)
    assert len(script.args_of("update_state_after_alloc")[0][1]) == 8
    assert len(script.args_of("request_finished")[0][1]) == 9


@BOTH
def test_calls_of_an_asynchronous_save(overlap: bool) -> None:
    script = Script(saving=True)
    with Replay(script.connector(), _mode(overlap)) as replay:
        request = replay.run(Prompt([1, 2, 3], max_tokens=8))
        replay.settle()

    polls = script.args_of("get_finished")
    assert len(polls) == 8 + overlap
    assert polls[:-1] == [([], [])] * (len(polls) - 1)
    assert polls[-1] == ([request.id], [])


@BOTH
def test_calls_of_an_asynchronous_load(overlap: bool) -> None:
    # the first poll hands the id in; the request computes from the step after
    with Replay(reference(lag=0), _mode(overlap)) as replay:
        first = replay.run(Prompt([3] * 40, max_tokens=2))
        replay.settle()
        before = replay.hooks.calls["get_finished"]
        outputs = len(replay.outputs)
        again = replay.run(Prompt([3] * 40, max_tokens=8))

    assert (first.offered, again.offered) == (0, 32)
    assert replay.hooks.calls["get_finished"] - before == 8 + 1 + overlap
    parked, ran = replay.outputs[outputs : outputs + 2]
    assert parked.new_requests == parked.cached_requests == []
    (data,) = ran.new_requests
    assert (data.computed_position, data.num_scheduled_tokens) == (32, 8), "not reduced"


def test_tokens_that_load_in_the_same_step_are_taken_off_the_position() -> None:
    with Replay(reference(asynchronous=False, lag=0), _mode(False)) as replay:
        replay.run(Prompt([3] * 40))
        replay.settle()
        again = replay.run(Prompt([3] * 40))

    assert again.offered == 32
    (data,) = replay.outputs[-1].new_requests
    assert (data.computed_position, data.num_scheduled_tokens) == (0, 8)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@BOTH
def test_every_rank_is_called(ranks: int, overlap: bool) -> None:
    with Replay(reference(), Mode(ranks=ranks, overlap=overlap)) as replay:
        replay.run(Prompt(range(1, 22), max_tokens=6))

    calls = replay.hooks.calls
    assert calls["build_connector_meta"] == 6
    assert calls["start_load_kv"] == calls["wait_for_save"] == 6 * ranks
    assert calls["save_kv_layer"] == 6 * ranks * replay.mode.layers


def test_api_generations_differ_in_fields() -> None:
    seen: dict[str, list[str]] = {}
    for api in ("first", "second"):
        with Replay(Script().connector(), Mode(api=api)) as replay:
            request = replay.run(Prompt([1, 2], salt="s"))
        (data,) = replay.outputs[0].new_requests
        seen[api] = [field.name for field in dataclasses.fields(data)]
        assert hasattr(request.view, "cache_salt") == (api == "second")
        assert hasattr(request.view, "cache_salt_id") == (api == "first")
    assert len(seen["first"]) == 5
    assert seen["second"][5:] == [
        "block_hashes",
        "priorities",
        "cache_salt",
        "new_block_ids_by_layer_group",
    ]


@EVERY
def test_equal_prefixes_have_equal_tokens(mode: Mode) -> None:
    with Replay(Script().connector() if not mode.grouped else reference(), mode) as replay:
        one, two = replay.run_all([Prompt(range(1, 20), 9), Prompt(range(1, 20), 4)])
        replay.settle()

    assert one.tokens[:23] == two.tokens
    assert not any(replay.memory.lost())


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


def test_refusals_at_start_up_are_raised_as_they_are() -> None:
    closed = []

    def refuse(_args: FakeLlmArgs) -> object:
        raise ConfigError("host_cache_size is set")

    connector = Connector(refuse, lambda _a, _r: Script(), close=lambda: closed.append(True))
    with pytest.raises(ConfigError, match="host_cache_size"):
        Replay(connector)
    assert closed == [True]


def test_arguments_are_those_of_the_mode() -> None:
    args = FakeLlmArgs.of(MODES["windows-tp4"], max_beam_width=2)

    assert (args.tensor_parallel_size, args.max_beam_width) == (4, 2)
    assert args.kv_cache_config.max_attention_window == [12, 1 << 20, 8]
    assert args.kv_cache_config.use_kv_cache_manager_v2 is True
    assert args.disable_overlap_scheduler is False


@pytest.mark.parametrize(
    ("offer", "rule"),
    [
        ((0, True), "offer-shape"),
        ((-4, False), "offer-shape"),
        ((4.0, False), "offer-shape"),
        (4, "offer-shape"),
        ((8, False), "offer-too-long"),
        ((3, False), "offer-partial"),
        ((4, False), "kv-wrong"),
        ((4, True), "load-incomplete"),
    ],
)
def test_offers_that_no_engine_can_take(offer: Any, rule: str) -> None:
    with Replay(Script(offer).connector()) as replay, pytest.raises(Violation) as caught:
        replay.run(Prompt(range(1, 9)))

    assert caught.value.rule == rule


def test_a_load_that_never_ends_is_found() -> None:
    class Silent(ReferenceWorker):
        def get_finished(
            self, saving: list[int], loading: list[int]
        ) -> tuple[list[int], list[int]]:
            return super().get_finished(saving, [])

    with Replay(reference(worker=Silent), patience=30, pause=0) as replay:
        replay.run(Prompt(range(1, 22)))
        replay.settle()
        with pytest.raises(Violation, match="never-finished"):
            replay.run(Prompt(range(1, 22)))


def test_exceptions_out_of_hooks_name_the_hook() -> None:
    class Raising(ReferenceScheduler):
        def update_state_after_alloc(self, request: Any, pages: list[int]) -> None:
            raise KeyError(request.request_id)

    with Replay(reference(scheduler=Raising)) as replay, pytest.raises(Violation) as caught:
        replay.run(Prompt([1]))
    assert caught.value.rule == "hook-raised"
    assert "update_state_after_alloc raised KeyError(1)" in str(caught.value)


def test_pages_run_out_and_requests_wait_or_give_way() -> None:
    prompts = [Prompt(range(at, at + 20), 12) for at in range(100, 600, 100)]
    for mode in (Mode(pages=17), Mode(pool="grouped", pages=17, overlap=True)):
        with Replay(reference(), mode) as replay:
            requests = replay.run_all(prompts)
            replay.settle()
        assert [len(request.tokens) for request in requests] == [32] * 5
        asked = replay.hooks.calls["get_num_new_matched_tokens"]
        assert asked == 5 if not mode.grouped else asked > 5, "preempted ones are asked again"


def test_cpu_time_of_hooks_leaves_out_what_others_do() -> None:
    class Sleepy(ReferenceScheduler):
        def build_connector_meta(self, output: Any) -> Any:
            time.sleep(0.2)
            return super().build_connector_meta(output)

    with Replay(reference(scheduler=Sleepy)) as replay:
        replay.run(Prompt([1, 2]))
    (spent,) = replay.hooks.cpu["build_connector_meta"]
    assert 0 < spent < 0.1


def _sleeps() -> None:
    time.sleep(0)


def _asks_a_socket() -> None:
    one, two = socket.socketpair()
    one.close()
    two.close()


def _reads() -> None:
    with open("/dev/null", "rb") as file:
        file.read()


@pytest.mark.parametrize("act", [_sleeps, _asks_a_socket, _reads])
def test_the_watch_sees_what_enters_the_kernel(act: Callable[[], None]) -> None:
    watch = Watch()
    with watch.watching():
        act()
    assert watch.entered is not None


def test_the_watch_lets_computing_pass() -> None:
    import hashlib
    import threading

    lock = threading.Lock()
    watch = Watch()
    with watch.watching(), lock:
        hashlib.sha256(b"x").hexdigest()
        torch.zeros(3).sum()
        sorted({1: 2}.items())
        time.monotonic()
    assert watch.entered is None
    assert watch.calls > 3


def test_modes_have_every_option_both_ways() -> None:
    values: dict[str, set[Any]] = {}
    for mode in MODES.values():
        for field in dataclasses.fields(mode):
            values.setdefault(field.name, set()).add(getattr(mode, field.name))
    same = {name for name, seen in values.items() if len(seen) == 1}
    assert same == {"layers", "tokens_per_block", "pages"}
    with pytest.raises(ConfigError, match="second API"):
        Mode(api="first", pool="grouped")


def test_preempting_what_does_not_run_is_refused() -> None:
    with Replay(reference(), Mode(pool="grouped")) as replay:
        request = replay.submit(Prompt([1, 2]))
        with pytest.raises(ValueError, match=Phase.WAITING.name):
            replay.preempt(request)
