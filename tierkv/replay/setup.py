"""What is replayed: tiers, policies, predictors, and what moving and computing cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tierkv.errors import ConfigError
from tierkv.units import parse_bytes

__all__ = ["CostModel", "Setup"]

_UNLIMITED: Final = 1 << 32  # blocks: more than any trace has; policies reckon with the number
_MOST_BYTES: Final = 1 << 60
_NAMES: Final = {1: ("host",), 2: ("host", "nvme"), 3: ("device", "host", "nvme")}
_ORDERS: Final = ("leaf_first", "root_first")


@dataclass(frozen=True, slots=True)
class CostModel:
    """What takes time.

    One server computes prefills, in order of arrival. Each tier after the first has one link, on
    which loads that a request waits for go before prefetches; a transfer that has begun is
    finished. Copies to slower tiers travel in the background and delay nothing.

    Attributes:
        bandwidth: Bytes a second that a tier is read at; one number for all, or one a tier.
        prefill: Tokens a second that the server computes.
        layers: Layers of the model: with ``overlap`` a request has to wait for the last layer's
            share of its compute at most, once its load has ended.
        overlap: Whether loading overlaps with computing, layer by layer.
        first_token: Tokens' worth of compute that every request takes beside its misses.
    """

    bandwidth: float | Sequence[float] = 5e9
    prefill: float = 40_000.0
    layers: int = 32
    overlap: bool = True
    first_token: float = 51.2

    def __post_init__(self) -> None:
        rates = self.bandwidth if isinstance(self.bandwidth, Sequence) else (self.bandwidth,)
        if not rates or min(rates) <= 0 or self.prefill <= 0 or self.layers < 1:
            raise ConfigError("a cost model needs positive bandwidths, prefill speed and layers")
        if self.first_token < 0:
            raise ConfigError(f"first_token cannot be negative: {self.first_token}")

    def rate(self, tier: int) -> float:
        """Bytes a second at which a tier is read."""
        if not isinstance(self.bandwidth, Sequence):
            return self.bandwidth
        return self.bandwidth[min(tier, len(self.bandwidth) - 1)]


@dataclass(frozen=True, slots=True)
class Setup:
    """One configuration to replay.

    Attributes:
        capacity_blocks: Blocks that each tier holds, fastest first; a number for a single tier,
            None in a list for a tier that never fills up.
        capacity_bytes: The same in bytes (or text such as ``"8GiB"``), instead.
        policy: Eviction policy; one for all tiers, or one a tier.
        admission: Admission; one for all tiers, or one a tier.
        prefetch: Predictors, as in :class:`tierkv.EngineConfig`; empty: none.
        prefetch_budget: Bytes a second that they may move; None: no limit.
        prefetch_floor: Share of a predictor's prefetches that must be right.
        hints: Whether the stop reasons and announced returns of the trace are told.
        touch_order: Which block of a request counts as used last: ``"leaf_first"``: its first,
            as in the engine; ``"root_first"``: its last, as in some published figures.
        write_through: Whether new blocks are copied to the slower tiers at once.
        high: Used share of a tier above which room is made in the background; 1: when needed.
        low: Used share down to which it is made.
        tick: Seconds between two looks at that.
        names: Names of the tiers; empty: by their number.
        model: What takes time.
    """

    capacity_blocks: int | Sequence[int | None] | None = None
    capacity_bytes: int | str | Sequence[int | str | None] | None = None
    policy: str | Sequence[str] = "lrfu"
    admission: str | Sequence[str] = "all"
    prefetch: str = ""
    prefetch_budget: int | str | None = None
    prefetch_floor: float = 0.25
    hints: bool = True
    touch_order: str = "leaf_first"
    write_through: bool = True
    high: float = 1.0
    low: float = 1.0
    tick: float = 0.25
    names: Sequence[str] = ()
    model: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if (self.capacity_blocks is None) == (self.capacity_bytes is None):
            raise ConfigError("a setup needs capacity_blocks or capacity_bytes, and not both")
        count = len(self.capacities(1))
        if not 1 <= count <= 8:
            raise ConfigError(f"a setup has 1 to 8 tiers, not {count}")
        for name in ("policy", "admission", "names"):
            value = getattr(self, name)
            if value and not isinstance(value, str) and len(value) != count:
                raise ConfigError(f"{count} tiers need one {name} or as many, not {len(value)}")
        if self.touch_order not in _ORDERS:
            raise ConfigError(f"touch_order is one of {_ORDERS}, not {self.touch_order!r}")
        if not 0 < self.low <= self.high <= 1 or self.tick <= 0:
            raise ConfigError("a setup needs 0 < low <= high <= 1, and a positive tick")

    def capacities(self, block_bytes: int) -> list[int]:
        """Bytes of each tier, where a block takes so many.

        Raises:
            ConfigError: if one is no size, or more than any medium has.
        """
        unit, most = (block_bytes, _UNLIMITED) if self.capacity_bytes is None else (1, _MOST_BYTES)
        sizes = []
        for given in self._listed():
            size = _UNLIMITED if given is None else parse_bytes(given)
            if size > most:
                raise ConfigError(f"no tier is as large as {given}; 'inf' (None) has no limit")
            sizes.append(size * (block_bytes if given is None else unit))
        return sizes

    def _listed(self) -> list[int | str | None]:
        values = self.capacity_blocks if self.capacity_bytes is None else self.capacity_bytes
        return [values] if isinstance(values, int | str) or values is None else list(values)

    def blocks(self, block_bytes: int) -> list[int | None]:
        """Blocks that each tier holds; None where it never fills up."""
        sizes = zip(self._listed(), self.capacities(block_bytes), strict=True)
        return [None if given is None else size // block_bytes for given, size in sizes]

    def each(self, value: str | Sequence[str]) -> list[str]:
        """A setting, spelt out for each tier."""
        count = len(self.capacities(1))
        return [value] * count if isinstance(value, str) else list(value)

    def tier_names(self) -> list[str]:
        """Name of each tier."""
        count = len(self.capacities(1))
        return list(self.names or _NAMES.get(count) or [f"tier{i}" for i in range(count)])
