"""What the scheduler's side makes of what the ranks tell of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.errors import ConfigError
from tierkv_adapters.vllm.facts import space_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.blocks import AdapterId
    from tierkv.layout import Space

__all__ = ["agreed_groups", "spaces_of"]


def agreed_groups(ranks: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int | None, int], ...]:
    """Kind, window and page tokens of each group, which all ranks have to tell alike.

    Raises:
        ConfigError: if they do not.
    """
    shapes = {(int(rank["block_tokens"]), tuple(rank["groups"])) for rank in ranks}
    if len(shapes) > 1:
        raise ConfigError(
            f"the ranks do not agree on blocks and page groups: {sorted(map(str, shapes))}; "
            "start all of them with the same version and settings"
        )
    _, groups = shapes.pop()
    return groups


def spaces_of(ranks: Sequence[Mapping[str, Any]]) -> Callable[[AdapterId | None], list[Space]]:
    """The space of each rank, made once for each adapter."""
    made: dict[AdapterId | None, list[Space]] = {}

    def spaces(adapter: AdapterId | None) -> list[Space]:
        if adapter not in made:
            made[adapter] = [
                space_of(rank["identity"], rank["layout"], int(rank["block_tokens"]), adapter)
                for rank in ranks
            ]
        return made[adapter]

    return spaces
