"""Lookups of the naive decision object."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tests.decisions.naive_parts import Parts
from tierkv.decisions.types import (
    Drop,
    Found,
    FoundPart,
    MissReason,
    PartState,
    Query,
)
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import PartId


class Looking(Parts):
    # -------------------------------------------------------------- lookups

    def tier_of(self, name: PartId, query: Query, now: float) -> int | None:
        part = self.parts.get(name)
        if part is None or part.expiry <= now:
            return None
        fine = [t for t, c in part.copies.items() if query.lossy or (part.exact and c.lossless)]
        return min(fine, default=None)

    @staticmethod
    def name(query: Query, block: int, group: int) -> PartId:
        return query.keys[block] + group.to_bytes(2, "little")  # type: ignore[return-value]

    def needed(self, query: Query, blocks: int) -> list[tuple[int, int]]:
        end = query.tokens if blocks == len(query.keys) else blocks * query.block_tokens
        needed: list[tuple[int, int]] = []
        for group, rule in enumerate(query.groups):
            first = 0
            if rule.kind is GroupKind.STATE:
                first = blocks - 1
            elif rule.window is not None:
                first = max(0, end - (rule.window - 1)) // query.block_tokens
                first = blocks if rule.window == 1 else first
            needed += [(block, group) for block in range(max(first, query.start), blocks)]
        return sorted(needed)

    def lookup(self, query: Query, now: float, lease: int) -> Found:
        def there(block: int, group: int) -> bool:
            return self.tier_of(self.name(query, block, group), query, now) is not None

        best = max(
            n
            for n in range(query.start, len(query.keys) + 1)
            if n == query.start or all(there(b, g) for b, g in self.needed(query, n))
        )
        reason = None
        if best < len(query.keys):
            reason = self.why(self.first_missing(query, best, there), query.lossy, now)
        strict = [g for g, r in enumerate(query.groups) if r.kind.value in ("full", "latent")]
        needed = self.needed(query, best) if best else []
        parts = []
        for block, group in needed:
            part = self.parts[self.name(query, block, group)]
            tier = self.tier_of(part.name, query, now)
            assert tier is not None
            nbytes = part.copies[tier].nbytes
            parts.append(FoundPart(part.name, block, group, tier, part.generation, nbytes))
        if query.touch:
            until = inf if query.ttl is None else now + query.ttl
            size = len(query.keys)
            seen = []
            for block, group in ((b, g) for b in range(size) for g in strict):
                if there(block, group):
                    seen.append((block, group))
                elif block >= query.start:
                    break
            for block, group in seen:
                self.touch(
                    self.parts[self.name(query, block, group)], self.clock + size - block, until
                )
            for block, group in needed:
                if group not in strict:
                    self.touch(
                        self.parts[self.name(query, block, group)], self.clock + block + 1, until
                    )
            self.clock += size
        if lease:
            self.leases[lease] = [self.parts[p.part] for p in parts]
            for part in self.leases[lease]:
                part.uses += 1
        tokens = query.tokens if best == len(query.keys) else best * query.block_tokens
        return Found(best, tokens if best else 0, tuple(parts), lease, reason)

    def first_missing(self, query: Query, best: int, there: Callable[[int, int], bool]) -> PartId:
        loose = []
        for group, rule in enumerate(query.groups):
            if rule.kind.value in ("full", "latent"):
                if not there(best, group):
                    return self.name(query, best, group)
            else:
                loose.append(group)
        for group in loose:
            mine = [b for b, g in self.needed(query, best + 1) if g == group]
            missing = [b for b in mine if not there(b, group)]
            if missing:
                return self.name(query, max(missing), group)
        raise AssertionError("a longer prefix is loadable")

    def why(self, name: PartId, lossy: bool, now: float) -> MissReason:
        part = self.parts.get(name)
        if part is not None and part.copies and part.expiry <= now:
            return MissReason.EXPIRED
        if part is not None and part.copies and not lossy:
            return MissReason.FIDELITY
        if part is not None and part.pending:
            return MissReason.PENDING
        if name in self.gone:
            return self.gone[name][0]
        return MissReason.NEVER_STORED if part is None else MissReason.HOLE

    def release(self, lease: int) -> list[Drop]:
        for part in self.leases.pop(lease, []):
            self.unuse(part)
        self.tidy()
        return self.collect()

    def state(self, name: PartId, now: float) -> PartState:
        part = self.parts.get(name)
        if part is not None and part.copies and part.expiry > now:
            tiers = tuple(sorted(part.copies))
            lossless = tuple(part.copies[t].lossless for t in tiers)
            return PartState(
                tiers,
                tuple(sorted(part.pending)),
                part.uses - part.holds,
                part.generation,
                part.exact,
                lossless,
                tuple(part.copies[t].nbytes for t in tiers),
            )
        pending = tuple(sorted(part.pending)) if part else ()
        leases = part.uses - part.holds if part else 0
        reason = self.why(name, True, now)
        gone = self.gone.get(name)
        if gone is not None and gone[0] is reason:
            return PartState((), pending, leases, reason=reason, tier=gone[1], ago=now - gone[2])
        ago = now - part.expiry if part and reason is MissReason.EXPIRED else None
        return PartState((), pending, leases, reason=reason, ago=ago)
