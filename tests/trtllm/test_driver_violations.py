"""What the driver refuses, and what it measures and watches in hooks."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trtllm.scripted import Script
from tierkv.errors import ConfigError
from tierkv.testing.trtllm import Connector, FakeLlmArgs, Mode, Prompt, Replay, Violation
from tierkv.testing.trtllm.hooks import Watch
from tierkv.testing.trtllm.reference import ReferenceScheduler, ReferenceWorker, reference
from tierkv.testing.trtllm.requests import Phase

if TYPE_CHECKING:
    from collections.abc import Callable


def test_refusals_at_start_up_are_raised_as_they_are() -> None:
    closed = []

    def refuse(_args: FakeLlmArgs) -> object:
        raise ConfigError("host_cache_size is set")

    connector = Connector(refuse, lambda _a, _r: Script(), close=lambda: closed.append(True))
    with pytest.raises(ConfigError, match="host_cache_size"):
        Replay(connector)
    assert closed == [True]


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


def test_preempting_what_does_not_run_is_refused() -> None:
    with Replay(reference(), Mode(pool="grouped")) as replay:
        request = replay.submit(Prompt([1, 2]))
        with pytest.raises(ValueError, match=Phase.WAITING.name):
            replay.preempt(request)


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
