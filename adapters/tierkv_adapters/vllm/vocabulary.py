"""Plain facts of the scheduler's side in the words of vLLM; vLLM is imported when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv_adapters.vllm.events import Stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tierkv_adapters.vllm.events import Removed

__all__ = ["hit_sources", "kv_events"]

_SOURCES = {"device": "DEVICE", "host": "HOST"}  # every other kind of tier is a medium


def hit_sources(found: Mapping[int, int], tiers: Sequence[str]) -> dict[Any, int]:
    """Tokens by where they come from.

    Args:
        found: Tokens by the bit of the slowest tier that is read (bit i: tier i; 0: unknown).
        tiers: Kinds of the tiers.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    out: dict[Any, int] = {}
    for bit, tokens in found.items():
        place = bit.bit_length() - 1
        kind = tiers[place] if 0 <= place < len(tiers) else None
        name = "EXTERNAL_UNSPECIFIED" if kind is None else _SOURCES.get(kind, "DISK")
        source = CacheHitSource[name]
        out[source] = out.get(source, 0) + tokens
    return out


def kv_events(events: Iterable[Stored | Removed]) -> list[Any]:
    """Events as vLLM publishes them; hashes in the form that it is set to publish."""
    events = list(events)
    if not events:
        return []
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    def named(hashes: Iterable[bytes]) -> list[Any]:
        return [maybe_convert_block_hash(one) for one in hashes]

    return [
        BlockStored(
            block_hashes=named(event.block_hashes),
            parent_block_hash=None if event.parent is None else named([event.parent])[0],
            token_ids=list(event.token_ids),
            block_size=event.block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=event.lora_name,
            group_idx=event.group,
        )
        if isinstance(event, Stored)
        else BlockRemoved(
            block_hashes=named(event.block_hashes), medium=event.medium, group_idx=event.group
        )
        for event in events
    ]
