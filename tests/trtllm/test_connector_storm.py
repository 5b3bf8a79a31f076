"""Little memory, many prompts: holds come and go all the time, and no offer is ever wrong."""

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

    from tierkv.testing.trtllm import Request

SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))


def _storm(seed: int, mode: Mode, steps: int) -> dict[str, int]:
    rng, made = random.Random(seed), Made()
    roots = [[1000 * at + i for i in range(40)] for at in range(8)]
    with made.replay(mode) as replay:
        requests: list[Request] = []
        for _ in range(steps):
            if rng.random() < 0.3:
                root = rng.choice(roots)[: rng.randrange(4, 40)]
                tail = [rng.randrange(100, 104) for _ in range(rng.randrange(6))]
                salt = rng.choice((None, "a"))
                requests.append(replay.submit(Prompt([*root, *tail], rng.randrange(1, 9), salt)))
            elif requests and rng.random() < 0.1:
                replay.abort(rng.choice(requests))
            replay.step()
        replay.finish(requests)
        replay.settle()
        assert all(request.phase in (Phase.DONE, Phase.SAVING) for request in requests)
        found = made.stats()
        for worker in made.workers.values():
            stats = worker.stats()
            # what was offered was held: every load brought all of it, at its first try
            ended = stats["loads_retried"] + stats["loads_stuck"] + stats["corrupt"]
            assert (ended, worker.errors) == (0, 0)
        assert made.scheduler is not None
        assert found["errors"] == 0
    return found


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_offers_in_a_storm_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    configure(tmp_path, monkeypatch, host="512KiB", disk=disk)
    found = _storm(1, Mode(ranks=2, overlap=True, chunk=8), 300)

    assert found["offered_tokens"] > 0
    assert found["returned"] > 0  # holds had to make room


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_many_storms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(max(2, int(40 * SCALE))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        configure(folder, monkeypatch, host="512KiB", disk=bool(seed % 2))
        modes = (
            Mode(api="first", overlap=True),
            Mode(ranks=4, chunk=8),
            Mode(pool="grouped", windows=(None, 12), chunk=8, overlap=True),
        )
        _storm(seed, modes[seed % 3], 400)
