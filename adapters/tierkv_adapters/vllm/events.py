"""KV events: which blocks can be found outside of the device, in the words of vLLM's routers.

vLLM names blocks by hashes of its own. What was planned to be saved is remembered here under both
names; when a rank tells that a part of it came or went, the events follow. Pure: no vLLM, no lock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from tierkv.blocks import part_id, split_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv.blocks import BlockKey, PartId

__all__ = ["CPU", "STORAGE", "EventBook", "Removed", "Stored"]

CPU = "CPU"
STORAGE = "STORAGE"


class Stored(NamedTuple):
    """Blocks that can be found in a medium now.

    Attributes:
        block_hashes: vLLM's hashes of the blocks.
        parent: Hash of the block before them, or None.
        token_ids: Their tokens.
        block_size: Tokens of each.
        medium: ``"CPU"`` or ``"STORAGE"``.
        group: Number of the page group.
        lora_name: Active LoRA adapter, or None.
    """

    block_hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str
    group: int
    lora_name: str | None


class Removed(NamedTuple):
    """Blocks that are no longer in a medium.

    Attributes:
        block_hashes: vLLM's hashes of the blocks.
        medium: ``"CPU"`` or ``"STORAGE"``.
        group: Number of the page group.
    """

    block_hashes: tuple[bytes, ...]
    medium: str
    group: int


class _Known(NamedTuple):
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    lora_name: str | None


class EventBook:
    """Turns residency into events. Fed with the parts of rank 0, whose shard stands for all.

    Args:
        groups: Number of page groups.
        storage: Bits of the tiers that are storage; the others are memory.
        most: Blocks that are remembered; the oldest are forgotten first, without an event.
    """

    def __init__(self, groups: int, storage: int, *, most: int = 1 << 20) -> None:
        self._groups = groups
        self._storage = storage
        self._most = most
        self._known: OrderedDict[BlockKey, _Known] = OrderedDict()
        self._there: dict[PartId, int] = {}
        self._events: list[Stored | Removed] = []

    def seen(
        self,
        key: BlockKey,
        hashes: Sequence[bytes],
        parent: bytes | None,
        tokens: Iterable[int],
        lora_name: str | None = None,
    ) -> None:
        """Remember what vLLM calls a block that is about to be saved, or was found.

        Args:
            key: Its key on rank 0.
            hashes: vLLM's hashes of the pages that make it up, in order.
            parent: vLLM's hash of the page before it.
            tokens: Its tokens.
            lora_name: LoRA adapter it was computed with.
        """
        if key in self._known:
            self._known.move_to_end(key)
            return
        known = self._known[key] = _Known(tuple(hashes), parent, tuple(tokens), lora_name)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        for group in range(self._groups):  # what an earlier process stored
            self._compare(known, group, 0, self._there.get(part_id(key, group), 0))

    def changed(self, part: PartId, tiers: int) -> None:
        """Take note of the tiers that hold a part now; see ``Engine.watch``."""
        key, group = split_part(part)
        known = self._known.get(key)
        before = self._there.pop(part, 0)
        if tiers:
            self._there[part] = tiers
        if known is not None:
            self._compare(known, group, before, tiers)

    def _compare(self, known: _Known, group: int, before: int, tiers: int) -> None:
        for medium, mask in ((CPU, ~self._storage), (STORAGE, self._storage)):
            had, has = bool(before & mask), bool(tiers & mask)
            if has and not had:
                self._events.append(_stored(known, medium, group))
            elif had and not has:
                self._events.append(Removed(known.hashes, medium, group))

    def take(self) -> list[Stored | Removed]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _stored(known: _Known, medium: str, group: int) -> Stored:
    size = len(known.tokens) // max(1, len(known.hashes))
    return Stored(known.hashes, known.parent, known.tokens, size, medium, group, known.lora_name)
