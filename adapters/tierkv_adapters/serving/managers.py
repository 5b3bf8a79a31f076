"""The engine of one rank: its configuration among other ranks, and where it comes from."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.blocking import CacheManager
from tierkv.chains import parse_chains
from tierkv.config import engine_chains, load_config
from tierkv.errors import AttachError
from tierkv_adapters.serving.registry import borrowed

if TYPE_CHECKING:
    from tierkv.config import EngineConfig, Tier

__all__ = ["Opened", "is_lossy", "open_manager", "rank_config"]

_OF_ONE_PROCESS = "nvme"  # kinds of tiers whose root has one owner


class Opened(NamedTuple):
    """The manager of a rank.

    Attributes:
        manager: Open.
        owned: Whether the rank opened it, and so closes it.
    """

    manager: CacheManager
    owned: bool


def open_manager(source: Any, token: str | None, number: int, workers: int) -> Opened:
    """The manager lent under ``token`` in this process, or a new one from settings.

    Args:
        source: File or mapping of an :class:`~tierkv.config.EngineConfig`, or None: from the
            environment alone.
        token: See :func:`~tierkv_adapters.serving.registry.lend`; None: none was lent.
        number: Number of this rank among all workers.
        workers: How many workers there are.

    Raises:
        AttachError: if nothing is lent under the token here.
        ConfigError: if there is no tier, or a setting cannot be honoured.
        BackendError: if a tier cannot be used.
    """
    if token is not None:
        manager = borrowed(token)
        if manager is None:
            raise AttachError(
                "this engine was attached to a manager of the process that builds it, and its "
                "worker runs in another process: set VLLM_ENABLE_V1_MULTIPROCESSING alike for "
                "attach() and for the engine, and keep the manager open"
            )
        return Opened(manager, owned=False)
    config = rank_config(load_config(source).config, number, workers)
    return Opened(CacheManager(config).open(), owned=True)


def rank_config(config: EngineConfig, number: int, workers: int) -> EngineConfig:
    """Settings of one of several ranks that share a machine, from those of all.

    Roots that have one owner get a directory of their own, ``{path}/rank{number}`` (or
    ``{worker}`` in the path is replaced by it); shared directories stay, since the keys of ranks
    differ. Logs get a suffix; of a port to serve metrics on, rank r takes the r-th behind it.
    Capacities are those of each rank.
    """
    if workers == 1:
        return config
    name = f"rank{number}"
    port = config.metrics_port
    return config.replace(
        name=f"{config.name}-{name}",
        tiers=tuple(_tier(tier, name) for tier in config.tiers),
        metrics_port=port + number if port else port,
        decision_log=_suffixed(config.decision_log, name),
        trace=_suffixed(config.trace, name),
    )


def _tier(tier: Tier, name: str) -> Tier:
    if tier.path is None:
        return tier
    if "{worker}" in tier.path:
        return dataclasses.replace(tier, path=tier.path.replace("{worker}", name))
    if tier.kind == _OF_ONE_PROCESS:
        return dataclasses.replace(tier, path=os.path.join(tier.path, name))
    return tier


def _suffixed(path: str | None, name: str) -> str | None:
    """``dir/log.jsonl.zst`` becomes ``dir/log.rank1.jsonl.zst``."""
    if path is None:
        return None
    folder, file = os.path.split(path)
    stem, dot, rest = file.partition(".")
    return os.path.join(folder, f"{stem}.{name}{dot}{rest}")


def is_lossy(config: EngineConfig) -> bool:
    """Whether any tier is set to keep less than every bit, which needs pages described."""
    return not all(parse_chains(chain).lossless for chain in engine_chains(config))
