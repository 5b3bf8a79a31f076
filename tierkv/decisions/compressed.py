"""The recorded half of compression: what the decision object is told of ages, and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tierkv.blocks import KEY_BYTES, BlockKey, PartId
from tierkv.decisions.coding_rules import Age, Recode
from tierkv.decisions.compressing import Compressing
from tierkv.decisions.leasing import Leasing
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.decisions.coding_rules import Rule

__all__ = ["CALLS", "Compressed"]


class Compressed(Leasing):
    """Knows the rules of compression; says which copies are due for which codec chain.

    Without :meth:`compress` there are no rules, and none of this costs anything.
    """

    _rules: Compressing | None = None

    def compress(self, rules: Sequence[Sequence[Rule]], places: Sequence[bool]) -> None:
        """Set the rules; once, before anything is stored and before a log is attached.

        Args:
            rules: The rules of each tier, in order; empty where there are none.
            places: By tier: whether copies there can be converted where they are.

        Raises:
            ConfigError: if there are more or fewer than there are tiers.
        """
        tiers = len(self._at.tiers)
        if len(rules) != tiers or len(places) != tiers:
            raise ConfigError(f"{tiers} tiers need as many lists of rules, not {len(rules)}")
        if any(rules):
            self._rules = Compressing(self._at, rules, places, self.importance)
            self._header["compression"] = {"rules": self._rules.rules, "places": tuple(places)}

    def importance(self, part: PartId) -> float | None:
        """How important a part is, from 0 to 1; None if nobody has said."""
        del part
        return None

    @property
    def compressing(self) -> bool:
        """Whether there are rules. Not recorded: it never changes."""
        return self._rules is not None

    def compresses(self, tier: int) -> bool:
        """Whether a tier has rules. Not recorded: it never changes."""
        return self._rules is not None and bool(self._rules.rules[tier])

    def rule_chains(self, tier: int) -> list[str]:
        """Codec chains that the rules of a tier name. Not recorded: they never change."""
        return [] if self._rules is None else [rule.chain for rule in self._rules.rules[tier]]

    @property
    def recodes(self) -> tuple[int, int]:
        """Copies put in line to be converted so far, and taken out of it. Not recorded."""
        return (0, 0) if self._rules is None else (self._rules.queued, self._rules.taken)

    def recodes_wait(self, now: float) -> bool:
        """Whether :meth:`take_recodes` has something to look at. Not recorded."""
        return self._rules is not None and self._rules.waits(now)

    def told(
        self,
        keys: Sequence[BlockKey],
        groups: int,
        block_tokens: int,
        first: int,
        total: int,
        now: float,
    ) -> None:
        """Learn how old some blocks of a session are, in steps; at most a slice of them a call.

        Args:
            keys: Keys of full blocks that follow each other.
            groups: Layer groups of the space.
            block_tokens: Tokens a block.
            first: Number of the first of them in the session.
            total: Tokens of the session that have KV.
            now: Time.
        """
        if self._rules is not None:
            self._rules.told(keys, groups, block_tokens, first, total, now)
            args = (b"".join(keys), groups, block_tokens, first, total)
            self._record("told", now, args, self._rules.queued)

    def due(self, part: PartId, now: float) -> bool:
        """Whether a copy of a part is to be converted where it is. Not recorded."""
        return self._rules is not None and self._rules.due(part, now)

    def recheck(self, parts: Sequence[PartId], now: float) -> None:
        """Look whether these parts have become due meanwhile."""
        if self._rules is not None:
            self._rules.recheck(parts, now)
            self._record("recheck", now, (parts,), self._rules.queued)

    def take_recodes(self, parts: int, nbytes: int, now: float) -> tuple[Recode, ...]:
        """Take the next copies out of line, all of one tier.

        The caller leases each of them by itself (``hold_part``), and says what came of it with
        :meth:`recoded`, :meth:`recode_kept` or :meth:`recode_later`.

        Args:
            parts: Most copies.
            nbytes: Most bytes; the first copy is taken whatever its size.
            now: Time.
        """
        if self._rules is None or not self._rules.waits(now):
            return ()
        batch = self._rules.take(parts, nbytes, now)
        self._record("take_recodes", now, (parts, nbytes), batch)
        return batch

    def recoded(self, recode: Recode, nbytes: int, lossless: bool, now: float) -> bool:
        """Exchange a copy for a smaller one of the same generation, if nobody else uses it.

        To be called under the caller's one lease on the part; the new frame takes the place of the
        old one in the tier in the same turn of the loop.

        Args:
            recode: The copy.
            nbytes: Bytes charged for the new frame; fewer than before.
            lossless: Whether it is stored losslessly.
            now: Time.

        Returns:
            False if the copy is gone, was replaced, or is in use: then it is looked at again later.
        """
        done = False
        if self._rules is not None:
            done = self._rules.exchange(recode, nbytes, now, lossless=lossless)
            self._record("recoded", now, (recode, nbytes, lossless), done)
            self._settle(now)
        return done

    def recode_kept(self, recode: Recode, now: float) -> None:
        """Leave a copy as it is: it would not become smaller. Not tried again with this rule."""
        if self._rules is not None:
            self._rules.keep(recode, now)
            self._record("recode_kept", now, (recode,), None)

    def recode_later(self, recode: Recode, seconds: float, now: float) -> None:
        """Look at a copy again in so many seconds: something was in the way."""
        if self._rules is not None:
            self._rules.put_off(recode.part, recode.tier, now + seconds)
            self._record("recode_later", now, (recode, seconds), None)

    def copy_chains(
        self,
        parts: Sequence[PartId],
        ages: Sequence[Age | None],
        source: int,
        target: int,
        now: float,
    ) -> tuple[str | None, ...]:
        """Codec chains of copies about to be made; None: as the target stores new blocks.

        Args:
            parts: What is copied.
            ages: What a store under way knows of each, before :meth:`told` can say it.
            source: Tier that they are in.
            target: Tier that they go to.
            now: Time.
        """
        if not self.compresses(target):
            return (None,) * len(parts)
        assert self._rules is not None
        chains = self._rules.chains(parts, ages, source, target, now)
        self._record("copy_chains", now, (parts, ages, source, target), chains)
        return chains


# --------------------------------------------------------------------------- replay


def _keys(text: str) -> list[BlockKey]:
    raw = bytes.fromhex(text)
    return [BlockKey(raw[i : i + KEY_BYTES]) for i in range(0, len(raw), KEY_BYTES)]


def _parts(plain: list[str]) -> list[PartId]:
    return [PartId(bytes.fromhex(text)) for text in plain]


def _recode(plain: list[Any]) -> Recode:
    part, *rest = plain
    return Recode(PartId(bytes.fromhex(part)), *rest)


def _ages(plain: list[Any]) -> list[Age | None]:
    return [None if age is None else Age(*age) for age in plain]


CALLS: Final[dict[str, Callable[[Any, float, list[Any]], object]]] = {
    "told": lambda d, now, a: d.told(_keys(a[0]), a[1], a[2], a[3], a[4], now),
    "recheck": lambda d, now, a: d.recheck(_parts(a[0]), now),
    "take_recodes": lambda d, now, a: d.take_recodes(a[0], a[1], now),
    "recoded": lambda d, now, a: d.recoded(_recode(a[0]), a[1], a[2], now),
    "recode_kept": lambda d, now, a: d.recode_kept(_recode(a[0]), now),
    "recode_later": lambda d, now, a: d.recode_later(_recode(a[0]), a[1], now),
    "copy_chains": lambda d, now, a: d.copy_chains(_parts(a[0]), _ages(a[1]), a[2], a[3], now),
}
"""For :func:`tierkv.decisions.log.replay`: how each recorded call is made again."""
