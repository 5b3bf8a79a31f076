"""tierkv's eviction policies for vLLM's CPU tier.

Set ``"cache_policy_module_path": "tierkv_adapters.vllm.tier.policies"`` beside
``"eviction_policy"``, which names a policy of tierkv: ``"lrfu"``, ``"gittins"``, ``"s3fifo"``, or
any other one that is registered, those of third parties included. (``"lru"`` and ``"arc"`` are
vLLM's own names, and stay vLLM's own; ``"TierKVCachePolicy"`` is ``"lrfu"``.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tierkv.registry import names, resolve
from tierkv_adapters.vllm.tier.policy import OrderedChunks
from tierkv_adapters.vllm.tier.shim import detect

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["TierKVCachePolicy"]

API = detect()


class TierKVCachePolicy(API.policy):  # type: ignore[name-defined] # found at run time
    """vLLM's ``CachePolicy`` over one of tierkv's policies.

    Args:
        cache_capacity: Chunks that the CPU tier has room for.
    """

    policy_name: ClassVar[str] = "lrfu"
    """Which of tierkv's policies."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks = OrderedChunks(
            resolve("policies", self.policy_name), cache_capacity, by_request=API.hears_requests
        )

    def get(self, key: bytes) -> Any:
        """The chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any) -> None:
        """Add a chunk that has just been given room."""
        self._chunks.insert(key, chunk)

    def remove(self, key: bytes) -> None:
        """Forget a chunk that was never filled."""
        self._chunks.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: Any = None) -> None:
        """Note an access; the head of the keys counts as used last."""
        self._chunks.touch(keys)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any = None) -> None:
        """Nothing: what a policy remembers of a chunk counts when the chunk comes back."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        req_context: Any,
    ) -> None:
        """Note one access to all that a request used, tail first."""
        keys = [key for group in key_groups for key in group]
        where = getattr(req_context, "get_offload_key_position", None)
        if where is not None:
            ends = {key: where(key) for key in keys}
            if None not in ends.values():
                keys.sort(key=ends.__getitem__)  # groups cut the same prompt: one order for all
        self._chunks.finished(keys, reused_keys)

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[Any, Any]] | None:
        """Take exactly ``n`` chunks out, or none at all (None)."""
        return self._chunks.evict(n, protected)

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()

    def mark_evictable(self, key: bytes) -> None:
        """Nobody reads or fills a chunk any more."""
        self._chunks.evictable(key)

    def mark_non_evictable(self, key: bytes) -> None:
        """Somebody reads a chunk."""
        self._chunks.pinned(key)


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in names("policies"):
        raise AttributeError(
            f"module {__name__!r} has no policy {name!r}; tierkv has {', '.join(names('policies'))}"
        )
    made = type(f"TierKV_{name}", (TierKVCachePolicy,), {"policy_name": name})
    globals()[name] = made  # so that a name is always the same class
    return made
