"""The half of the policies' suite that is about time, memory, and what is remembered by name."""

from __future__ import annotations

import time
import tracemalloc
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tierkv.abc import Policy

__all__ = ["NBYTES", "PolicyMemoryTests"]

NBYTES: Final = 4096
"""Bytes of the parts that the checks use."""

_HELD: Final = 6_000
_CYCLES: Final = 1_000
_CPU_S: Final = 0.3  # a policy needs a hundredth of it, a scan of all rows several times as much
_LEAK_BYTES: Final = 1 << 18
_GHOST_ROWS: Final = 300
_GHOST_BYTES: Final = 1 << 16  # arrays, dicts and heaps grow by steps
_LARGEST_IDENT: Final = (1 << 64) - 1
_SPREAD: Final = 0x9E3779B97F4A7C15
_FAR: Final = 300_000


class PolicyMemoryTests(ABC):
    """What a policy may cost, and what it may remember; part of ``PolicyTests``."""

    @abstractmethod
    def make(self) -> Policy:
        """Return a new policy that tracks nothing."""

    def _filled(self, rows: int, start: int = 0) -> Policy:
        """Rows 0.. of parts named 1.., inserted at clocks ``start``.., all evictable."""
        policy = self.make()
        for row in range(rows):
            policy.insert(row, NBYTES, start + row, row + 1)
            policy.release(row)
        return policy

    def _cycled(self, row: int, ident: int, *, evicted: bool) -> tuple[Policy, list[int]]:
        """Six rows, of which the first victim leaves; ``ident`` takes its place, as ``row``.

        Row -1 is the victim's own. Returns the policy, and the order in which rows leave then,
        the new row written as 99.
        """
        policy = self._filled(6)
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim, evicted=evicted, ident=victim + 1)
        new = victim if row < 0 else row
        policy.insert(new, NBYTES, 10, victim + 1 if ident < 0 else ident)
        policy.release(new)
        for clock, other in enumerate((new, 5), 11):
            policy.touch(other, clock)
        return policy, [99 if gone == new else gone for gone in self._drain(policy, 6)]

    def _drain(self, policy: Policy, rows: int) -> list[int]:
        """Evict until nothing is offered, but not for ever."""
        gone: list[int] = []
        while (victim := policy.victim()) is not None and len(gone) <= rows:
            policy.remove(victim, evicted=True)
            gone.append(victim)
        return gone

    def test_held_rows_cost_nothing(self) -> None:
        """Thousands of leased rows at the cold end are never looked at one by one."""
        policy = self.make()
        for row in range(_HELD):
            policy.insert(row, NBYTES, row)
        for row in range(0, _HELD, 2):  # some of them popular
            policy.touch(row, _HELD + row)
            policy.touch(row, 2 * _HELD + row)
        start = time.process_time()
        for row in range(_HELD, _HELD + _CYCLES):
            policy.insert(row, NBYTES, 3 * _HELD + row, row)
            policy.release(row)
            policy.touch(row, 3 * _HELD + row)
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim, evicted=True, ident=victim)
        assert time.process_time() - start < _CPU_S

    def test_memory_is_bounded(self) -> None:
        """Histories and stale entries do not pile up while few rows come and go."""
        policy = self._filled(16)
        rounds = 5_000
        held = 0
        tracemalloc.start()
        try:
            for clock in range(16, 16 + rounds):
                row = clock % 16
                policy.hold(row)
                policy.touch(row, clock)
                policy.release(row)
                policy.expedite(row)
                policy.remove(row)
                policy.insert(row, NBYTES, clock)
                policy.release(row)
                if clock == rounds // 10:
                    held = tracemalloc.get_traced_memory()[0]
            grown = tracemalloc.get_traced_memory()[0] - held
        finally:
            tracemalloc.stop()
        assert grown < _LEAK_BYTES

    def test_ghosts_are_bounded(self) -> None:
        """However many parts come and go, no more is remembered than of some for each row."""
        policy = self.make()
        policy.resize(float(_GHOST_ROWS))
        for row in range(_GHOST_ROWS):
            policy.insert(row, NBYTES, row, row * _SPREAD & _LARGEST_IDENT)
            policy.release(row)
        idents = [row * _SPREAD & _LARGEST_IDENT for row in range(_GHOST_ROWS)]
        full, end = 5 * _GHOST_ROWS, 9 * _GHOST_ROWS
        held = 0
        tracemalloc.start()
        try:
            for clock in range(_GHOST_ROWS, end):
                victim = policy.victim()
                assert victim is not None
                policy.remove(victim, evicted=True, ident=idents[victim])
                idents[victim] = clock * _SPREAD & _LARGEST_IDENT
                policy.insert(victim, NBYTES, clock, idents[victim])
                policy.release(victim)
                if clock == full:
                    held = tracemalloc.get_traced_memory()[0]
            grown = tracemalloc.get_traced_memory()[0] - held
        finally:
            tracemalloc.stop()
        assert grown < _GHOST_BYTES

    def test_ghosts_go_by_name(self) -> None:
        """What a row number stood for before says nothing of the part that takes it now."""
        _, same_row = self._cycled(-1, 1000, evicted=True)
        _, other_row = self._cycled(50, 1000, evicted=True)
        assert same_row == other_row

    def test_what_was_not_evicted_leaves_no_ghost(self) -> None:
        """A part that an owner took out is new when it returns."""
        _, returned = self._cycled(50, -1, evicted=False)
        _, new = self._cycled(50, 1000, evicted=False)
        assert returned == new

    def test_names_have_64_bits(self) -> None:
        """The whole range of names can be tracked, remembered and found."""
        policy = self._filled(3)
        try:
            for clock in range(10, 20):
                policy.insert(7, NBYTES, clock, _LARGEST_IDENT)
                policy.release(7)
                policy.remove(7, evicted=True, ident=_LARGEST_IDENT)
        except (OverflowError, ValueError) as error:
            raise AssertionError(f"a name of 64 bits is refused: {error}") from error
        assert sorted(self._drain(policy, 3)) == [0, 1, 2]

    def test_rows_may_lie_far_apart(self) -> None:
        """Rows are numbered across tiers and tenants: a small partition has few of many."""
        near, far = self._filled(20), self.make()
        for row in range(20):
            far.insert(row * _FAR, NBYTES, row, row + 1)
            far.release(row * _FAR)
        for clock, row in enumerate((3, 3, 17, 5), 20):
            near.touch(row, clock)
            far.touch(row * _FAR, clock)
        assert self._drain(far, 20) == [row * _FAR for row in self._drain(near, 20)]
