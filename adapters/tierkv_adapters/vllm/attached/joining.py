"""Which manager belongs to which engine of vLLM: joined before the engine is built."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import weakref
from typing import Any

from tierkv.blocking import CacheManager
from tierkv.config import load_config, to_plain
from tierkv.errors import AttachError, ClosedError, ConfigError
from tierkv_adapters.remote.awaited import AwaitedEngines
from tierkv_adapters.serving.registry import lend, withdraw
from tierkv_adapters.vllm.attached.engines import sockets_of

__all__ = ["join", "joined_at", "meet"]

_AWAITED = "the vLLM engine"
_joined: dict[str, weakref.ref[CacheManager]] = {}


def join(source: Any, workers: int, *, here: bool) -> dict[str, Any]:
    """Join a manager, or settings for one, to the engine that is about to be built.

    Args:
        source: A manager, or what :class:`CacheManager` takes: settings, or their file.
        workers: Workers that the engine will have.
        here: Whether its one worker will be in this process.

    Returns:
        Plain data for ``kv_connector_extra_config``.

    Raises:
        AttachError: if the manager cannot be used there.
        ClosedError: if it was closed.
        ConfigError: if the settings make no sense.
    """
    manager = source if isinstance(source, CacheManager) else None
    config = manager.config if manager is not None else load_config(source).config
    if manager is not None and here:
        _ = manager.engine  # not open: said now, not when the engine is built
    elif manager is not None and not manager.portable:
        raise AttachError(
            "this manager has backends or an observer of this process, and the engine's "
            "workers are in others: configure its tiers by kind, or run vLLM in this process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0)"
        )
    folder = _folder()
    extra: dict[str, Any] = {"socket_dir": folder, "block_tokens": config.block_tokens}
    if manager is not None and here:
        token = lend(manager)
        weakref.finalize(manager, withdraw, token)
        extra["manager"] = token
    else:
        extra |= {"config": to_plain(config), "settled": True}
        if manager is not None:
            # roots, ports and memory of its engine go to the one that is built there
            _hand_over(manager, sockets_of(folder, workers))
    if manager is not None:
        _joined[folder] = weakref.ref(manager, lambda _: _joined.pop(folder, None))
    return extra


def meet(extra: dict[str, Any], workers: int, manager: CacheManager | None) -> CacheManager:
    """The manager of an engine that is built.

    Args:
        extra: Our settings in its configuration.
        workers: Workers that it has.
        manager: The manager that is expected to be its; None: whichever is.

    Raises:
        AttachError: if another manager is its, or nobody can reach its ranks.
    """
    folder = extra.get("socket_dir")
    if not folder:
        raise AttachError(
            "this engine's ranks cannot be reached: its connector has no socket_dir. Build it from "
            "attach(EngineArgs(...), manager), or add 'socket_dir': '/run/user/...' (a folder of "
            "yours alone) to kv_connector_extra_config"
        )
    known = joined_at(folder)
    if known is not None and manager in (None, known):
        return known
    if manager is not None:
        raise AttachError(
            f"this engine was not built with the manager {manager.config.name!r}: write "
            "args = attach(EngineArgs(...), manager) and build the engine from args"
        )
    manager = CacheManager(load_config(extra.get("config")).config)
    _hand_over(manager, sockets_of(folder, workers))
    _joined[folder] = weakref.ref(manager, lambda _: _joined.pop(folder, None))
    return manager


def joined_at(folder: str) -> CacheManager | None:
    """The manager of this process whose ranks have their sockets in a folder."""
    reference = _joined.get(folder)
    return None if reference is None else reference()


def _hand_over(manager: CacheManager, sockets: list[str]) -> None:
    there = AwaitedEngines(sockets, _AWAITED)
    try:
        manager.hand_over(there, awaited=True)
    except (ClosedError, ConfigError):
        there.close()
        raise


def _folder() -> str:
    """A private folder for the ranks' sockets; it goes when this process ends."""
    folder = tempfile.mkdtemp(prefix="tierkv-ranks-")  # 0700
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, pid: int) -> None:
    if pid == os.getpid():  # a forked engine inherits what is done at exit, but not the folder
        shutil.rmtree(folder, ignore_errors=True)
