"""The recorded half of the cost model: what the decision object is told of costs, and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.recording import Recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.cost import LoadChoice, Run

__all__ = ["Costed"]


class Costed(Recorded):
    """Learns what tiers cost and which are broken; decides what is worth loading.

    A tier whose breaker for reads is not closed is no place for lookups: its copies are passed
    over, and where no other copy is there the reason is FAILED. A tier whose breaker for writes
    is open gets no demotions: what would be demoted there goes to the next slower tier, or is let
    go when room is needed.
    """

    def admit(self, tier: int, direction: str, now: float) -> bool:
        """Whether a batch may start; where the breaker is open, as its probe.

        Args:
            tier: Its tier.
            direction: ``"read"`` or ``"write"``.
            now: Time.
        """
        breaker = self.costs.breaker(tier, direction)
        if breaker.closed:
            return True  # nothing changes: not worth a line of the log
        passed = breaker.admit(now)
        self._record("admit", now, (tier, direction), passed)
        self._look_round(now)
        return passed

    def sample(self, tier: int, direction: str, nbytes: int, seconds: float, now: float) -> None:
        """A batch came back well: so many bytes in so many seconds. Closes the breaker."""
        self.costs.sample(tier, direction, nbytes, seconds, now)
        self._record("sample", now, (tier, direction, nbytes, seconds), None)
        self._look_round(now)

    def failed(self, tier: int, direction: str, now: float, *, hung: bool = False) -> None:
        """A batch failed as a whole, or (``hung``) has not come back in time."""
        self.costs.failed(tier, direction, now, hung=hung)
        self._record("failed", now, (tier, direction, hung), None)
        self._look_round(now)

    def alive(self, tier: int, now: float) -> None:
        """What hung has come back after all: a probe need not wait any longer."""
        self.costs.alive(tier, now)
        self._record("alive", now, (tier,), None)
        self._look_round(now)

    def untried(self, tier: int, direction: str, now: float) -> None:
        """A batch that might have been the probe ended without telling anything of the tier."""
        breaker = self.costs.breaker(tier, direction)
        if not breaker.closed:
            breaker.untried(now)
            self._record("untried", now, (tier, direction), None)
            self._look_round(now)

    def computed(self, space: bytes, tokens: int, seconds: float, now: float) -> None:
        """A prefill of ``tokens`` tokens of a space (its fingerprint) took ``seconds``."""
        self.costs.computed(space, tokens, seconds)
        self._record("computed", now, (space, tokens, seconds), None)

    def coded(self, chain: str, raw: int, stored: int, seconds: float, now: float) -> None:
        """Decoding ``raw`` bytes out of ``stored`` took ``seconds`` on one core."""
        self.costs.coded(chain, raw, stored, seconds)
        self._record("coded", now, (chain, raw, stored, seconds), None)

    def choose_chain(self, tier: int, candidate: str, cores: int, now: float) -> str:
        """Chain of further frames of a tier whose codec is chosen by cost; recorded if it changes.

        May be called only while nothing is reserved in the tier.
        """
        wanted = self.costs.wanted_chain(tier, candidate, cores)
        if wanted != self.costs.chain(tier):
            self.costs.set_chain(tier, wanted)
            self._record("choose_chain", now, (tier, candidate, cores), wanted)
        return wanted

    def plan_load(
        self, space: bytes, runs: Sequence[Run], budget: float | None, now: float
    ) -> LoadChoice:
        """How much of a prefix is worth loading; see :func:`tierkv.decisions.cost.choose`.

        Args:
            space: Fingerprint of its space.
            runs: The prefix.
            budget: Seconds left; None: no deadline.
            now: Time.
        """
        choice = self.costs.plan(space, runs, budget)
        self._record("plan_load", now, (space, runs, budget), choice)
        return choice

    def _look_round(self, now: float) -> None:
        at, readable = self._at, self.costs.readable()
        changed, at.readable = readable != at.readable, readable
        if changed and at.moved is not None:
            at.moved(None)
        self._at.writable = self.costs.writable(now)
