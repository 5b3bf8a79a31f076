"""TensorRT-LLM's connector base classes, wherever this installation has them, or stand-ins.

The module moved: releases of 2026 have it under ``pyexecutor.connectors``, earlier ones directly
under ``pyexecutor``. Where TensorRT-LLM cannot be imported, structural stand-ins take their place:
everything here then works, and can be tested, against whatever calls the hooks in the documented
order (:mod:`tierkv.testing.trtllm`).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["MODULE_PATHS", "SchedulerBase", "WorkerBase", "engine_version", "find_bases", "rank_of"]

MODULE_PATHS: Final = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Where the base classes are looked for, newest first."""

_RANKS: Final = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


class _StandInScheduler:
    """What the runtime's scheduler base class does, where there is no runtime."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


class _StandInWorker:
    """What the runtime's worker base class does, where there is no runtime."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None


def find_bases(paths: tuple[str, ...] = MODULE_PATHS) -> tuple[type, type, str | None]:
    """Scheduler base, worker base, and the module they come from; None: stand-ins.

    Raises:
        ConfigError: if TensorRT-LLM is there, but none of the known modules: its connector
            interface is then unknown, and stand-ins would be refused by it in a harder way to read.
    """
    for path in paths:
        module = _load(path)
        if module is not None:
            return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker, path
    if _load(paths[0].partition(".")[0]) is not None:
        raise ConfigError(
            f"this TensorRT-LLM has its connector interface in none of {', '.join(paths)}; "
            "tierkv needs 1.1 or newer, and an adapter that knows this version"
        )
    return _StandInScheduler, _StandInWorker, None


def _load(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # what is missing must be a part of the path itself: anything else is a broken installation
        if error.name is not None and f"{path}.".startswith(f"{error.name}."):
            return None
        raise


if TYPE_CHECKING:
    SchedulerBase = _StandInScheduler
    WorkerBase = _StandInWorker
else:
    SchedulerBase, WorkerBase, _found = find_bases()


def engine_version() -> str:
    """Version of the TensorRT-LLM that is imported; empty if none is."""
    module = _load("tensorrt_llm")
    return "" if module is None else str(getattr(module, "__version__", ""))


def rank_of(llm_args: Any, rank: int | None = None) -> tuple[int, int]:
    """(rank, world) of this worker's shard of the KV.

    Args:
        llm_args: The runtime's settings; ``tensor_parallel_size`` is the world.
        rank: What the caller knows better; None asks the runtime, then the launcher's variables.

    Raises:
        ConfigError: if several ranks are configured and nothing tells which this is.
    """
    world = int(getattr(llm_args, "tensor_parallel_size", 1) or 1)
    if rank is None:
        rank = _mpi_rank()
    if rank is None and world == 1:
        rank = 0
    if rank is None:
        raise ConfigError(
            f"tensor_parallel_size is {world}, but nothing tells which rank this process is: start "
            f"the server through MPI, or set {_RANKS[0]}"
        )
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} does not fit tensor_parallel_size {world}")
    return rank, world


def _mpi_rank() -> int | None:
    module = _load("tensorrt_llm._utils")
    if module is not None:
        return int(module.mpi_rank())
    for name in _RANKS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return None
