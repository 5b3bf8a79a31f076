"""The driver calls hooks as often, and with what, as TensorRT-LLM's own test of connectors says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.trtllm.scripted import Script
from tierkv.errors import ConfigError
from tierkv.testing.trtllm import MODES, FakeLlmArgs, Mode, Prompt, Replay
from tierkv.testing.trtllm.reference import reference

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
EVERY = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


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


def test_arguments_are_those_of_the_mode() -> None:
    args = FakeLlmArgs.of(MODES["windows-tp4"], max_beam_width=2)

    assert (args.tensor_parallel_size, args.max_beam_width) == (4, 2)
    assert args.kv_cache_config.max_attention_window == [12, 1 << 20, 8]
    assert args.kv_cache_config.use_kv_cache_manager_v2 is True
    assert args.disable_overlap_scheduler is False


def test_modes_have_every_option_both_ways() -> None:
    values: dict[str, set[Any]] = {}
    for mode in MODES.values():
        for field in dataclasses.fields(mode):
            values.setdefault(field.name, set()).add(getattr(mode, field.name))
    same = {name for name, seen in values.items() if len(seen) == 1}
    assert same == {"layers", "tokens_per_block", "pages"}
    with pytest.raises(ConfigError, match="second API"):
        Mode(api="first", pool="grouped")
