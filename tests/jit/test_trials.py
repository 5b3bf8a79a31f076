"""Trials of machine code: one verdict a process, wherever it is asked for; no compiler needed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tierkv import jit
from tierkv.jit import llvm, trials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_refusals", [])
    monkeypatch.setattr(trials, "_wanted", {})


@contextmanager
def _another_compiles() -> Iterator[None]:
    """Another thread holds the lock of who compiles, until this ends."""
    held, done = threading.Event(), threading.Event()

    def compiling() -> None:
        with llvm.compiling:
            held.set()
            done.wait(60)

    other = threading.Thread(target=compiling)
    other.start()
    assert held.wait(60)
    try:
        yield
        assert other.is_alive(), "it was let go before its time"
    finally:
        done.set()
        other.join(60)


class Maker:
    """Makes a function that adds; tells in which threads it was asked to."""

    def __init__(self, error: BaseException | None = None, wrong: int = 0) -> None:
        self.threads: list[int] = []
        self.error = error
        self.wrong = wrong

    def make(self, number: int) -> Callable[[int], int] | None:
        self.threads.append(threading.get_ident())
        if self.error is not None:
            raise self.error
        return None if number < 0 else lambda other: number + other + self.wrong

    def right(self, found: Callable[[int], int], number: int) -> bool:
        return found(1) == number + 1

    def tried(self) -> jit.Tried[Callable[[int], int], int]:
        return jit.Tried("sums", self.make, self.right)


def test_it_is_made_and_tried_once_for_each_key() -> None:
    maker = Maker()
    sums = maker.tried()
    assert not sums.known(3)
    found = sums(3)
    assert found is not None
    assert found(4) == 7
    assert sums(3) is found
    assert sums.settle(3) is found
    assert sums(5) is not None
    assert len(maker.threads) == 2
    assert jit.refusals() == ()


def test_what_a_machine_has_no_use_for_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    maker = Maker()
    sums = maker.tried()
    assert sums(-1) is None
    assert sums(-1) is None
    assert sums.known(-1)
    assert len(maker.threads) == 1
    assert not caplog.records


@pytest.mark.parametrize("how", ["refused", "wrong", "the sample fails"])
def test_what_is_no_use_is_told_once_of_a_family(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    maker = Maker(OSError("no such target") if how == "refused" else None, int(how == "wrong"))
    if how == "the sample fails":
        maker.right = lambda found, number: bool(1 // 0)  # type: ignore[method-assign]
    sums = maker.tried()
    with caplog.at_level(logging.INFO, "tierkv.jit"):
        assert [sums(n) for n in (1, 2, 1)] == [None] * 3
    why = {
        "refused": "OSError: no such target",
        "wrong": "does not do what library calls do",
        "the sample fails": "ZeroDivisionError",
    }[how]
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert all(why in r.message and "sums" in r.message for r in caplog.records)
    assert "extra 'fast'" in caplog.text
    assert [(r.family, r.name) for r in jit.refusals()] == [("sums", "1"), ("sums", "2")]
    assert why in jit.refusals()[0].why


def test_nothing_is_made_where_a_loop_runs() -> None:
    maker = Maker()
    sums = maker.tried()

    async def main() -> None:
        assert sums(1) is None
        assert sums(1) is None
        assert maker.threads == []
        assert jit.behind()
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, jit.catch_up) == 1
        assert not jit.behind()
        assert sums(1) is not None

    asyncio.run(main())
    assert len(maker.threads) == 1
    assert maker.threads[0] != threading.get_ident()


def test_what_may_come_later_is_made_by_whoever_catches_up() -> None:
    maker = Maker()
    sums = maker.tried()
    with jit.later():
        with jit.later():
            assert sums(1) is None
        assert sums(2) is None
    assert sums(3) is not None
    assert len(maker.threads) == 1
    stopped = iter([False, True])
    assert jit.catch_up(lambda: next(stopped)) == 1
    assert jit.behind()
    assert jit.catch_up() == 1
    assert jit.catch_up() == 0
    assert sums(1) is not None
    assert sums(2) is not None


def test_a_sample_may_ask_for_what_it_is_about_and_for_others() -> None:
    inner = Maker().tried()
    seen: list[bool] = []

    def right(found: object, number: int) -> bool:
        seen.extend([outer(number) is None, inner(number) is not None])
        return True

    outer: jit.Tried[object, int] = jit.Tried("outer", lambda number: object(), right)
    with jit.later():
        assert outer(1) is None
    jit.catch_up()
    assert outer(1) is not None
    assert seen == [True, True]


def test_whoever_catches_up_stops_while_another_thread_compiles() -> None:
    maker = Maker()
    sums = maker.tried()
    with jit.later():
        assert sums(1) is None
    looks = iter([False, False, True])
    with _another_compiles():
        assert jit.catch_up(lambda: next(looks)) == 0
    assert maker.threads == []
    assert jit.behind(), "what is left is still noted"
    assert jit.catch_up() == 1


def test_a_fork_comes_in_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the lock that the next piece needs, too: it is not taken back at once."""
    maker = Maker()
    sums = maker.tried()
    with jit.later():
        for number in range(3):
            assert sums(number) is None
    came: list[tuple[bool, int]] = []

    def fork() -> None:
        came.append((llvm.compiling.acquire(timeout=30), len(maker.threads)))
        llvm.compiling.release()

    def pause(_: float) -> None:
        other = threading.Thread(target=fork)
        other.start()
        other.join(60)

    monkeypatch.setattr("tierkv.jit.trials.time.sleep", pause)
    assert jit.catch_up() == 3
    assert came == [(True, 1), (True, 2), (True, 3)]


def test_nobody_waits_for_who_compiles() -> None:
    """Library calls do it meanwhile, and nothing is lost: it is asked for again."""
    maker = Maker()
    sums = maker.tried()
    with _another_compiles():
        assert sums(1) is None
        assert maker.threads == []
    assert sums(1) is not None


def test_who_is_interrupted_left_no_verdict() -> None:
    maker = Maker(KeyboardInterrupt())
    sums = maker.tried()
    with pytest.raises(KeyboardInterrupt):
        sums(1)
    assert not sums.known(1)
    maker.error = None
    assert sums(1) is not None


def test_a_fork_waits_for_the_verdict() -> None:
    """A child that knew half of it would do without for ever."""
    begun = threading.Event()
    maker = Maker()

    def right(found: Callable[[int], int], number: int) -> bool:
        begun.set()
        threading.Event().wait(0.3)  # what takes long; the fork comes meanwhile
        return True

    sums = jit.Tried("slow sums", maker.make, right)
    other = threading.Thread(target=sums, args=(1,))
    other.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(40 + (sums(1) is not None) + (sums(2) is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    other.join(60)
