"""Conformance suite for admission.

A plug-in's test file subclasses it and says how to make one::

    class TestMine(AdmissionTests):
        def make(self) -> Mine:
            return Mine()

pytest then runs every check. They use plain asserts and need no fixtures; what they must catch is
shown by :mod:`tierkv.testing.admission_mutants`. They hold for any rule: what is admitted is the
rule's own affair, as long as it can be replayed, is bounded, and does not refuse for ever.
"""

from __future__ import annotations

import random
import tracemalloc
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tierkv.abc import Admission

__all__ = ["AdmissionTests"]

_DAY: Final = 86400.0
_LARGEST_IDENT: Final = (1 << 64) - 1
_PARTS: Final = 2000
_MEMORY: Final = 1 << 19  # bytes
_NBYTES: Final = 4096


class AdmissionTests(ABC):
    """What every :class:`~tierkv.abc.Admission` must do, whatever it admits."""

    @abstractmethod
    def make(self) -> Admission:
        """Return a new one that has seen nothing."""

    def _live(self, gate: Admission, seed: int, *, nosy: bool = False) -> list[bool]:
        """A random life; ``nosy`` asks more often than the answer is used."""
        order = random.Random(seed)
        answers, now = [], 100.0
        gate.resize(float(_PARTS))
        for _ in range(3000):
            now += order.expovariate(1 / 60)
            ident, victim = order.randrange(300), order.randrange(300)
            nbytes, demand = order.randint(1, _NBYTES), order.random() < 0.5
            full = order.random() < 0.7
            if order.random() < 0.6:
                gate.seen(ident, now)
            if nosy:
                for other in (ident, victim, order.getrandbits(0) + 7):
                    gate.admit(other, nbytes, now, demand=demand, victim=victim)
            asked = victim if full else None
            answers.append(gate.admit(ident, nbytes, now, demand=demand, victim=asked))
            if answers[-1] and order.random() < 0.9:
                gate.wrote(nbytes, now)
        return answers

    def test_the_same_calls_give_the_same_answers(self) -> None:
        """No clock, no randomness, no state outside: a decision log must replay."""
        first = self._live(self.make(), 1)
        assert self._live(self.make(), 1) == first

    def test_asking_changes_nothing(self) -> None:
        """Stores are tried again, and demotions are weighed before they are made."""
        assert self._live(self.make(), 2, nosy=True) == self._live(self.make(), 2)

    def test_what_is_asked_for_again_and_again_gets_in(self) -> None:
        """A rule that refuses for ever makes a tier useless."""
        gate = self.make()
        gate.resize(float(_PARTS))
        now = 0.0
        for _ in range(50):
            gate.seen(5, now)
            gate.wrote(_NBYTES, now)
            now += 1.0
        now += 2 * _DAY
        gate.seen(5, now)
        assert gate.admit(5, 1, now, demand=True)
        assert gate.admit(5, 1, now, demand=True, victim=6)

    def test_what_is_given_back_was_never_taken(self) -> None:
        """Reservations that come to nothing must not use anything up."""
        gate = self.make()
        gate.resize(float(_PARTS))
        for _ in range(3):
            gate.seen(5, 0.0)
        wanted = [gate.admit(5, nbytes, 0.0, demand=True) for nbytes in (1, _NBYTES, 1 << 20)]
        for _ in range(2000):
            gate.wrote(_NBYTES, 0.0)
            gate.wrote(-_NBYTES, 0.0)
        after = [gate.admit(5, nbytes, 0.0, demand=True) for nbytes in (1, _NBYTES, 1 << 20)]
        assert after == wanted

    def test_every_ident_is_taken(self) -> None:
        """All 64 bits are used."""
        gate = self.make()
        for ident in (0, 1, 1 << 63, _LARGEST_IDENT):
            for _ in range(20):
                gate.seen(ident, 1.0)
            assert gate.admit(ident, 1, 1.0 + _DAY, demand=True, victim=ident ^ 1) in (True, False)

    def test_parts_are_told_apart(self) -> None:
        """Idents that differ in a few bits only are different parts."""
        for bit in (0, 31, 32, 47, 48, 63):
            gate = self.make()
            gate.resize(float(_PARTS))
            if gate.admit(1 << bit, 1, 0.0, demand=True, victim=3):
                continue  # a rule that does not go by uses
            for _ in range(30):
                gate.seen(3 ^ (1 << bit), 0.0)
            assert gate.admit(3 ^ (1 << bit), 1, 0.0, demand=True, victim=3), f"bit {bit}"
            assert not gate.admit(3, 1, 0.0, demand=True, victim=3 ^ (1 << bit)), f"bit {bit}"

    def test_memory_is_bounded(self) -> None:
        """By the size of the tier, however many parts are asked for."""
        gate = self.make()
        gate.resize(float(_PARTS))
        tracemalloc.start()
        try:
            for ident in range(20_000):
                gate.seen(ident * 0x9E3779B97F4A7C15 & _LARGEST_IDENT, float(ident))
            assert tracemalloc.get_traced_memory()[0] < _MEMORY
        finally:
            tracemalloc.stop()

    def test_a_tier_may_have_any_size(self) -> None:
        """It grows and shrinks while it is in use; uses of late are not forgotten by that."""
        gate = self.make()
        gate.resize(float(_PARTS))
        for _ in range(10):
            gate.seen(5, 0.0)
        before = gate.admit(5, 1, 0.0, demand=True, victim=6)
        for parts in (0.5, 1.0, 1e5, 3.0, 2.0**40, float(_PARTS)):
            gate.resize(parts)
            assert gate.admit(5, 1, 0.0, demand=True, victim=6) == before, f"{parts} parts"

    def test_its_option_makes_another_one(self) -> None:
        """A decision log tells a configuration by name and option."""
        gate = self.make()
        assert gate.name
        again = type(gate)(gate.option)
        assert self._live(again, 3) == self._live(self.make(), 3)
