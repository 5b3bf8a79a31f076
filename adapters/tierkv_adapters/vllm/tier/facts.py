"""Whose KV is in the rows of vLLM's CPU tier: everything that vLLM's own keys leave out."""

from __future__ import annotations

import dataclasses
import inspect
import uuid
from typing import TYPE_CHECKING, Any

import torch

from tierkv.blocks import Identity
from tierkv.errors import AttachError
from tierkv.layout import Space
from tierkv_adapters.configs import config_digest
from tierkv_adapters.vllm.facts import identity_of
from tierkv_adapters.vllm.scheduling.asking import media_mark
from tierkv_adapters.vllm.tier.keys import ROW_TOKENS, row_layout

if TYPE_CHECKING:
    from tierkv_adapters.vllm.tier.settings import TierSettings

__all__ = ["Replica", "replica_of", "tier_space"]

_PARTS = ("model_config", "parallel_config", "cache_config", "load_config")
_SPEC = (
    *("block_size_factor", "blocks_per_chunk", "gpu_block_size", "hash_block_size"),
    *("kv_bytes_per_block", "kv_bytes_per_chunk", "replicated_layout"),
    *("tokens_per_block", "tokens_per_hash"),
)
_NOT_FACTS = frozenset({"engine_id", "extra_config", "enable_kv_cache_events"})
_PARALLEL_NOT_FACTS = frozenset(
    {"data_parallel_index", "data_parallel_size", "data_parallel_rank_local", "rank"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    """Which of several equal engines (data parallel) this is."""

    number: int = 0
    replicas: int = 1


def replica_of(spec: Any) -> Replica:
    """Number of this engine among its replicas, for roots that have one owner."""
    config = getattr(spec, "config", None)
    parallel = getattr(config, "parallel", None)
    if parallel is None:
        parallel = getattr(getattr(spec, "vllm_config", None), "parallel_config", None)
    number = int(getattr(parallel, "data_parallel_index", 0) or 0)
    return Replica(number, max(int(getattr(parallel, "data_parallel_size", 1) or 1), number + 1))


def tier_space(spec: Any, row_bytes: int, settings: TierSettings) -> Space:
    """The space of the chunks that an offloading spec makes.

    vLLM 0.25 hands its whole configuration to the spec; later versions an excerpt, in which the
    revision and format of the weights, overrides of the model's configuration, quantisation and
    the attention kernel are missing. KV of two models must not be taken for each other because
    of that: the whole configuration is then looked for among the callers, where the
    OffloadingConnector holds it while it makes its spec and the spec's tiers. Where it is not
    found, the user has to name the weights.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        row_bytes: Bytes of a row.
        settings: What the user said.

    Raises:
        AttachError: if the KV cannot be told from that of others; says what to do.
        LayoutError: if rows are no whole memory pages.
    """
    config = getattr(spec, "vllm_config", None) or _among_callers()
    facts = {"rows": config_digest(_spec_facts(spec)), **dict(settings.identity)}
    if config is not None:
        identity = identity_of(config, {"*": _kernels(config)}, weights=settings.weights)
        facts["hash"] = str(getattr(config.cache_config, "prefix_caching_hash_algo", ""))
        if getattr(config, "lora_config", None) and not settings.lora_paths_are_stable:
            facts["lora"] = str(uuid.uuid4())
        facts["media"] = media_mark(config).hex()
    elif settings.weights is None:
        raise AttachError(
            "this vLLM does not tell its tiers which weights, kernels and overrides it runs with, "
            "so that their KV could not be told from other KV. Name them: add "
            '"weights": "my-model@2026-01-31, default kernels" to the tier\'s settings, a text '
            "that changes whenever one of them does"
        )
    else:
        model = spec.config.model
        identity = Identity(f"vllm:{model.name}", f"given:{settings.weights}")
    extra = dict(identity.extra) | {f"tier.{name}": value for name, value in facts.items()}
    identity = dataclasses.replace(identity, extra=tuple(sorted(extra.items())))
    packing = f"vllm:offload:{getattr(getattr(spec, 'config', None), 'kv_cache_layout', '')}"
    return Space(identity, row_layout(row_bytes, packing), ROW_TOKENS)


def _among_callers() -> Any | None:
    """The ``vllm_config`` of the innermost caller that has one."""
    frame = inspect.currentframe()
    try:
        while frame is not None:
            found = frame.f_locals.get("vllm_config")
            if found is not None and all(hasattr(found, part) for part in _PARTS):
                return found
            frame = frame.f_back
        return None
    finally:
        del frame  # a frame that holds itself would keep everything alive


def _kernels(config: Any) -> str:
    """What orders the bytes of a page, as far as the scheduler's process can know.

    Kernels are chosen by the worker, by rules of vLLM's version from the model, the user's wish
    and the machine: these three are facts, together with that version.
    """
    wish = getattr(getattr(config, "attention_config", None), "backend", None)
    device = getattr(getattr(config, "device_config", None), "device_type", "")
    named = [str(wish), str(device), torch.backends.cpu.get_cpu_capability()]
    try:
        from vllm.platforms import current_platform

        named.append(str(current_platform.get_device_name()))
    except (ImportError, NotImplementedError, RuntimeError, AttributeError):
        named.append("")
    return "/".join(named)


def _spec_facts(spec: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {n: getattr(spec, n) for n in _SPEC if hasattr(spec, n)}
    config = getattr(spec, "config", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        seen = {n: v for n, v in _fields(config).items() if n not in _NOT_FACTS}
        parallel = seen.get("parallel", {})
        seen["parallel"] = {n: v for n, v in parallel.items() if n not in _PARALLEL_NOT_FACTS}
        facts["config"] = seen
    kv = getattr(spec, "kv_cache_config", None)
    if kv is not None:
        facts["groups"] = [
            (list(group.layer_names), repr(group.kv_cache_spec)) for group in kv.kv_cache_groups
        ]
    return facts


def _fields(thing: Any) -> dict[str, Any]:
    """Fields of a dataclass; nested ones too. Mappings are left alone: they need no deep copy."""
    return {each.name: _plain(getattr(thing, each.name)) for each in dataclasses.fields(thing)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
