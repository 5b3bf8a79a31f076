"""Checks of how a connector follows requests, in order and out of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Literal

from tierkv.testing.trtllm.bench import TOKENS, ConnectorBench
from tierkv.testing.trtllm.modes import Mode
from tierkv.testing.trtllm.outputs import FirstOutput
from tierkv.testing.trtllm.requests import Phase, Prompt, Request
from tierkv.testing.trtllm.signatures import mismatches, recorded

if TYPE_CHECKING:
    from tierkv.testing.trtllm.replay import Replay

__all__ = ["LifeTests"]

_LONG = list(range(100, 141))
_Api = Literal["first", "second"]
_APIS: tuple[_Api, ...] = ("first", "second")


class LifeTests(ConnectorBench):
    """From the first call to the last."""

    def test_signatures(self) -> None:
        """Every hook can be called as both generations of the API call it."""
        with self.replay(Mode()) as replay:
            for api in _APIS:
                known = recorded(api)
                assert mismatches(known.scheduler, type(replay.scheduler)) == []
                assert mismatches(known.worker, type(replay.workers[0])) == []

    def test_metadata_is_pickled(self) -> None:
        """It travels to processes on other devices, in every step."""
        with self.replay(Mode(ranks=2)) as replay:
            self.stored(replay, Prompt(TOKENS, 3), 20)

    def test_hooks_tolerate_what_may_come(self) -> None:
        """No output, an empty one, requests that were never seen or are over."""
        with self.replay(Mode(pool="grouped", empty_meta="none")) as replay:
            view = Request.new(99, Prompt(TOKENS), replay.mode).view
            call, scheduler = replay.hooks.call, replay.scheduler
            for output in (None, FirstOutput()):
                meta: Any = call(scheduler, "build_connector_meta", output)
                call(replay.workers[0], "bind_connector_meta", meta)
            call(replay.workers[0], "bind_connector_meta", None)
            call(replay.workers[0], "start_load_kv", None)
            replay.hooks.optional(scheduler, "cancel_load", view, 0, 8)
            replay.hooks.optional(scheduler, "request_reset", view)
            assert call(scheduler, "request_finished", view, []) is False
            replay.abort(replay.submit(Prompt(TOKENS)))
            self.stored(replay, Prompt(TOKENS), 20)

    def test_ids_are_those_that_were_given(self) -> None:
        """``get_finished`` returns no id that it was not asked about."""
        with self.replay(Mode()) as replay:
            replay.run_all([Prompt(TOKENS, 3), Prompt(_LONG, 5)])
            replay.settle()

    def test_ids_come_back_once(self) -> None:
        """Each id that was handed in comes back from each rank, once."""
        with self.replay(Mode(ranks=2, overlap=True)) as replay:
            self.stored(replay, Prompt(TOKENS, 3), 20)
            replay.run_all([Prompt(TOKENS, 3), Prompt(_LONG, 5)])
            replay.settle()

    def test_cancelled_loads(self) -> None:
        """The engine takes less than it was offered, or nothing; the load ends all the same."""
        for honour in (0, 8):
            with self.replay(Mode(pool="grouped", chunk=4)) as replay:
                self.stored(replay, Prompt(TOKENS, 2), 20)
                self.again(replay, Prompt(TOKENS, 2, honour=honour), 20)
                self.again(replay, Prompt(TOKENS, 6, defer=2), 20)

    def test_resets(self) -> None:
        """A rolled back request is asked again; its old pages are somebody else's by then."""
        with self.replay(Mode(pool="grouped")) as replay:
            self.stored(replay, Prompt(TOKENS, 2), 20)
            requests = replay.run_all([Prompt(TOKENS, 9, reset=True), Prompt(_LONG, 9)])
            replay.settle()
            self.again(replay, Prompt(requests[1].tokens), 48)

    def test_preemption(self) -> None:
        """A request that loses its pages begins anew, with the tokens it has by then."""
        for steps in (1, 6):
            with self.replay(Mode(pool="grouped", chunk=8, overlap=True)) as replay:
                request = replay.submit(Prompt(_LONG, 22))
                while request.phase not in (Phase.CONTEXT, Phase.DECODE):
                    replay.step()
                for _ in range(steps):
                    replay.step()
                replay.preempt(request)
                replay.finish([request])
                replay.settle()
                self.again(replay, Prompt(request.tokens), 60)

    def test_requests_are_given_up_while_they_load(self) -> None:
        """Pages that a load writes are not given away before it is over, in either API."""
        for api in _APIS:
            with self.replay(Mode(api=api)) as replay:
                self.stored(replay, Prompt(_LONG, 2), 40)
                for _ in range(3):
                    request = replay.submit(Prompt(_LONG, 2))
                    while request.phase is Phase.WAITING:
                        replay.step()
                    replay.abort(request)
                    replay.finish([request])
                    replay.settle()
                self.again(replay, Prompt(_LONG, 2), 40)

    def test_requests_are_given_up_at_any_time(self) -> None:
        """Wherever a request was, its pages come back, and the engine goes on."""
        for steps in range(12):
            with self.replay(Mode(pool="grouped", chunk=8, overlap=True)) as replay:
                self.store(replay, Prompt(TOKENS, 2))
                request = replay.submit(Prompt(TOKENS, 8, defer=2))
                other = replay.submit(Prompt(_LONG, 8))
                for _ in range(steps):
                    replay.step()
                replay.abort(request)
                replay.finish([request, other])
                replay.settle()

    def test_random_schedules(self) -> None:
        """Many requests that share prefixes, start, end and are given up at random."""
        for seed in range(self.schedules):
            rng = random.Random(seed)
            windows = (None, 9) if self.layer_groups else (None,)
            mode = Mode(pool="grouped", windows=windows, ranks=2, chunk=8, overlap=bool(seed % 2))
            with self.replay(mode) as replay:
                _run_randomly(replay, rng)


def _run_randomly(replay: Replay, rng: random.Random) -> None:
    roots = [list(range(at, at + 30)) for at in (100, 200)]
    requests: list[Request] = []
    for _ in range(60):
        if rng.random() < 0.3:
            root = rng.choice(roots)[: rng.randrange(1, 30)]
            tail = [rng.randrange(300, 310) for _ in range(rng.randrange(0, 9))]
            salt = rng.choice(("a", "b"))
            prompt = Prompt(
                [*root, *tail],
                rng.randrange(1, 12),
                salt=salt,
                defer=rng.randrange(2),
                reset=rng.random() < 0.2,
                honour=0 if rng.random() < 0.1 else None,
            )
            requests.append(replay.submit(prompt))
        elif requests and rng.random() < 0.1:
            replay.abort(rng.choice(requests))
        running = [r for r in requests if r.phase in (Phase.CONTEXT, Phase.DECODE)]
        if running and rng.random() < 0.05:
            replay.preempt(rng.choice(running))
        replay.step()
    replay.finish(requests)
    replay.settle()
