"""KV that was held, offered, and damaged before it was loaded: never served, never waited for ever.

TensorRT-LLM cannot be told that a load failed. Another tier's copy takes the place of what is
damaged; where there is none, all ranks end the engine at the same call, with an error of its own.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.trtllm.running import PATIENT, Made, configure
from tierkv.testing.trtllm import Connector, EngineEnded, Mode, Prompt, Replay, Violation
from tierkv.testing.trtllm.reference import ReferenceWorker, reference
from tierkv.testing.trtllm.requests import Phase, Request
from tierkv_adapters.trtllm import transfers
from tierkv_adapters.trtllm.lost import Ending, LostLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = list(range(100, 141))
SOON = 'lost_after = "50ms"'
NEVER = 'lost_after = "never"'
PAGE = 4096
SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    made.close()


def _damage(
    made: Made, rank: int = 0, chance: random.Random | None = None, *, first: int | None = None
) -> None:
    """Flip every bit of a rank's memory tier.

    With ``chance`` of one page that is in use, with ``first`` of so many of those.
    """
    manager = made.workers[rank].manager
    assert manager is not None

    async def flip() -> None:
        memory = manager.engine.core.levels[0].backend.whole  # type: ignore[attr-defined]
        pages = [at for at in range(0, len(memory), PAGE) if any(memory[at : at + PAGE])][:first]
        if chance is not None:
            pages = [chance.choice(pages)]
        for at in pages:
            page = memory[at : at + PAGE]
            page[:] = bytes(255 - byte for byte in page)

    manager.call(flip)


def _stored(replay: Replay, tokens: list[int] | tuple[int, ...] = tuple(LONG)) -> Request:
    request = replay.run(Prompt(list(tokens), 8))
    replay.settle()
    return request


def _parked(replay: Replay, prompt: Prompt) -> Request:
    request = replay.submit(prompt)
    while request.phase is Phase.WAITING:
        replay.step()
    assert request.phase is Phase.LOADING
    return request


def _until(replay: Replay, true: Any) -> None:
    end = time.monotonic() + PATIENT
    while not true():
        assert time.monotonic() < end
        replay.step()


# ---------------------------------------------------------------------- another copy


@pytest.mark.parametrize("ranks", [1, 2])
def test_damage_after_the_hold_is_answered_from_another_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made, ranks: int
) -> None:
    configure(tmp_path, monkeypatch, disk=True, host="1MiB", serving=SOON)
    with made.replay(Mode(ranks=ranks)) as replay:
        first = _stored(replay)
        for worker in made.workers.values():
            assert worker.manager is not None
            worker.manager.flush()
        _damage(made, ranks - 1)
        again = replay.run(Prompt(first.tokens, 2))

        assert again.offered == 48
        assert all(worker.stats()["loads_stuck"] == 0 for worker in made.workers.values())


def test_a_block_that_somebody_stores_again_completes_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    """What is damaged is offered to nobody else: who asks next computes it, and stores it."""
    monkeypatch.setattr(transfers, "_AGAIN_S", 0.01)
    configure(tmp_path, monkeypatch, host="1MiB", serving=NEVER)
    with made.replay(Mode()) as replay:
        _stored(replay)
        _damage(made, first=2)  # the first block: its header, and what it holds
        waiting = _parked(replay, Prompt(LONG, 2))
        _until(replay, lambda: made.workers[0].stats()["loads_stuck"])
        _until(replay, lambda: made.stats()["damaged"])
        other = replay.run(Prompt(LONG, 3))
        assert other.offered == 0
        replay.finish([waiting])
        replay.settle()
        assert waiting.offered == 40
        assert made.workers[0].stats()["loads_mended"] == 1
        assert _stored(replay).offered == 40
        assert made.stats()["held_bytes"] > 0


# ---------------------------------------------------------------------- no other copy


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("api", ["first", "second"])
def test_what_nothing_can_mend_ends_the_engine_on_all_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made, api: str, ranks: int
) -> None:
    configure(tmp_path, monkeypatch, host="1MiB", serving=SOON)
    with made.replay(Mode(api=api, ranks=ranks)) as replay:  # type: ignore[arg-type]
        _stored(replay)
        _damage(made, random.Random(ranks).randrange(ranks))
        request = _parked(replay, Prompt(LONG, 2))
        with pytest.raises(EngineEnded) as caught:
            replay.finish([request])
        assert request.phase is Phase.LOADING  # and no layer ever read those pages
        assert len(caught.value.errors) == ranks
        assert len({str(error) for error in caught.value.errors}) == 1
        assert all(type(error) is LostLoadError for error in caught.value.errors)
        assert f"of request {request.id} are lost (damaged)" in str(caught.value)
        assert all(worker.errors == 0 for worker in made.workers.values())


def _storm(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Pages of any rank are damaged at any moment; whether the engine ended of it.

    The driver checks what layers read, and that every request comes to its end.
    """
    chance, made = random.Random(seed), Made()
    mode = Mode(
        ranks=chance.choice((1, 2)),
        api=chance.choice(("first", "second")),
        overlap=chance.random() < 0.5,
        chunk=chance.choice((None, 8)),
    )
    configure(path, monkeypatch, host="1MiB", disk=chance.random() < 0.3, serving=SOON)
    roots = [[1000 * at + i for i in range(40)] for at in range(3)]
    requests: list[Request] = []
    ended: EngineEnded | None = None
    with made.replay(mode) as replay:
        for root in roots:
            _stored(replay, root)
        try:
            for _ in range(80):
                if chance.random() < 0.3:
                    root = chance.choice(roots)[: chance.randrange(8, 40)]
                    requests.append(replay.submit(Prompt([*root, 7], chance.randrange(1, 5))))
                if chance.random() < 0.2:
                    _damage(made, chance.randrange(mode.ranks), chance)
                if requests and chance.random() < 0.1:
                    replay.abort(chance.choice(requests))
                replay.step()
            replay.finish(requests)
            replay.settle()
        except EngineEnded as error:
            ended = error
    if ended is None:
        assert all(request.over for request in requests)
        return False
    assert len(ended.errors) == mode.ranks
    assert len({str(error) for error in ended.errors}) == 1
    return True


@pytest.mark.parametrize("seed", range(6))
def test_damage_at_any_moment_is_never_served_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    _storm(seed, tmp_path, monkeypatch)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_much_damage_is_never_served_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_thread_leaks: None
) -> None:
    ended = []
    for seed in range(100, 100 + max(20, int(400 * SCALE))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ended.append(_storm(seed, folder, monkeypatch))
    assert {*ended} == {True, False}  # mended, or not offered again; or ended


def test_others_go_on_until_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    configure(tmp_path, monkeypatch, host="1MiB", serving=NEVER)
    with made.replay(Mode()) as replay:
        _stored(replay)
        _damage(made)
        request = _parked(replay, Prompt(LONG, 2))
        worker = made.workers[0]
        _until(replay, lambda: worker.stats()["loads_stuck"])
        other = replay.run(Prompt(list(range(5, 30)), 3))
        assert other.phase in (Phase.DONE, Phase.SAVING)
        assert request.phase is Phase.LOADING
        assert worker.stats()["loads_retried"] >= 3


def test_a_request_that_is_cancelled_in_time_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    """The first API ends it at once, and waits for its pages."""
    configure(tmp_path, monkeypatch, host="1MiB", serving=NEVER)
    with made.replay(Mode(api="first")) as replay:
        _stored(replay)
        _damage(made)
        request = _parked(replay, Prompt(LONG, 2))
        _until(replay, lambda: made.workers[0].stats()["loads_stuck"])
        replay.abort(request)
        replay.run(Prompt([1, 2, 3]))
        replay.finish([request])
        replay.settle()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_whose_order_never_came_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made, ranks: int
) -> None:
    configure(tmp_path, monkeypatch, serving=SOON)
    with made.replay(Mode(ranks=ranks)) as replay:
        _stored(replay)

        def broken(*_: Any) -> None:
            raise RuntimeError("planted")

        assert made.scheduler is not None
        assert made.scheduler._decisions is not None
        monkeypatch.setattr(made.scheduler._decisions, "allocated", broken)
        request = _parked(replay, Prompt(LONG, 2))
        with pytest.raises(EngineEnded, match="no step has ordered") as caught:
            replay.finish([request])
        assert len(caught.value.errors) == ranks


# ---------------------------------------------------------------------- at the same call


@pytest.mark.parametrize("seed", range(30))
def test_ranks_end_at_the_same_call_whoever_gives_up_first(seed: int, tmp_path: Path) -> None:
    """Ranks call in any order, and meet after every call; several may give up, at any call."""
    chance = random.Random(seed)
    world = chance.choice((2, 3, 4, 8))
    gives_up = {
        rank: chance.randrange(1, 6) for rank in chance.sample(range(world), chance.randrange(1, 3))
    }
    ranks = [Ending(rank, world) for rank in range(world)]
    for call in range(1, 12):
        found = []
        for rank in chance.sample(range(world), world):
            lost = f"lost by {rank}" if gives_up.get(rank, 99) <= call else None
            found.append(ranks[rank].call(lost, str(tmp_path)))
        if any(found):
            break
    assert call == min(gives_up.values()) + 2
    assert None not in found
    assert len(set(found)) == 1


def test_a_rank_by_itself_ends_at_once_and_needs_no_place_to_meet(tmp_path: Path) -> None:
    alone = Ending(0, 1)
    assert alone.call(None, None) is None
    assert alone.call("gone", None) == "gone"
    apart = Ending(1, 2)
    assert [apart.call("gone", None) for _ in range(3)] == [None, None, "gone"]
    unwritable = Ending(0, 2)
    assert [unwritable.call("gone", str(tmp_path / "no")) for _ in range(3)] == [None, None, "gone"]


def test_what_is_no_word_of_a_rank_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lost.json").write_text("{")
    assert Ending(0, 2).call(None, str(tmp_path)) is None
    assert "cannot be read" in caplog.text


# ---------------------------------------------------------------------- the driver


class _Ends(ReferenceWorker):
    """Ends the engine at a call of its own."""

    at: dict[int, int] = {}  # noqa: RUF012 - set by the test
    count = 0

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        self.count += 1
        if self.count == self.at.get(self.rank):
            raise LostLoadError("over")
        return super().get_finished(saving, loading)


@pytest.mark.parametrize(
    ("at", "ends", "rule"),
    [
        ({0: 3, 1: 3}, (LostLoadError,), None),
        ({0: 3, 1: 4}, (LostLoadError,), "ranks-apart"),
        ({1: 3}, (LostLoadError,), "ranks-apart"),
        ({0: 3, 1: 3}, (), "hook-raised"),
    ],
)
def test_the_driver_tells_how_ranks_end(
    at: dict[int, int], ends: tuple[type[Exception], ...], rule: str | None
) -> None:
    plain = reference(worker=type("Ends", (_Ends,), {"at": at}))
    connector = Connector(plain.scheduler, plain.worker, plain.settle, plain.close, ends)
    with Replay(connector, Mode(ranks=2)) as replay:
        if rule is None:
            with pytest.raises(EngineEnded, match="over") as ended:
                replay.run(Prompt([1, 2, 3], 20))
            assert len(ended.value.errors) == 2
        else:
            with pytest.raises(Violation) as caught:
                replay.run(Prompt([1, 2, 3], 20))
            assert caught.value.rule == rule
