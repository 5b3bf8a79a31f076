"""The ways in which the engine can be set up, as far as a connector notices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tierkv.errors import ConfigError

__all__ = ["MODES", "Mode"]


@dataclass(frozen=True, slots=True)
class Mode:
    """How one engine is set up.

    Attributes:
        api: ``"first"``: as in release 1.2 (module ``pyexecutor.kv_cache_connector``,
            five fields a request, blocks of a cancelled request are freed at once);
            ``"second"``: ``pyexecutor.connectors.kv_cache_connector`` with salt, layer groups,
            ``cancel_load`` and ``request_reset``.
        pool: ``"flat"``: one tensor, all pages of a prompt at once (``KVCacheManager``);
            ``"grouped"``: layer groups described by a layout, pages chunk by chunk
            (``KVCacheManagerV2``; second API only).
        windows: Attention window per layer group in tokens, None: full attention. Layer i is in
            group ``i % len(windows)``.
        ranks: Tensor-parallel workers.
        layers: Layers of the model.
        tokens_per_block: Tokens of one page.
        pages: Pages per layer group; the last one is never given to a request.
        overlap: Whether a step is launched before the tokens of the one before are known.
        chunk: Most tokens of one prompt that one step computes; None: all.
        cuda_graphs: Whether decode steps are replayed graphs, in which no layer hook fires.
        empty_meta: What ``build_connector_meta`` gets in a step without a batch: ``"no"``: it is
            not called; ``"none"``: None; ``"empty"``: an output without requests.
    """

    api: Literal["first", "second"] = "second"
    pool: Literal["flat", "grouped"] = "flat"
    windows: tuple[int | None, ...] = (None,)
    ranks: int = 1
    layers: int = 4
    tokens_per_block: int = 4
    pages: int = 96
    overlap: bool = False
    chunk: int | None = None
    cuda_graphs: bool = False
    empty_meta: Literal["no", "none", "empty"] = "no"

    def __post_init__(self) -> None:
        if self.pool == "flat" and self.windows != (None,):
            raise ConfigError(f"a flat pool has no attention windows, got {self.windows}")
        if self.pool == "grouped" and self.api == "first":
            raise ConfigError("layer groups came with the second API")
        if self.layers < len(self.windows):
            raise ConfigError(f"{self.layers} layers cannot fill {len(self.windows)} groups")

    @property
    def grouped(self) -> bool:
        """Whether pages are scoped to layer groups."""
        return self.pool == "grouped"

    def layers_of(self, group: int) -> tuple[int, ...]:
        """Layers of a group, ascending."""
        return tuple(range(group, self.layers, len(self.windows)))


MODES: Final[dict[str, Mode]] = {
    "first": Mode(api="first"),
    "first-overlap": Mode(api="first", overlap=True, empty_meta="none"),
    "flat": Mode(),
    "flat-overlap": Mode(overlap=True),
    "flat-chunked-tp2": Mode(chunk=8, ranks=2, overlap=True),
    "flat-graphs": Mode(cuda_graphs=True, overlap=True),
    "grouped": Mode(pool="grouped"),
    "grouped-chunked-overlap": Mode(pool="grouped", chunk=8, overlap=True, empty_meta="empty"),
    "windows": Mode(pool="grouped", windows=(None, 12), chunk=8, cuda_graphs=True),
    "windows-tp4": Mode(pool="grouped", windows=(12, None, 8), ranks=4, overlap=True),
}
"""Modes in which a connector is tested, by name; together they have every option both ways."""
