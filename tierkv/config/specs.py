"""Frozen specs: what an engine is made of. Checked and normalised when they are made."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierkv.config.compression import CompressionPolicy, as_rules
from tierkv.config.fields import NONE, check_types, did_you_mean, set_field
from tierkv.config.policies import Hybrid, Policy
from tierkv.errors import ConfigError
from tierkv.units import format_bytes, parse_bytes, parse_duration

__all__ = ["EngineConfig", "Tier"]

_TENANT_KEYS = ("quota", "reserved", "session_quota")
_SMALLEST_FRAME = 8 << 10  # a page of header and a page of payload
_NOT_OF_KIND = {  # what a backend has no use for
    "host": ("path", "device"),
    "nvme": ("device",),
    "file": ("device",),
    "device": ("path",),
}
_IN_MEMORY = ("host", "device")
_AUTO = "auto"
_AUTO_CHAIN = "planes"
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier, fastest first in the list of an engine.

    Attributes:
        kind: Name of a backend: ``"device"``, ``"host"``, ``"nvme"``, ``"file"``, ...
        capacity: Bytes, or text such as ``"8GiB"``; for this process.
        path: Directory of a tier on disk; ``{worker}`` is replaced by ``$TIERKV_WORKER`` or ``0``.
        name: Name in stats and metrics; the kind by default.
        codec: Codec chain of the frames kept here, e.g. ``"raw"``, ``"zstd"``, ``"int8+zstd"``;
            None takes the engine's ``compression``. ``"auto"`` takes ``planes`` while that makes
            the tier faster, as measured, and ``raw`` otherwise; ``"auto:CHAIN"`` does so with
            another lossless chain.
        policy: Eviction policy of this tier; None takes the engine's.
        admission: What may enter the tier: ``"all"``, ``"second_use"`` (what was asked for twice;
            ``"second_use:when_full"``: only once it is full), ``"tinylfu"`` (what is asked for
            more often than what would leave for it), ``"write_budget:200GiB"`` (so many bytes a
            day), or a plug-in.
        device: Device of a device tier, e.g. ``"cuda:0"``; None takes the GPU, or else the CPU.
        write_through: Whether new blocks are copied here at once (tiers after the first).
        high: Used share above which the engine makes room in the background.
        low: Used share down to which it does.
        options: Further settings of the backend; unknown ones are refused by it.
    """

    kind: str
    capacity: int | str
    path: str | None = None
    name: str = ""
    codec: str | None = None
    policy: str | None = None
    admission: str = "all"
    device: str | None = None
    write_through: bool = True
    high: float = 0.95
    low: float = 0.85
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "tier", kind=str, name=str, admission=str)
        if not self.kind:
            raise ConfigError("a tier needs a kind, e.g. 'host' or 'nvme'")
        set_field(self, "name", self.name or self.kind)
        what = f"tier {self.name!r}"
        if isinstance(self.path, os.PathLike):
            set_field(self, "path", os.fspath(self.path))
        optional = (str, NONE)
        check_types(self, what, path=optional, codec=optional, policy=optional, device=optional)
        check_types(
            self, what, write_through=bool, high=(int, float), low=(int, float), options=Mapping
        )
        if self.codec == "" or self.policy == "" or self.admission == "":
            raise ConfigError(
                f"{what}: codec, policy and admission are names, or left out; not empty"
            )
        if self.candidate == "":
            raise ConfigError(f"{what}: codec 'auto:CHAIN' needs a chain, e.g. 'auto:zstd'")
        if self.candidate is not None and self.kind in _IN_MEMORY:
            raise ConfigError(
                f"{what}: codec {self.codec!r} weighs decoding against reading from a medium; a "
                f"{self.kind!r} tier is memory: name a chain, or none"
            )
        set_field(self, "options", copy.deepcopy(dict(self.options)))
        set_field(self, "capacity", _size(self.capacity, f"{what}: capacity"))
        _roomy(self.capacity_bytes, f"{what}: capacity")
        for name in _NOT_OF_KIND.get(self.kind, ()):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{what}: {name} has no meaning for a {self.kind!r} tier; drop it"
                )
        if self.path is not None and (not self.path or "\0" in self.path):
            raise ConfigError(f"{what}: path {self.path!r} names no directory")
        strange = [p for p in _PLACEHOLDER.findall(self.path or "") if p != "{worker}"]
        if strange:
            raise ConfigError(
                f"{what}: unknown placeholder {strange[0]} in path {self.path!r}; only {{worker}} "
                f"is replaced"
            )
        if not 0 < self.low <= self.high <= 1:
            raise ConfigError(f"{what}: need 0 < low <= high <= 1, not {self.low}, {self.high}")

    @property
    def capacity_bytes(self) -> int:
        """Capacity in bytes."""
        return int(self.capacity)

    @property
    def candidate(self) -> str | None:
        """The chain of codec ``"auto"``, used where it pays; None if the chain is fixed."""
        head, colon, chain = (self.codec or "").partition(":")
        return None if head != _AUTO else chain if colon else _AUTO_CHAIN

    @property
    def root(self) -> str | None:
        """Directory of this process: ``path`` with ``{worker}`` filled in and ``~`` expanded."""
        if self.path is None:
            return None
        worker = os.environ.get("TIERKV_WORKER", "0")
        if not worker.isalnum():
            raise ConfigError(f"TIERKV_WORKER must be letters and digits, not {worker!r}")
        return os.path.expanduser(self.path.replace("{worker}", worker))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know; see README for the table of settings.

    Attributes:
        tiers: Fastest first.
        policy: Eviction policy of the tiers that name none.
        compression: Codec chain of the tiers that name none; None stores raw bytes. A rule, or a
            list of rules, says when (:class:`~tierkv.config.CompressionPolicy`).
        block_tokens: Tokens per block, where the space is built by an adapter.
        tenants: Per tenant limits: ``{"acme": {"quota": {"host": "1GiB"}, "reserved": {...},
            "session_quota": "256MiB"}}``; sizes are bytes once the spec is made.
        staging: Bytes of engine-owned staging memory.
        write_queue: Bytes that may wait for a slower tier; beyond it the tail is not written.
        threads: Worker threads for what somebody waits for; background copies and prefetch have
            half as many each beside them.
        close_timeout: Seconds that ``aclose`` may wait for writes under way.
        tier_timeout: Seconds without any answer after which a tier is taken to hang; more where
            the batches under way are large for what was learned of the tier.
        busy: ``"wait"`` or ``"refuse"``: a second turn on a session that has one running.
        verify_host: Whether checksums are verified on every load from memory tiers.
        history: Parts whose eviction reason is remembered for ``explain``.
        tick: Seconds between background checks (TTL, watermarks).
        metrics: Whether a Prometheus registry is kept.
        metrics_port: Loopback port to serve ``/metrics`` on; None opens no port; 0 picks one.
        decision_log: File to which the decision log is written, or None.
        trace: File to which the workload trace is written (``.jsonl.zst``), or None.
        prefetch: Predictors whose wishes are prefetched, e.g. ``"arrival,chain"``, each with
            options if need be (``"return_time:chance=0.5"``); empty: none.
        prefetch_budget: Bytes a second that predictions may move; None: no limit. What a request
            that is there needs (``arrival``, ``engine.prefetch``) counts, but is never refused.
        prefetch_floor: Share of a predictor's prefetches that must be asked for later; below it
            the predictor is off for a while. 0 never turns one off.
        name: Name of the engine in its repr, threads and logs.
    """

    tiers: Sequence[Tier]
    policy: str | Policy | Hybrid = "lrfu"
    compression: str | CompressionPolicy | Sequence[CompressionPolicy] | None = None
    block_tokens: int = 64
    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    staging: int | str = "256MiB"
    write_queue: int | str = "1GiB"
    threads: int = 4
    close_timeout: float | str = 10.0
    tier_timeout: float | str = 10.0
    busy: str = "wait"
    verify_host: bool = True
    history: int = 65536
    tick: float | str = 0.25
    metrics: bool = True
    metrics_port: int | None = None
    decision_log: str | None = None
    trace: str | None = None
    prefetch: str = ""
    prefetch_budget: int | str | None = None
    prefetch_floor: float = 0.25
    name: str = "tierkv"

    def __post_init__(self) -> None:
        what = "configuration"
        if isinstance(self.decision_log, os.PathLike):
            set_field(self, "decision_log", os.fspath(self.decision_log))
        if isinstance(self.trace, os.PathLike):
            set_field(self, "trace", os.fspath(self.trace))
        check_types(self, what, policy=(str, Policy, Hybrid), name=str, busy=str, tenants=Mapping)
        check_types(self, what, decision_log=(str, NONE), trace=(str, NONE))
        for key in ("decision_log", "trace"):
            name = getattr(self, key)
            if name is not None and (not name or "\0" in name):
                why = f"{key} {name!r} names no file; leave it out for none"
                raise ConfigError(why, setting=key)
        set_field(self, "compression", as_rules(self.compression))
        check_types(self, what, block_tokens=int, threads=int, history=int, verify_host=bool)
        check_types(self, what, metrics=bool, metrics_port=(int, NONE))
        set_field(self, "tiers", _tiers(self.tiers))
        for key in ("staging", "write_queue"):
            set_field(self, key, _size(getattr(self, key), key))
        for key in ("close_timeout", "tier_timeout", "tick"):
            set_field(self, key, _seconds(getattr(self, key), key))
        if self.busy not in ("wait", "refuse"):
            raise ConfigError(f"busy must be 'wait' or 'refuse', not {self.busy!r}", setting="busy")
        for key in ("block_tokens", "threads", "tick", "tier_timeout"):
            if getattr(self, key) <= 0:
                value = getattr(self, key)
                raise ConfigError(f"{key} must be positive, not {value!r}", setting=key)
        _roomy(int(self.staging), "staging")
        if self.history < 0:
            raise ConfigError(f"history must not be negative: {self.history}", setting="history")
        _check_port(self.metrics_port, self.metrics)
        self._check_prefetch()
        set_field(self, "tenants", _tenants(self.tenants, self.tiers))

    def _check_prefetch(self) -> None:
        check_types(self, "configuration", prefetch=str, prefetch_floor=(int, float))
        if self.prefetch_budget is not None:
            budget = _size(self.prefetch_budget, "prefetch_budget")
            set_field(self, "prefetch_budget", budget)
            if not budget:
                why = "prefetch_budget must be positive; for no prefetch leave prefetch empty"
                raise ConfigError(why, setting="prefetch_budget")
        if not 0 <= self.prefetch_floor <= 1:
            raise ConfigError(
                f"prefetch_floor is a share from 0 to 1, not {self.prefetch_floor!r}",
                setting="prefetch_floor",
            )

    def replace(self, **changes: Any) -> EngineConfig:
        """Return a copy with some settings changed, checked again.

        Raises:
            ConfigError: if a setting is unknown or does not fit.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}; {did_you_mean(name, known)}")
        return dataclasses.replace(self, **changes)


def _check_port(port: int | None, metrics: bool) -> None:
    problem = None
    if port is not None and not 0 <= port <= 65535:
        problem = f"metrics_port must be from 0 to 65535, not {port}"
    elif port is not None and not metrics:
        problem = "metrics_port needs metrics = true: there is nothing to serve"
    if problem:
        raise ConfigError(problem, setting="metrics_port")


def _size(value: int | str, where: str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", setting=where) from None


def _roomy(nbytes: int, where: str) -> None:
    # larger blocks need more, and only an engine with a space can tell how much
    if nbytes < _SMALLEST_FRAME:
        raise ConfigError(
            f"{where}: {format_bytes(nbytes)} cannot hold even the smallest block; raise it to "
            f"{format_bytes(_SMALLEST_FRAME)} or more, e.g. '256MiB'",
            setting=where,
        )


def _seconds(value: float | str, where: str) -> float:
    try:
        return parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", setting=where) from None


def _tiers(value: Sequence[Tier]) -> tuple[Tier, ...]:
    if isinstance(value, Tier | str) or not all(isinstance(tier, Tier) for tier in value):
        raise ConfigError("tiers must be a list of tierkv.Tier, e.g. [Tier('host', '1GiB')]")
    if not value:
        raise ConfigError("an engine needs at least one tier, e.g. Tier('host', '1GiB')")
    names = [tier.name for tier in value]
    if len(set(names)) != len(names):
        raise ConfigError(f"tier names must be unique: {names}; give one of them another name=")
    return tuple(value)


def _tenants(
    value: Mapping[str, Mapping[str, Any]], tiers: Sequence[Tier]
) -> dict[str, dict[str, Any]]:
    names = [tier.name for tier in tiers]
    out: dict[str, dict[str, Any]] = {}
    for tenant, limits in value.items():
        what = f"tenants.{tenant}"
        if not isinstance(limits, Mapping):
            raise ConfigError(f"{what} must be a table of limits, not {limits!r}", setting=what)
        for key in limits:
            if key not in _TENANT_KEYS:
                hint = did_you_mean(key, _TENANT_KEYS)
                where = f"{what}.{key}"
                raise ConfigError(f"{what}: unknown limit {key!r}; {hint}", setting=where)
        mine: dict[str, Any] = {}
        for key in ("quota", "reserved"):
            table = limits.get(key, {})
            where = f"{what}.{key}"
            if not isinstance(table, Mapping):
                raise ConfigError(f"{where} must map tiers to sizes, not {table!r}", setting=where)
            for tier in table:
                if tier not in names:
                    hint = did_you_mean(tier, names)
                    raise ConfigError(f"{where}: no tier {tier!r}; {hint}", setting=where)
            mine[key] = {t: _size(size, f"{where}.{t}") for t, size in table.items()}
        if limits.get("session_quota") is not None:
            mine["session_quota"] = _size(limits["session_quota"], f"{what}.session_quota")
        out[tenant] = mine
    for spec in tiers:
        total = sum(limits["reserved"].get(spec.name, 0) for limits in out.values())
        if total > spec.capacity_bytes:
            raise ConfigError(
                f"tenants: {total} bytes of tier {spec.name!r} are reserved, "
                f"but it holds {spec.capacity_bytes}"
            )
    return out
