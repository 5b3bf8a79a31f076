"""Requests that are given up in every state leave nothing behind, on any side."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.trtllm.running import Made, configure
from tierkv.testing.trtllm import Mode, Prompt
from tierkv.testing.trtllm.requests import Phase

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.testing.trtllm import Replay, Request

SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))
_MODES = {
    "flat": Mode(overlap=True),
    "groups": Mode(pool="grouped", windows=(None, 12), chunk=8, overlap=True),
    "first": Mode(api="first"),
    "ranks": Mode(ranks=2, chunk=8),
}


def _left(made: Made) -> dict[str, int]:
    """What is remembered of requests, by where."""
    assert made.scheduler is not None
    decisions = made.scheduler._decisions
    assert decisions is not None
    planner, book = decisions._planner, decisions._book
    found: dict[str, int] = {
        "plans": len(planner._plans),
        "leaving": len(planner._leaving),
        "tracked": len(decisions._requests),
        "pins": len(book._pins),
        "dropped": len(decisions._dropped),
    }
    for number, worker in made.workers.items():
        transfers, rank = worker._transfers, worker._rank
        assert rank is not None
        assert worker.manager is not None
        owed = (
            *("saving", "loading", "orders", "running", "over", "tries", "stuck", "since"),
            "given_up",
        )
        for name in owed:
            found[f"{number} {name}"] = len(getattr(transfers, f"_{name}"))
        found[f"{number} requests"] = len(rank._requests)
        found[f"{number} jobs"] = int(rank.busy())
        found[f"{number} sessions"] = worker.manager.stats().sessions
    return {name: count for name, count in found.items() if count}


def _storm(replay: Replay, chance: random.Random, steps: int) -> None:
    roots = [[1000 * at + i for i in range(40)] for at in range(4)]
    requests: list[Request] = []
    for _ in range(steps):
        if chance.random() < 0.4:
            tail = [chance.randrange(100, 104) for _ in range(chance.randrange(6))]
            root = chance.choice(roots)[: chance.randrange(4, 40)]
            requests.append(replay.submit(Prompt([*root, *tail], chance.randrange(1, 9))))
        loading = [request for request in requests if request.phase is Phase.LOADING]
        if loading and chance.random() < 0.5:
            replay.abort(chance.choice(loading))
        if requests and chance.random() < 0.1:
            replay.abort(chance.choice(requests))
        replay.step()
    replay.finish(requests)
    replay.settle()
    replay.run(Prompt([31_998]))  # a step tells the ranks of the last ends
    replay.step()


def _check(mode: Mode, path: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int) -> None:
    configure(path, monkeypatch, host="1MiB")
    made = Made()
    with made.replay(mode) as replay:
        _storm(replay, random.Random(steps), steps)
        assert _left(made) == {}
        assert made.stats()["loads"] > 0


@pytest.mark.parametrize("mode", _MODES)
def test_f051_what_is_given_up_leaves_nothing_behind(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_thread_leaks: None
) -> None:
    _check(_MODES[mode], tmp_path, monkeypatch, steps=100)


@pytest.mark.stress
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", _MODES)
def test_many_requests_leave_nothing_behind(
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_thread_leaks: None,
    no_fd_leaks: None,
) -> None:
    _check(_MODES[mode], tmp_path, monkeypatch, steps=max(200, int(6000 * SCALE)))


def test_pages_of_layer_groups_are_numbered_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page 3 of one group is not page 3 of the other: a load into it is not given up."""
    configure(tmp_path, monkeypatch)
    made = Made()
    with made.replay(_MODES["groups"]):
        rank = made.workers[0]._rank
        assert rank is not None
        assert rank._pools.owned([[3], [4]]) == [{3}, {4}]
