"""Conformance suite for eviction policies.

A plug-in's test file subclasses it and says how to make the policy::

    class TestMine(PolicyTests):
        def make(self) -> Mine:
            return Mine()

pytest then runs every check. The checks use plain asserts and need no fixtures; what they must
catch is shown by :mod:`tierkv.testing.policy_mutants`. They hold for any order of eviction; the
order itself is the policy's own affair. A policy that listens to hints or scores says so in its
test class (``follows_shifts``, ``follows_scores``), and is then held to it.
"""

from __future__ import annotations

import random
from typing import ClassVar

from tierkv.testing.policy_memory import NBYTES, PolicyMemoryTests

__all__ = ["PolicyTests"]


class PolicyTests(PolicyMemoryTests):
    """What every :class:`~tierkv.abc.Policy` must do, whatever it prefers."""

    follows_shifts: ClassVar[bool] = False
    """Whether :meth:`~tierkv.abc.Policy.shift` moves a row among others that are alike."""
    follows_scores: ClassVar[bool] = False
    """Whether :meth:`~tierkv.abc.Policy.score` moves a row among others that are alike."""

    def test_has_a_name(self) -> None:
        """The name by which it is asked for."""
        name = self.make().name
        assert isinstance(name, str)
        assert name == name.strip().lower() != ""

    def test_new_rows_are_held(self) -> None:
        """A row is not evictable before it was released."""
        policy = self.make()
        assert policy.victim() is None
        policy.insert(3, NBYTES, 0)
        assert policy.victim() is None
        policy.release(3)
        assert policy.victim() == 3

    def test_held_rows_are_never_victims(self) -> None:
        """Whatever is done, a victim is a row that was released last."""
        rng = random.Random(1)
        policy, evictable = self._filled(30), set(range(30))
        for clock in range(30, 1500):
            row = rng.randrange(30)
            action = rng.randrange(3)
            if action == 0:
                policy.touch(row, clock)
            elif action == 1:
                policy.hold(row)
                evictable.discard(row)
            else:
                policy.release(row)
                evictable.add(row)
            victim = policy.victim()
            assert (victim is None) == (not evictable)
            assert victim is None or victim in evictable

    def test_victim_changes_nothing(self) -> None:
        """Asking again gives the same answer."""
        policy = self._filled(10)
        assert len({policy.victim() for _ in range(20)}) == 1

    def test_release_and_hold_are_idempotent(self) -> None:
        """They set a state; they do not count."""
        policy = self._filled(1)
        policy.release(0)
        policy.release(0)
        policy.hold(0)
        assert policy.victim() is None
        policy.hold(0)
        policy.hold(0)
        policy.release(0)
        assert policy.victim() == 0

    def test_removed_rows_are_forgotten(self) -> None:
        """A removed row is not offered, evictable as it was."""
        policy = self._filled(4)
        for row in (2, 0, 3):
            policy.remove(row)
        assert policy.victim() == 1
        policy.remove(1)
        assert policy.victim() is None

    def test_a_recycled_row_is_new(self) -> None:
        """A row number that stands for another part has nothing of the part before."""
        policy = self._filled(2)
        policy.remove(0)
        policy.insert(0, NBYTES, 10)
        assert policy.victim() == 1, "held again"
        policy.release(0)
        assert policy.victim() == 1, "and the newer of the two"

    def test_an_expedited_row_goes_first(self) -> None:
        """Whether it was evictable when it was expedited, or becomes so later."""
        policy = self._filled(10)
        policy.expedite(7)
        assert policy.victim() == 7
        policy.hold(8)
        policy.hold(7)
        policy.expedite(8)
        policy.release(8)
        assert policy.victim() == 8

    def test_touch_ranks_an_expedited_row_again(self) -> None:
        """A part whose prefix is whole again is as good as others."""
        policy = self._filled(4)
        policy.expedite(3)
        policy.touch(3, 50)
        assert policy.victim() != 3

    def test_the_victim_has_the_smallest_rank(self) -> None:
        """Ranks compare parts of several partitions: they must agree with the order inside one."""
        rng = random.Random(2)
        policy, rows = self._filled(40), set(range(40))
        for clock in range(40, 400):
            policy.touch(rng.choice(sorted(rows)), clock)
            victim = policy.victim()
            assert victim is not None
            assert policy.rank(victim) == min(policy.rank(row) for row in rows)
            if clock % 20 == 0:
                policy.remove(victim)
                rows.discard(victim)

    def test_a_new_row_is_not_the_next_victim(self) -> None:
        """What was just stored or demoted outlives what lay untouched for longer (K7)."""
        policy = self.make()
        for row in range(6):
            policy.insert(row, NBYTES, 100 + row)
            policy.release(row)
        assert policy.victim() in range(5)

    def test_every_row_goes_in_the_end(self) -> None:
        """No row is lost on the way, however it was held and touched."""
        rng = random.Random(3)
        policy = self._filled(50)
        for clock in range(50, 800):
            row = rng.randrange(50)
            policy.hold(row)
            policy.touch(row, clock)
            policy.release(row)
        assert sorted(self._drain(policy, 50)) == list(range(50))

    def test_resize_keeps_every_row(self) -> None:
        """Another size changes weights, not what is tracked."""
        policy = self._filled(20)
        gone = []
        for size in (1.0, 1000.0, 0.25, 20.0):
            policy.resize(size)
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
            gone.append(victim)
        assert sorted(gone + self._drain(policy, 20)) == list(range(20))

    def test_is_deterministic(self) -> None:
        """Equal calls give equal answers: decisions are replayed offline."""

        def run() -> list[int | None]:
            rng = random.Random(4)
            policy = self._filled(30)
            answers = []
            for clock in range(30, 300):
                policy.touch(rng.randrange(30), clock // 10)
                answers.append(policy.victim())
            return answers

        assert run() == run()

    def test_advice_frees_nobody(self) -> None:
        """Shifts, scores and new sizes change an order at most, never who may leave."""
        rng = random.Random(5)
        policy, evictable = self._filled(20), set(range(20))
        for row in range(0, 20, 2):
            policy.hold(row)
            evictable.discard(row)
        for _ in range(300):
            row = rng.randrange(20)
            kind = rng.randrange(3)
            if kind == 0:
                policy.shift(row, rng.uniform(-100.0, 100.0))
            elif kind == 1:
                policy.score(row, rng.random())
            else:
                policy.resized(row, rng.randrange(1, 2 * NBYTES))
            assert policy.victim() in evictable
        gone = self._drain(policy, 20)
        assert sorted(gone) == sorted(evictable)

    def test_shifts_move_the_order(self) -> None:
        """A row shifted far back goes first, one shifted forward does not; a touch undoes it.

        A policy that does not follow shifts keeps its order.
        """
        start = 10_000
        policy = self._filled(10, start)
        order = self._drain(self._filled(10, start), 10)
        if not self.follows_shifts:
            policy.shift(order[-1], -1000.0)
            policy.shift(order[0], 1000.0)
            assert self._drain(policy, 10) == order
            return
        policy.shift(9, -1000.0)
        assert policy.victim() == 9
        policy.touch(9, start + 20)
        assert policy.victim() == 0
        policy.shift(0, 1000.0)
        assert policy.victim() == 1
        for row in range(10):
            policy.touch(row, start + 30 + row)
        assert policy.victim() == 0, "touched: all shifts are over"
        policy.expedite(4)
        policy.shift(4, 1000.0)
        assert policy.victim() == 4, "its prefix is gone, whatever was hinted"

    def test_scores_move_the_order(self) -> None:
        """Less important rows go before others that are alike; a touch does not undo it.

        A policy that does not follow scores keeps its order.
        """
        policy = self._filled(10)
        order = self._drain(self._filled(10), 10)
        policy.score(6, 0.0)
        policy.score(0, 1.0)
        if not self.follows_scores:
            assert self._drain(policy, 10) == order
            return
        assert policy.victim() == 6
        policy.touch(6, 20)
        assert policy.victim() == 6
        policy.expedite(2)
        policy.score(2, 1.0)
        assert policy.victim() == 2, "its prefix is gone, whatever it scored"
        policy.score(6, 1.0)
        policy.remove(2)
        assert policy.victim() not in (0, 6)
