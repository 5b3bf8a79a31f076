"""From the importance of tokens to that of the parts that hold their KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId
    from tierkv.session.table import SessionState

__all__ = ["scored_parts"]


def scored_parts(
    state: SessionState, value: float | Sequence[float], start: int
) -> tuple[list[PartId], list[float]]:
    """Parts of the full blocks that hold tokens from ``start`` on, and the importance of each.

    Args:
        state: The session.
        value: Importance of all of them, or of one token after the other.
        start: First token.

    Raises:
        ConfigError: if ``start`` is not inside the history, a value is outside 0 to 1, or there
            are more values than tokens.
    """
    total, size = len(state.chain.tokens), state.space.block_tokens
    if not 0 <= start <= total:
        raise ConfigError(f"start must be from 0 to {total} (the history), not {start}")
    one = isinstance(value, int | float)
    try:
        values = [float(value)] if isinstance(value, int | float) else [float(v) for v in value]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"importance is a number from 0 to 1, or one a token: {error}") from error
    if not one and len(values) > total - start:
        raise ConfigError(
            f"{len(values)} values were given for {total - start} tokens from token {start} on"
        )
    wrong = next((v for v in values if not 0 <= v <= 1), None)
    if wrong is not None:
        raise ConfigError(f"importance is a number from 0 to 1, not {wrong!r}")
    end = total if one else start + len(values)
    groups = range(len(state.space.layout.groups))
    parts: list[PartId] = []
    scores: list[float] = []
    for block in range(start // size, min(-(-end // size), len(state.chain.keys))):
        low, high = max(start, block * size), min(end, (block + 1) * size)
        if low >= high:
            continue
        worth = values[0] if one else max(values[low - start : high - start])
        key = state.chain.keys[block]
        parts += [part_id(key, group) for group in groups]
        scores += [worth] * len(groups)
    return parts, scores
