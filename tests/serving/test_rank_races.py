"""Copies against whoever gets their pages next, and against tiers that do not answer.

Each rule has a rank that breaks it, which the same test must find out.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.rank_rig import GUARD, RankRig, prompt, start_save
from tierkv.testing.accelerator import SimDevice
from tierkv_adapters.serving.jobs import JobState
from tierkv_adapters.serving.orders import LoadOrder, RequestFacts, SaveOrder
from tierkv_adapters.serving.page_views import PagesView
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from tierkv.abc import Event
    from tierkv.testing.streams import SimStream

pytestmark = pytest.mark.usefixtures("no_thread_leaks")


class Slow:
    """Gathers that stop in the middle until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        sound = PagesView.pieces

        def pieces(
            view: PagesView, layer: int, tensor: str, start: int, stop: int
        ) -> Sequence[tuple[int, torch.Tensor]]:
            if start:  # the first block is read at once, the others later
                self.entered.set()
                assert self.go.wait(GUARD)
            return sound(view, layer, tensor, start, stop)

        monkeypatch.setattr(PagesView, "map", lambda view, sections, tokens: None)
        monkeypatch.setattr(PagesView, "pieces", pieces)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Gathers that wait."""
    found = Slow(monkeypatch)
    yield found
    found.go.set()


def _wait(condition: Callable[[], bool]) -> None:
    for _ in range(int(GUARD / 0.001)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came to that")


@contextmanager
def _thread(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """The worker's thread, for a call that may wait."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(GUARD)
    assert not thread.is_alive()


class NoFence(Rank):
    """Lets a step write to pages that a save still reads."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._board.fence = lambda taken: None  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [Rank, NoFence])
def test_a_step_waits_for_copies_out_of_its_pages(rank: type[Rank], slow: Slow) -> None:
    with RankRig(rank=rank, settings=RankSettings(fence_patience=GUARD)) as rig:
        ids = prompt(48)
        pages = start_save(rig, "a", ids)
        assert slow.entered.wait(GUARD)
        written = threading.Event()

        def step() -> None:
            rig.rank.begin(rig.step(ended=["a"], taken=array("q", pages[0])))
            rig.pages.spoil(pages[0])
            written.set()

        with _thread(step):
            _wait(lambda: written.is_set() or rig.rank.counters.fence_waits == 1)
            slow.go.set()
        assert rig.rank.drain(GUARD)
        assert rig.until(("a", "save"))["a", "save"].tokens == 48
        back, loaded = rig.load("b", ids)
        assert loaded.tokens == 48
        assert rig.right(ids, back, 48) == (rank is Rank)
        assert rig.rank.counters.fence_gave_up == 0


def test_other_pages_are_not_waited_for(slow: Slow) -> None:
    with RankRig() as rig:
        pages = start_save(rig, "a", prompt(48))
        assert slow.entered.wait(GUARD)
        rig.rank.begin(rig.step(taken=array("q", [max(pages[0]) + 1])))
        assert rig.rank.counters.fence_waits == 0
        assert rig.rank.saving("a")
        slow.go.set()
        assert rig.rank.drain(GUARD)
        assert not rig.rank.saving("a")


class NoDrop(Rank):
    """Leaves saves that have not begun alone, whoever has their pages."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        board, sound = self._board, self._board.fence

        def fence(taken: Sequence[set[int]]) -> None:
            waiting = [job for job in board._jobs if job.state is JobState.WAITING]
            for job in waiting:
                del board._jobs[job]
            sound(taken)
            board._jobs.update(dict.fromkeys(waiting))

        self._board.fence = fence  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [Rank, NoDrop])
def test_a_save_that_has_not_begun_is_dropped_with_its_pages(rank: type[Rank], slow: Slow) -> None:
    with RankRig(rank=rank) as rig:
        start_save(rig, "a", prompt(48, 1))
        assert slow.entered.wait(GUARD)  # the loop is busy: nothing else begins
        ids = prompt(48, 2)
        pages = start_save(rig, "b", ids)
        rig.rank.begin(rig.step(ended=["b"], taken=array("q", pages[0])))  # and nobody waits
        rig.pages.spoil(pages[0])
        slow.go.set()
        ended = rig.until(("a", "save"), ("b", "save"))
        back, loaded = rig.load("c", ids)
        if rank is Rank:
            assert ended["b", "save"].reason == "pages_taken"
            assert (ended["b", "save"].tokens, loaded.tokens) == (0, 0)
            assert rig.rank.counters.saves_skipped == 1
            assert rig.rank.counters.saves_failed == 0
        else:
            assert not rig.right(ids, back, loaded.tokens)
        assert ended["a", "save"].tokens == 48


def test_a_waiting_save_loses_only_what_slid_out_of_the_window(slow: Slow) -> None:
    with RankRig("sliding") as rig:
        start_save(rig, "a", prompt(48, 1))
        assert slow.entered.wait(GUARD)
        ids = prompt(48, 2)
        pages = start_save(rig, "b", ids)
        rig.rank.begin(rig.step(taken=array("q", pages[0][:4])))
        rig.pages.spoil(pages[0][:4])
        slow.go.set()
        assert rig.until(("a", "save"), ("b", "save"))["b", "save"].tokens == 48
        back, loaded = rig.load("c", ids)
        assert loaded.tokens == 48
        assert rig.right(ids, back, 48)


def test_f050_voided_and_back_while_its_save_is_in_flight(slow: Slow) -> None:
    with RankRig(settings=RankSettings(fence_patience=GUARD)) as rig:
        ids = prompt(48)
        pages = start_save(rig, "a", ids)
        assert slow.entered.wait(GUARD)
        rig.rank.begin(rig.step(saves=[SaveOrder("a", 40, 48)]))
        rig.rank.start_saves()  # waits behind the first one
        rig.rank.begin(rig.step(voided=["a"]))
        other = rig.take(48)

        def resume() -> None:
            grown = [rig.grown("a", [], other, replace=True)]
            taken = array("q", other[0] + pages[0])
            rig.rank.begin(rig.step(grown=grown, taken=taken, loads=[LoadOrder("a", 0, 48)]))
            rig.pages.spoil(pages[0])

        with _thread(resume):
            _wait(lambda: rig.rank.counters.fence_waits == 1)
            slow.go.set()
        rig.rank.start_loads()
        assert rig.rank.drain(GUARD)
        ends = {(e.kind, e.start): (e.tokens, e.reason) for e in rig.rank.poll()}
        assert ends == {
            ("save", 0): (48, None),
            ("save", 40): (40, "voided"),
            ("load", 0): (48, None),
        }
        assert rig.right(ids, other, 48)
        assert rig.rank.counters.saves_skipped == 1


class Unfilled(Rank):
    """Stores what a load should have brought, although it did not."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._board._drop_unfilled = lambda load, tokens: None  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [Rank, Unfilled])
def test_f021_what_a_load_did_not_bring_is_not_stored(rank: type[Rank]) -> None:
    with RankRig(rank=rank) as rig:
        ids = prompt(48)
        rig.save("a", ids[:16])
        pages = rig.take(48)
        rig.rank.begin(
            rig.step(
                fresh=[RequestFacts("b")],
                grown=[rig.grown("b", ids, pages)],
                loads=[LoadOrder("b", 0, 48)],
                saves=[SaveOrder("b", 0, 16), SaveOrder("b", 16, 48)],
            )
        )
        rig.rank.start_loads()
        rig.rank.start_saves()
        assert rig.rank.drain(GUARD)
        stored = {(e.start, e.tokens) for e in rig.rank.poll() if e.kind == "save"}
        assert stored == {(0, 16), (16, 16 if rank is Rank else 48)}
        back, loaded = rig.load("c", ids)
        assert rig.right(ids, back, loaded.tokens) == (rank is Rank)


def test_a_load_that_never_got_its_turn_ends_with_its_deadline(slow: Slow) -> None:
    with RankRig() as rig:
        ids = prompt(48)
        start_save(rig, "a", ids)
        assert slow.entered.wait(GUARD)  # the loop is busy
        rig.begin_load("b", ids, 48, deadline=0.05)
        rig.rank.wait_loads(["b"])
        (ended,) = rig.rank.poll()
        assert (ended.id, ended.tokens, ended.reason) == ("b", 0, "deadline")
        slow.go.set()
        assert rig.rank.drain(GUARD)
        assert [e.kind for e in rig.rank.poll()] == ["save"]


# ---------------------------------------------------------------------------- devices


class OwnStreams(SimDevice):
    """A device on which every thread has a stream of its own, as they do in torch."""

    def __init__(self) -> None:
        super().__init__("sim:1")
        self._model = threading.current_thread()

    def current(self) -> SimStream:
        """The model's stream in its own thread, an idle one elsewhere."""
        if threading.current_thread() is self._model:
            return self.compute
        return self.loads  # type: ignore[return-value]

    def block(self) -> threading.Event:
        """Let the model's stream stand still until the event is set."""
        event = threading.Event()
        self.compute.submit(lambda: event.wait(GUARD) and None, [])
        return event


class Hasty(Rank):
    """Does not say what work of the model a copy comes behind."""

    def _ready(self) -> Event | None:
        return None


def _turns(rig: RankRig, count: int = 300) -> None:
    """Let the engine's loop go on for a while."""

    async def turn() -> None:
        await asyncio.sleep(0.0002)

    for _ in range(count):
        rig.manager.call(turn)


@pytest.mark.parametrize("rank", [Rank, Hasty])
def test_a_save_comes_behind_the_forward_pass(rank: type[Rank]) -> None:
    device = OwnStreams()
    with RankRig(device=device, rank=rank) as rig:
        ids = prompt(48)
        go = device.block()
        start_save(rig, "a", ids)
        if rank is Rank:
            _turns(rig)
            assert rig.rank.saving("a")
        else:
            rig.until(("a", "save"))
        go.set()
        assert rig.rank.drain(GUARD)
        back, loaded = rig.load("b", ids)
        assert loaded.tokens == 48
        assert rig.right(ids, back, 48) == (rank is Rank)


@pytest.mark.parametrize("rank", [Rank, Hasty])
def test_a_load_comes_behind_what_still_reads_its_pages(rank: type[Rank]) -> None:
    import torch

    from tierkv.abc import Move

    device = OwnStreams()
    with RankRig(device=device, rank=rank) as rig:
        ids = prompt(48)
        pages, _ = rig.save("a", ids)
        device.compute.record().synchronize()
        tensor = rig.pages.pools.anchor
        rig.free[0] = [pages[0][-1], *rig.free[0]]  # the next request gets a page that is read
        old = tensor[pages[0][-1]].clone()
        seen = torch.zeros_like(old)
        go = device.block()
        device.copy([Move(seen, tensor[pages[0][-1]])], device.compute)
        rig.rank.begin(rig.step(ended=["a"]))
        rig.begin_load("b", ids, 48)
        if rank is Rank:
            _turns(rig)
            assert rig.rank.poll() == []
        else:
            rig.until(("b", "load"))
        go.set()
        assert rig.rank.drain(GUARD)
        device.compute.record().synchronize()
        assert torch.equal(seen, old) == (rank is Rank)
