"""Several policies on one tier, in order: what is exhausted hands over to the next.

The rules of a :class:`tierkv.config.Hybrid` for one tier. Each has a policy of its own, which
orders all parts of the tier, and says what is done with those that it picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Rule", "Ruled"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a tier.

    Attributes:
        make: Makes its policy.
        sessions: Whether all of a session that may leave leaves together.
        target: Tier to which its parts are demoted; None: the next slower one that takes them, or
            none at all where a slower tier has them already.
    """

    make: Callable[[], Policy]
    sessions: bool = False
    target: int | None = None


class Ruled(Policy):
    """The policies of a tier's rules side by side: every one of them hears everything.

    Attributes:
        rules: The rules.
        policies: The policy of each.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.policies = tuple(rule.make() for rule in rules)

    def describe(self) -> str:
        """The rules in short, for the header of a decision log."""
        texts = []
        for rule, policy in zip(self.rules, self.policies, strict=True):
            unit = "/session" if rule.sessions else ""
            to = "" if rule.target is None else f"->{rule.target}"
            texts.append(f"{policy.name}{unit}{to}")
        return f"{self.name}({', '.join(texts)})"

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row."""
        for policy in self.policies:
            policy.insert(row, nbytes, clock, ident)

    def touch(self, row: int, clock: int) -> None:
        """Note an access."""
        for policy in self.policies:
            policy.touch(row, clock)

    def release(self, row: int) -> None:
        """Make a row evictable."""
        for policy in self.policies:
            policy.release(row)

    def hold(self, row: int) -> None:
        """Make a row not evictable."""
        for policy in self.policies:
            policy.hold(row)

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row."""
        for policy in self.policies:
            policy.remove(row, evicted=evicted, ident=ident)

    def expedite(self, row: int) -> None:
        """Make a row the next victim of every rule."""
        for policy in self.policies:
            policy.expedite(row)

    def victim(self) -> int | None:
        """Return the victim of the first rule."""
        return self.policies[0].victim()

    def rank(self, row: int) -> float:
        """Rank by the first rule."""
        return self.policies[0].rank(row)

    def resize(self, capacity_parts: float) -> None:
        """Learn the size of the tier."""
        for policy in self.policies:
            policy.resize(capacity_parts)

    def resized(self, row: int, nbytes: int) -> None:
        """Learn how many bytes a row takes now."""
        for policy in self.policies:
            policy.resized(row, nbytes)

    def shift(self, row: int, accesses: float) -> None:
        """Move the last use of a row."""
        for policy in self.policies:
            policy.shift(row, accesses)

    def score(self, row: int, value: float) -> None:
        """Learn how important a row is."""
        for policy in self.policies:
            policy.score(row, value)
