"""Rules of compression, as the decisions know them, and what comes of them: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tierkv.blocks import PartId

__all__ = ["Age", "Recode", "Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a tier.

    Attributes:
        chain: Codec chain.
        steps: Least age in steps: tokens with KV in the session behind the block's last one.
        seconds: Least age in seconds.
        sinks: Blocks that begin before this token are left alone.
        below: Only parts whose importance is known and below this.
        in_place: Whether copies that are in the tier are converted; else only those that come.
    """

    chain: str
    steps: int = 0
    seconds: float = 0.0
    sinks: int = 0
    below: float | None = None
    in_place: bool = True


class Age(NamedTuple):
    """What a session knows of a block: the token at which it begins, and its age in steps."""

    start: int
    steps: int


class Recode(NamedTuple):
    """A copy to convert where it is.

    Attributes:
        part: Which part.
        tier: Where.
        generation: Which publication of it.
        nbytes: Bytes that it takes now.
        chain: Chain that it is due for.
        rule: Number of the rule, for what is said of it afterwards.
    """

    part: PartId
    tier: int
    generation: int
    nbytes: int
    chain: str
    rule: int
