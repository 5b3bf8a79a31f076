"""KV events of the scheduler's side: residency that was heard, under vLLM's names of the blocks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from tierkv_adapters.serving.replicas import ReplicaIndex
from tierkv_adapters.vllm.events import EventBook

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv_adapters.vllm.events import Removed, Stored

__all__ = ["Announcer", "announcer_of"]

_MEMORY = frozenset({"device", "host"})
_MOST_CHANGES = 1 << 20


class _Listening(ReplicaIndex):
    """An index that passes on what it hears of rank 0."""

    def __init__(self, ranks: int, heard: deque[tuple[PartId, int]]) -> None:
        super().__init__(ranks)
        self._heard = heard

    def apply(self, rank: int, changes: Iterable[tuple[PartId, int]]) -> None:
        """As the index does."""
        changes = list(changes)
        super().apply(rank, changes)
        if rank == 0:
            self._heard.extend(changes)


class Announcer:
    """Collects events for vLLM's publisher.

    Changes come in the feed's thread and wait, the newest million of them, for the scheduler's.

    Args:
        book: Knows the blocks under both names.
        hash_tokens: Tokens of one of vLLM's hashes.
    """

    def __init__(self, book: EventBook, hash_tokens: int) -> None:
        self._book = book
        self._hash_tokens = hash_tokens
        self._heard: deque[tuple[PartId, int]] = deque(maxlen=_MOST_CHANGES)

    def index(self, ranks: int) -> ReplicaIndex:
        """An index of what ranks hold, to which this listens."""
        return _Listening(ranks, self._heard)

    def saved(self, request: Any, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """Blocks of a request are about to be saved.

        Args:
            request: vLLM's request, whose ``block_hashes`` are read.
            keys: Keys of the blocks on rank 0.
            start: First token of the first block.
            stop: Token behind the last.
        """
        hashes, size = request.block_hashes, self._hash_tokens
        lora = getattr(request, "lora_request", None)
        name = None if lora is None else str(lora.lora_name)
        step = (stop - start) // len(keys)
        if step % size:
            return  # vLLM's hashes are of longer stretches than our blocks: no common name
        for number, key in enumerate(keys):
            first = start + number * step
            names = hashes[first // size : (first + step) // size]
            if len(names) < step // size:
                break
            parent = hashes[first // size - 1] if first else None
            tokens = request.all_token_ids[first : first + step]
            self._book.seen(key, names, parent, tokens, name)

    def take(self) -> list[Stored | Removed]:
        """Events since the last call."""
        while self._heard:
            self._book.changed(*self._heard.popleft())
        return self._book.take()


def announcer_of(vllm_config: Any, groups: int, tiers: Sequence[str]) -> Announcer | None:
    """An announcer if vLLM publishes KV events.

    Args:
        vllm_config: vLLM's configuration.
        groups: Number of page groups.
        tiers: Kind of each tier, in the order of the residency bits.
    """
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not getattr(events, "enable_kv_cache_events", False):
        return None
    cache = vllm_config.cache_config
    size = getattr(cache, "hash_block_size", None) or cache.block_size
    storage = sum(1 << bit for bit, kind in enumerate(tiers) if kind not in _MEMORY)
    return Announcer(EventBook(groups, storage), int(size))
