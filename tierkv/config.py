"""Configuration: frozen specs, and the strict layers TOML < environment < keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tierkv.errors import ConfigError
from tierkv.units import parse_bytes, parse_duration

__all__ = ["CompressionPolicy", "EngineConfig", "Hybrid", "Policy", "Tier"]


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier, fastest first in the list of an engine.

    Attributes:
        kind: Name of a backend: ``"host"``, ``"nvme"``, ...
        capacity: Bytes, or text such as ``"8GiB"``; for this process.
        path: Directory of a tier on disk; ``{worker}`` is replaced by ``$TIERKV_WORKER`` or ``0``.
        name: Name in stats and metrics; the kind by default.
        codec: Codec chain of the frames kept here, e.g. ``"raw"``, ``"zstd"``, ``"int8+zstd"``.
        policy: Eviction policy of this tier; None takes the engine's.
        device: Device of a device tier, e.g. ``"cuda:0"``.
        write_through: Whether new blocks are copied here at once (tiers after the first).
        high: Used share above which the engine makes room in the background.
        low: Used share down to which it does.
        options: Further settings of the backend; unknown ones are refused by it.
    """

    kind: str
    capacity: int | str
    path: str | None = None
    name: str = ""
    codec: str = "raw"
    policy: str | None = None
    device: str | None = None
    write_through: bool = True
    high: float = 0.95
    low: float = 0.85
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.kind:
            raise ConfigError("a tier needs a kind, e.g. 'host' or 'nvme'")
        object.__setattr__(self, "name", self.name or self.kind)
        capacity = parse_bytes(self.capacity)
        if capacity <= 0:
            raise ConfigError(f"tier {self.name!r}: capacity must be positive, not {self.capacity!r}")
        object.__setattr__(self, "capacity", capacity)
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(
                f"tier {self.name!r}: need 0 < low <= high <= 1, not {self.low}, {self.high}"
            )

    @property
    def capacity_bytes(self) -> int:
        """Capacity in bytes."""
        return int(self.capacity)


@dataclass(frozen=True, slots=True)
class Policy:
    """An eviction policy by name.

    Attributes:
        name: Name of a policy: ``"lru"``, ``"lrfu"``, ...
        tier: Tier it is for; None means every tier.
        unit: What is evicted at once: ``"part"`` or ``"session"``.
        action: ``"evict"`` or ``"demote"``.
        to: Tier that demoted parts go to.
    """

    name: str
    tier: str | None = None
    unit: str = "part"
    action: str = "evict"
    to: str | None = None


@dataclass(frozen=True, slots=True)
class Hybrid:
    """An ordered list of policies; see :class:`Policy`."""

    rules: list[Policy]


@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """Which codec chain is used, and when.

    Attributes:
        chain: Codec chain, e.g. ``"int8"``.
        after_steps: Tokens that follow a block before it is compressed; 0 = at once.
    """

    chain: str
    after_steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know; see README for the table of settings.

    Attributes:
        tiers: Fastest first.
        policy: Eviction policy of the tiers that name none.
        block_tokens: Tokens per block, where the space is built by an adapter.
        tenants: Per tenant limits: ``{"acme": {"quota": {"host": "1GiB"}, "reserved": {...},
            "session_quota": "256MiB"}}``.
        staging: Bytes of engine-owned staging memory.
        write_queue: Bytes that may wait for a slower tier; beyond it the tail is not written.
        threads: Worker threads for I/O and copies.
        close_timeout: Seconds that ``aclose`` may wait for writes under way.
        busy: ``"wait"`` or ``"refuse"``: a second turn on a session that has one running.
        verify_host: Whether checksums are verified on every load from memory tiers.
        history: Parts whose eviction reason is remembered for ``explain``.
        tick: Seconds between background checks (TTL, watermarks).
        metrics: Whether a Prometheus registry is kept.
        metrics_port: Loopback port to serve ``/metrics`` on; None opens no port; 0 picks one.
        decision_log: File to which the decision log is written, or None.
        name: Name of the engine in metrics and repr.
    """

    tiers: tuple[Tier, ...]
    policy: str = "lrfu"
    block_tokens: int = 64
    tenants: dict[str, dict[str, Any]] = field(default_factory=dict)
    staging: int | str = "256MiB"
    write_queue: int | str = "1GiB"
    threads: int = 4
    close_timeout: float | str = 10.0
    busy: str = "wait"
    verify_host: bool = True
    history: int = 65536
    tick: float | str = 0.25
    metrics: bool = True
    metrics_port: int | None = None
    decision_log: str | None = None
    name: str = "tierkv"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(self.tiers))
        if not self.tiers:
            raise ConfigError("an engine needs at least one tier, e.g. Tier('host', '1GiB')")
        names = [t.name for t in self.tiers]
        if len(set(names)) != len(names):
            raise ConfigError(f"tier names must be unique: {names}")
        for key in ("staging", "write_queue"):
            object.__setattr__(self, key, parse_bytes(getattr(self, key)))
        for key in ("close_timeout", "tick"):
            object.__setattr__(self, key, parse_duration(getattr(self, key)))
        if self.busy not in ("wait", "refuse"):
            raise ConfigError(f"busy must be 'wait' or 'refuse', not {self.busy!r}")
