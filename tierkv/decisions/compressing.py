"""Which parts are due for which codec chain: rules by tier, age, position and importance.

Sans-IO. A rule applies to a copy once all its conditions hold; the first of a tier's rules that
applies counts. Two things come of it: the chain of a copy to another tier, asked for when it is
made, and a line of copies in memory tiers to be converted where they are. The shell takes copies
from the line, makes the smaller frame, and says what came of it; a copy that did not become
smaller is not tried again with the same rule.

A copy that somebody reads is left alone and looked at again later: its frame is exchanged under
the same generation, and a reader counts on what it has leased.

Age is known of parts that a session has told of in this process (:meth:`Compressed.told`); others
have none, so that no rule by steps or position applies to them.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Final

from tierkv.decisions.ageing import Ages
from tierkv.decisions.coding_rules import Recode
from tierkv.decisions.index import NO_ROW, PRIVATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.coding_rules import Age, Rule
    from tierkv.decisions.placement import Placement

__all__ = ["Compressing"]

_PAUSE_S: Final = 1.0
"""After that time a copy that was in use is looked at again."""
_SPARE: Final = 4096
_LOOK: Final = 1024  # copies that one call looks at, most of which may be gone


class Compressing:
    """The rules, what is known of each row, and the line of copies that are due.

    Attributes:
        rules: By tier, in order.
        queued: Copies put in line so far.
        taken: Those of them that were taken out so far.
    """

    __slots__ = (
        "_ages",
        "_at",
        "_due",
        "_importance",
        "_later",
        "_line",
        "_places",
        "queued",
        "rules",
        "taken",
    )

    def __init__(
        self,
        placement: Placement,
        rules: Sequence[Sequence[Rule]],
        places: Sequence[bool],
        importance: Callable[[PartId], float | None],
    ) -> None:
        """Begin with nothing known.

        Args:
            placement: Where parts are.
            rules: Rules by tier.
            places: By tier: whether copies there can be converted where they are.
            importance: What is known of a part's importance.
        """
        self.rules = tuple(tuple(mine) for mine in rules)
        self.queued = self.taken = 0
        self._at = placement
        self._importance = importance
        self._places = tuple(
            tier
            for tier, mine in enumerate(self.rules)
            if places[tier] and any(rule.in_place for rule in mine)
        )
        self._line: OrderedDict[tuple[PartId, int], None] = OrderedDict()
        self._later: list[tuple[float, PartId, int]] = []
        self._due: dict[tuple[PartId, int], float] = {}
        self._ages = Ages(placement.index, len(self.rules))

    # ------------------------------------------------------------------ what is known

    def told(
        self,
        keys: Sequence[BlockKey],
        groups: int,
        block_tokens: int,
        first: int,
        total: int,
        now: float,
    ) -> None:
        """See :meth:`Compressed.told`."""
        rows, places = self._at.index.rows, self._places
        suffixes = [group.to_bytes(2, "little") for group in range(groups)]
        for number, key in enumerate(keys, start=first):
            start = number * block_tokens
            steps = total - start - block_tokens
            for suffix in suffixes:
                part: PartId = key + suffix  # type: ignore[assignment]
                row = rows.get(part, NO_ROW)
                if row < 0 or not self._at.index.resident[row]:
                    continue
                self._ages.tell(row, start, steps, now)
                for tier in places:
                    self._look(row, part, tier, now)

    def recheck(self, parts: Sequence[PartId], now: float) -> None:
        """Put what has become due meanwhile in line."""
        for part in parts:
            row = self._at.index.rows.get(part, NO_ROW)
            for tier in self._places if row >= 0 else ():
                self._look(row, part, tier, now)

    # ------------------------------------------------------------------ judging

    def _judge(
        self, part: PartId, tier: int, age: Age, since: float, now: float, *, copied: bool | None
    ) -> tuple[int, float]:
        """Number of the rule that applies to a copy, or -1, and when that may change with time.

        Args:
            part: The part.
            tier: Where the copy is, or will be.
            age: What a session said of it; negative where none has.
            since: When it was stored.
            now: Time.
            copied: None: it is there. Otherwise whether it is copied there from a faster tier.
        """
        when = inf
        for number, rule in enumerate(self.rules[tier]):
            if not rule.in_place and not copied:
                continue
            if (rule.steps and age.steps < rule.steps) or (rule.sinks and age.start < rule.sinks):
                continue
            if rule.below is not None:
                value = self._importance(part)
                if value is None or value >= rule.below:
                    continue
            if now < since + rule.seconds:
                when = min(when, since + rule.seconds)
                continue
            return number, when
        return -1, when

    def _rule_of(self, row: int, part: PartId, tier: int, now: float) -> tuple[int, float]:
        age, since = self._ages.of(row, now)
        return self._judge(part, tier, age, since, now, copied=None)

    def due(self, part: PartId, now: float) -> bool:
        """See :meth:`Compressed.due`."""
        index = self._at.index
        row = index.rows.get(part, NO_ROW)
        if row < 0 or index.flags[row] & PRIVATE:
            return False
        age, since = self._ages.peek(row, now)
        for tier in self._places:
            if index.resident[row] >> tier & 1:
                number, _ = self._judge(part, tier, age, since, now, copied=None)
                if number >= 0 and not self._ages.tried(row, tier, number):
                    return True
        return False

    def _look(self, row: int, part: PartId, tier: int, now: float) -> None:
        """Put a copy in line if it is due, or note when time alone may make it so."""
        index = self._at.index
        if not index.resident[row] >> tier & 1 or index.flags[row] & PRIVATE:
            return
        number, when = self._rule_of(row, part, tier, now)
        due = number >= 0 and not self._ages.tried(row, tier, number)
        if due and (part, tier) not in self._line:
            self._line[part, tier] = None
            self.queued += 1
        if when < inf:
            self.put_off(part, tier, when)

    def chains(
        self,
        parts: Sequence[PartId],
        ages: Sequence[Age | None],
        source: int,
        target: int,
        now: float,
    ) -> tuple[str | None, ...]:
        """See :meth:`Compressed.copy_chains`."""
        rows, rules = self._at.index.rows, self.rules[target]
        found: list[str | None] = []
        for part, told in zip(parts, ages, strict=True):
            row = rows.get(part, NO_ROW)
            if row >= 0 and self._at.index.flags[row] & PRIVATE:
                found.append(None)
                continue
            age, since = self._ages.peek(row, now)
            if told is not None and told.steps > age.steps:
                age = told
            number, _ = self._judge(part, target, age, since, now, copied=source < target)
            found.append(rules[number].chain if number >= 0 else None)
        return tuple(found)

    # ------------------------------------------------------------------ the line

    def put_off(self, part: PartId, tier: int, when: float) -> None:
        """Look at a copy again at that time."""
        known = self._due.get((part, tier))
        if known is not None and known <= when:
            return
        self._due[part, tier] = when
        heappush(self._later, (when, part, tier))
        # what is kept is at most one a copy, so that compacting halves it at least
        if len(self._later) > 2 * len(self._places) * len(self._at.index.rows) + _SPARE:
            self._compact()

    def _compact(self) -> None:
        """Forget what waits for copies that are gone, and times that were moved."""
        index = self._at.index
        kept = {}
        for (part, tier), when in self._due.items():
            row = index.rows.get(part, NO_ROW)
            if row >= 0 and index.resident[row] >> tier & 1:
                kept[part, tier] = when
        self._due = kept
        self._later = [(when, part, tier) for (part, tier), when in kept.items()]
        heapify(self._later)

    def waits(self, now: float) -> bool:
        """Whether something is in line, or comes in line with time by now."""
        return bool(self._line) or (bool(self._later) and self._later[0][0] <= now)

    def take(self, parts: int, nbytes: int, now: float) -> tuple[Recode, ...]:
        """See :meth:`Compressed.take_recodes`."""
        for _ in range(_LOOK):
            if not self._later or self._later[0][0] > now:
                break
            when, part, tier = heappop(self._later)
            if self._due.get((part, tier)) != when:
                continue
            del self._due[part, tier]
            row = self._at.index.rows.get(part, NO_ROW)
            if row >= 0:
                self._look(row, part, tier, now)
        batch: list[Recode] = []
        last = self.taken + _LOOK
        while self._line and len(batch) < parts and nbytes > 0 and self.taken < last:
            part, tier = next(iter(self._line))
            if batch and tier != batch[0].tier:
                break
            self._line.popitem(last=False)
            self.taken += 1
            found = self._recode(part, tier, now)
            if found is not None:
                batch.append(found)
                nbytes -= found.nbytes
        return tuple(batch)

    def _recode(self, part: PartId, tier: int, now: float) -> Recode | None:
        index = self._at.index
        row = index.rows.get(part, NO_ROW)
        if row < 0 or not index.resident[row] >> tier & 1:
            return None
        number, _ = self._rule_of(row, part, tier, now)
        if number < 0 or self._ages.tried(row, tier, number):
            return None
        if row in self._at.busy:
            self.put_off(part, tier, now + _PAUSE_S)
            return None
        nbytes, chain = index.charge[tier][row], self.rules[tier][number].chain
        return Recode(part, tier, index.generation[row], nbytes, chain, number)

    # ------------------------------------------------------------------ what came of it

    def exchange(self, recode: Recode, nbytes: int, now: float, *, lossless: bool) -> bool:
        """See :meth:`Compressed.recoded`."""
        at, index, ledger = self._at, self._at.index, self._at.ledger
        row, tier = self._row(recode), recode.tier
        if row < 0:
            return False
        saved = index.charge[tier][row] - nbytes
        if at.busy.get(row) != 1 or row in at.leaving or saved <= 0:
            self.put_off(recode.part, tier, now + _PAUSE_S)
            return False
        tenant = index.tenant[row]
        ledger.discharge(tier, tenant, saved)
        ledger.pinned[tier] -= saved
        index.charge[tier][row] = nbytes
        if not lossless:
            index.lossless[row] &= ~(1 << tier)
        at.policy(tenant, tier).resized(row, nbytes)
        self._ages.note(row, tier, recode.rule, now)
        return True

    def keep(self, recode: Recode, now: float) -> None:
        """See :meth:`Compressed.recode_kept`."""
        row = self._row(recode)
        if row >= 0:
            self._ages.note(row, recode.tier, recode.rule, now)

    def _row(self, recode: Recode) -> int:
        """Row of a copy that is still there."""
        index = self._at.index
        row = index.rows.get(recode.part, NO_ROW)
        if row < 0 or not index.resident[row] >> recode.tier & 1:
            return NO_ROW
        return row if index.generation[row] == recode.generation else NO_ROW
