"""``attach``: vLLM and a manager, joined by vLLM's own configuration.

::

    args = tierkv_vllm.attach(EngineArgs(model=...), manager)  # before the engine is built
    llm = LLM(**vars(args))  # or LLMEngine.from_engine_args(args), AsyncLLM.from_engine_args(args)
    kv = tierkv_vllm.attach(llm, manager)  # a handle
    with manager.use_session("chat-42"):
        kv.generate("Write quicksort in Python.", max_tokens=200, temperature=0.0)
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierkv.blocking import CacheManager
from tierkv.config import EngineConfig, load_config
from tierkv.errors import AttachError, ClosedError
from tierkv.registry import resolve
from tierkv_adapters.serving.settings import ServingSettings
from tierkv_adapters.vllm.attached.engines import is_async, is_engine, transfer_of, vllm_config_of
from tierkv_adapters.vllm.attached.handle import AsyncHandle, Handle
from tierkv_adapters.vllm.attached.joining import join, meet
from tierkv_adapters.vllm.attached.room import check_room, cuda_memory
from tierkv_adapters.vllm.plugin import CONNECTOR, MODULE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["attach"]

_OFFLOADING = ("kv_offloading_size",)
_IN_CORE = (None, "uni")  # executors whose one worker lives in the engine core's process


def attach(
    target: Any,
    manager: Any = None,
    *,
    tokenizer: Any = None,
    memory: Callable[[str], tuple[int, int] | None] = cuda_memory,
    **settings: Any,
) -> Any:
    """Join a manager to vLLM: to the arguments of an engine, or to an engine built from them.

    *Arguments* (``EngineArgs``, ``AsyncEngineArgs``, or a mapping of their fields) come back as a
    copy of the same kind that names our connector; what was passed is not changed. Where the engine
    core runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``, one worker) and a manager is
    given, that very manager serves. Else (vLLM's default) its configuration travels to the
    workers: the manager's own engine is closed at once, since roots, ports and memory have one
    owner, and the manager becomes a client of the first rank's engine once that is there; sessions
    created before are created there. Until then what needs the engine raises ``ClosedError``.

    *A built engine* (``LLM``, ``LLMEngine``, ``AsyncLLM``) gives a handle, whose ``generate`` works
    in the manager's sessions.

    Args:
        target: Arguments, or an engine.
        manager: A manager, or settings for one (a mapping, a TOML file, an ``EngineConfig``); with
            an engine: its manager, or None for whichever is.
        tokenizer: For a handle: instead of the engine's own.
        memory: Tells free and total bytes of a CUDA device, or None where there is none.
        **settings: For arguments: more of
            :class:`~tierkv_adapters.serving.settings.ServingSettings`, e.g. ``load_deadline``.

    Returns:
        Arguments of the same kind, or a :class:`~tierkv_adapters.vllm.attached.handle.Handle` (an
        :class:`~tierkv_adapters.vllm.attached.handle.AsyncHandle` for ``AsyncLLM``).

    Raises:
        AttachError: if it cannot be done; says what to change. Device tiers that would not fit
            beside what vLLM takes are refused with both numbers.
        ClosedError: if the manager was closed, or is not open where it has to serve itself.
        ConfigError: if a setting makes no sense.
    """
    if is_engine(target):
        if settings:
            raise AttachError(
                f"{', '.join(sorted(settings))}: settings go with the arguments, before the engine "
                "is built"
            )
        return _handle(target, manager, tokenizer)
    return _arguments(target, manager, settings, memory)


# ------------------------------------------------------------------ arguments


def _arguments(
    target: Any,
    manager: Any,
    settings: dict[str, Any],
    memory: Callable[[str], tuple[int, int] | None],
) -> Any:
    if manager is None:
        raise AttachError("attach(EngineArgs(...), manager): a manager, or settings for one")
    values = dict(target) if isinstance(target, Mapping) else target
    if not isinstance(values, dict) and not hasattr(values, "kv_transfer_config"):
        raise AttachError(
            "attach takes EngineArgs, AsyncEngineArgs, a mapping of their fields, or a built LLM, "
            f"LLMEngine or AsyncLLM of vLLM, not {type(target).__name__}"
        )
    _check_free(values)
    ServingSettings.parse(settings, engine="vllm")
    config = _config_of(manager)
    share = _get(values, "gpu_memory_utilization")
    check_room(config, share, taken=_is_open(manager), memory=memory)
    extra = join(manager, _workers(values), here=_in_process(values))
    return _with(values, {**extra, **settings})


def _config_of(manager: Any) -> EngineConfig:
    """Settings of a manager, or of one to come.

    Raises:
        AttachError: if it is neither.
        ConfigError: if they make no sense, down to the kinds of the tiers: said before a model is
            loaded for them.
    """
    if isinstance(manager, CacheManager):
        return manager.config
    if not isinstance(manager, EngineConfig | Mapping | str | os.PathLike):
        raise AttachError(
            "attach(EngineArgs(...), manager) takes a manager, or settings for one (a mapping, a "
            f"TOML file, an EngineConfig), not {type(manager).__name__}"
        )
    config = load_config(manager).config
    for tier in config.tiers:
        resolve("backends", tier.kind)
    return config


def _get(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, dict) else getattr(values, name, None)


def _check_free(values: Any) -> None:
    """Refuse arguments that have another connector already.

    Raises:
        AttachError: with the line to write instead.
    """
    given = _get(values, "kv_transfer_config")
    if given is not None:
        found = transfer_of(given)
        if found.extra is None:
            raise AttachError(
                f"kv_transfer_config names {found.name!r}; vLLM takes one connector, which may "
                "hold several: KVTransferConfig(kv_connector='MultiConnector', kv_role='kv_both', "
                "kv_load_failure_policy='recompute', kv_connector_extra_config={'connectors': ["
                f"{{'kv_connector': {found.name!r}, ...}}, {{'kv_connector': {CONNECTOR!r}, "
                f"'kv_connector_module_path': {MODULE!r}, 'kv_role': 'kv_both'}}]}}), then attach"
            )
        for name in ("config", "manager"):
            if found.extra.get(name) is not None:
                raise AttachError(
                    f"kv_connector_extra_config has {name!r} already: take it out, or build the "
                    "engine from these arguments as they are"
                )
    for name in _OFFLOADING:
        if _get(values, name):
            raise AttachError(f"{name} makes vLLM's own offloading the connector: leave it out")


def _with(values: Any, extra: dict[str, Any]) -> Any:
    """A copy of the arguments with our connector in them."""
    given = _get(values, "kv_transfer_config")
    ours = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    found = transfer_of(given)
    if found.name in (None, CONNECTOR):
        plain = {**ours, "kv_connector_extra_config": {**(found.extra or {}), **extra}}
    else:  # one of several
        outer = given if isinstance(given, Mapping) else vars(given)
        shared = dict(outer.get("kv_connector_extra_config") or {})
        children = []
        for child in shared.get("connectors") or ():
            child = dict(child) if isinstance(child, Mapping) else dict(vars(child))
            if child.get("kv_connector") == CONNECTOR:
                inner = child.get("kv_connector_extra_config") or {}
                child = {**child, **ours, "kv_connector_extra_config": {**inner, **extra}}
            children.append(child)
        plain = {
            "kv_connector": found.name,
            "kv_role": outer.get("kv_role") or "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**shared, "connectors": children},
        }
    if isinstance(values, dict):
        return {**values, "kv_transfer_config": plain}
    changed = copy.copy(values)
    changed.kv_transfer_config = _transfer_class(values)(**plain)
    return changed


def _transfer_class(values: Any) -> Callable[..., Any]:
    """``KVTransferConfig`` of the vLLM whose arguments these are."""
    if any(base.__module__.split(".")[0] == "vllm" for base in type(values).__mro__):
        kind: Callable[..., Any] = importlib.import_module("vllm.config").KVTransferConfig
        return kind
    return dict


def _workers(values: Any) -> int:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    workers = 1
    for name in names:
        workers *= int(_get(values, name) or 1)
    return workers


def _in_process(values: Any) -> bool:
    """Whether the engine's one worker will be in this process, by vLLM's own rules."""
    asynchronous = any(base.__name__ == "AsyncEngineArgs" for base in type(values).__mro__)
    split = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1").strip() != "0"
    executor = _get(values, "distributed_executor_backend")
    return not (asynchronous or split) and executor in _IN_CORE and _workers(values) == 1


def _is_open(manager: Any) -> bool:
    if not isinstance(manager, CacheManager):
        return False
    try:
        _ = manager.engine
    except ClosedError:
        return False
    return True


# ------------------------------------------------------------------ engines


def _handle(engine: Any, manager: Any, tokenizer: Any) -> Handle | AsyncHandle:
    config = vllm_config_of(engine)
    found = transfer_of(getattr(config, "kv_transfer_config", None))
    if found.extra is None:
        has = f"has the connector {found.name!r}" if found.name else "was built without a connector"
        raise AttachError(
            f"this engine {has}, and vLLM takes none later: before it is built, write "
            "args = attach(EngineArgs(...), manager), and build it from args"
        )
    if manager is not None and not isinstance(manager, CacheManager):
        raise AttachError(
            "attach(engine, manager) takes the manager that the engine was built with, not "
            f"{type(manager).__name__}; settings go with its arguments"
        )
    parallel = config.parallel_config
    replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
    met = meet(found.extra, int(parallel.world_size) * replicas, manager)
    kind = AsyncHandle if is_async(engine) else Handle
    return kind(engine, met, tokenizer)
