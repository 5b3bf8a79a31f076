"""What came of a request's prompt: how much of it was not computed, for a request that asks."""

from __future__ import annotations

from typing import Any

__all__ = ["Account"]


class Account:
    """Tokens of one request that were in place already, from its first admission on.

    vLLM counts tokens as cached when it admits a request, and leaves the count as it is if their
    load fails afterwards; this one tells what really came.
    """

    __slots__ = ("_bit", "_external", "_own", "_place")

    def __init__(self) -> None:
        self._own = 0
        self._external = 0
        self._place: int | None = None
        self._bit = 0

    def asked(self, request: Any, computed: int) -> None:
        """VLLM's own cache has the first ``computed`` tokens."""
        if not _was_admitted(request):
            self._own = computed

    def accepted(self, request: Any, tokens: int, bit: int) -> None:
        """So many tokens behind those are being loaded, from the tier of this bit or a faster."""
        if not _was_admitted(request):
            self._external, self._bit = tokens, bit

    def short(self, place: int) -> None:
        """Only the first ``place`` tokens are in place."""
        if self._external and self._place is None:
            self._place = place

    def told(self, tiers: tuple[str, ...]) -> dict[str, Any]:
        """What the request's output says in ``kv_transfer_params["tierkv"]``.

        Args:
            tiers: Name of each tier, in the order of the residency bits.

        Returns:
            ``own`` (tokens that vLLM's own cache had), ``loaded`` (that came from ours) and
            ``tier`` (the slowest that was read, or None).
        """
        own, loaded = self._own, self._external
        if self._place is not None:
            loaded = max(0, min(loaded, self._place - own))
            own = min(own, self._place)
        number = self._bit.bit_length() - 1
        tier = tiers[number] if loaded and 0 <= number < len(tiers) else None
        return {"own": own, "loaded": loaded, "tier": tier}


def _was_admitted(request: Any) -> bool:
    return bool(getattr(request, "num_preemptions", 0))
