"""What vLLM's KV depends on, from its configuration and the model's files.

vLLM's own block hashes name tokens, adapter and salt, and nothing of the model. The identity built
here adds everything else: the bytes of the weights (and of a draft model's), the model's
configuration with its RoPE, dtypes, quantisation, attention backends, vLLM's version and how the
model is split over ranks. No module of vLLM is imported: its objects are looked at.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.blocks import AdapterId, Identity
from tierkv.errors import AttachError
from tierkv.layout import Space
from tierkv_adapters.configs import config_digest
from tierkv_adapters.serving.weights import files_digest, weights_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tierkv.layout import Layout

__all__ = [
    "RankFacts",
    "adapter_id",
    "attention_backends",
    "check_order",
    "check_supported",
    "identity_of",
    "rank_of",
    "space_of",
]

_CLOCKS = 2.0  # seconds by which the times of files and the system's clock may differ
# formats whose weights are the files of the model; others come from somewhere else
_FROM_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
# facts about files, defaults of generation and labels: they change no number of the KV
_IGNORED = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "id2label",
        "label2id",
        "name_or_path",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)


# what is made of an image or a video before the model sees it; the names of media tell none of it
_OF_MEDIA = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
# which layers are quantised, and how, while they are loaded; which code runs the model
_OF_MODEL = ("model_class_overrides", "quantization_config")


class RankFacts(NamedTuple):
    """Which worker this is.

    Attributes:
        rank: Number of its shard.
        world: Shards of the model.
        number: Its number among all workers, those of other replicas (data parallel) included.
        workers: How many workers there are in all.
    """

    rank: int
    world: int
    number: int
    workers: int


def rank_of(vllm_config: Any) -> RankFacts:
    """Tell which worker a configuration belongs to."""
    parallel = vllm_config.parallel_config
    world = int(parallel.world_size)
    replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
    replica = int(getattr(parallel, "data_parallel_index", 0) or 0)
    rank = int(parallel.rank) % world
    return RankFacts(rank, world, replica * world + rank, world * replicas)


def check_supported(vllm_config: Any) -> None:
    """Refuse ways of running vLLM in which a page does not hold consecutive, final tokens.

    Raises:
        AttachError: naming the option to change.
    """
    if getattr(getattr(vllm_config, "model_config", None), "is_diffusion", False):
        raise AttachError(
            "this is a diffusion model: it writes the KV of a canvas of tokens over and over, and "
            "nobody tells when it is final; take TierKVConnector out for this model"
        )
    parallel = vllm_config.parallel_config
    for name, option in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if (getattr(parallel, name, 1) or 1) > 1:
            raise AttachError(
                f"{option} {getattr(parallel, name)}: the tokens of a page are spread over ranks, "
                f"which TierKVConnector does not support; set {option} 1, or take the connector out"
            )


def check_order(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse a model runner that writes to pages before it tells whose they are.

    Model Runner V2 fills new pages with zeros, and copies shared ones, before it hands over the
    step's orders: a save that still reads such a page for its last owner would store zeros.

    Raises:
        AttachError: says how to choose the other one, which asks first.
    """
    if getattr(vllm_config, "use_v2_model_runner", False) is not True:
        return
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False) is True
    copies = getattr(vllm_config.cache_config, "prefix_match_unit", None) is not None
    if zeroes or copies:
        what = "fills new pages with zeros" if zeroes else "copies pages (--prefix-match-unit)"
        raise AttachError(
            f"Model Runner V2 {what} before TierKVConnector can end what it still reads there: set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or take the connector out for this model"
        )


def attention_backends(vllm_config: Any, layers: Iterable[str]) -> dict[str, str]:
    """Name the attention backend of each layer, with the instruction set that orders its pages.

    Args:
        vllm_config: Configuration of a worker whose model is loaded.
        layers: Names of layers with a KV cache.
    """
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        module = modules.get(name)
        backend = getattr(module, "attn_backend", None)
        text = str(backend.get_name()) if backend is not None else type(module).__qualname__
        isa = getattr(module, "isa", None)
        found[name] = f"{text}/{isa}" if isa else text
    return found


def identity_of(
    vllm_config: Any, backends: Mapping[str, str], *, weights: str | None = None
) -> Identity:
    """Everything that the KV of one rank depends on, but layout, tokens and adapters.

    Seconds per gigabyte of weights when they are first seen, else milliseconds.

    Args:
        vllm_config: Configuration of the worker.
        backends: Attention backend by layer; see :func:`attention_backends`.
        weights: Revision of the weights as named by the user; None reads the files.

    Raises:
        AttachError: if the weights cannot be told from others; says how to name them.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    rank = rank_of(vllm_config)
    facts: dict[str, object] = {
        "engine": "vllm",
        "version": _version(),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "config": config_digest(model.hf_config.to_dict(), _IGNORED),
        "max_model_len": _context(model),
        "backends": ",".join(sorted(set(backends.values()))),
        "topology": _topology(parallel),
        "media": _set(getattr(model, "multimodal_config", None), _OF_MEDIA),
        "model": _set(model, _OF_MODEL),
        "lora": _lora(vllm_config),
        "platform": config_digest(getattr(vllm_config, "additional_config", None) or {}),
        "draft": _draft(vllm_config, weights),
    }
    if getattr(cache, "calculate_kv_scales", False):
        # the scales of quantised KV are made from the first batch of each start
        facts["scales"] = str(uuid.uuid4())
    architectures = getattr(model.hf_config, "architectures", None) or ["unknown"]
    return Identity(
        model="vllm:" + "+".join(map(str, architectures)),
        weights=_weights(vllm_config, model, weights),
        shard=(rank.rank, rank.world),
        extra=tuple(sorted((name, str(value)) for name, value in facts.items())),
    )


def space_of(
    identity: Identity, layout: Layout, block_tokens: int, adapter: AdapterId | None = None
) -> Space:
    """The space of one rank, with or without an active LoRA adapter."""
    if adapter is not None:
        identity = dataclasses.replace(identity, adapters=(adapter,))
    return Space(identity, layout, block_tokens)


def adapter_id(request: Any, *, since: float | None = None, mark: str = "") -> AdapterId:
    """Name a LoRA adapter by the content of its files. Reads them; not for the scheduler's thread.

    Args:
        request: vLLM's ``LoRARequest``.
        since: Since when the engine may have read the files, in seconds of the system's clock.
            Of files that were touched later it may hold older bytes than are there now.
        mark: Set this engine's KV of such an adapter apart from everybody's.

    Raises:
        AttachError: if the files cannot be read.
    """
    path = _local(str(request.lora_path), None, None)
    inside = sorted(path.rglob("*")) if path.is_dir() else []
    files = [file for file in inside if file.is_file()] or [path]
    version = files_digest(path, files)
    if getattr(request, "is_3d_lora_weight", False):
        version += "3d"
    if since is not None and _touched(path, [path, *inside]) > since - _CLOCKS:
        version += f":{mark}"
    return AdapterId(str(request.lora_name), version)


def _touched(path: Path, inside: Iterable[Path]) -> float:
    """When files, or links on the way to them, were changed last."""
    links = [one for one in (path, *path.absolute().parents) if one.is_symlink()]
    times = [one.lstat().st_ctime for one in links]
    return max([*times, *(one.stat().st_ctime for one in inside)])


# ---------------------------------------------------------------------- weights


def _weights(vllm_config: Any, model: Any, given: str | None) -> str:
    load = vllm_config.load_config
    form = str(load.load_format)
    if form == "dummy":  # random numbers of each start
        return f"dummy:{uuid.uuid4()}"
    if given is not None:
        return f"given:{given}"
    name = str(getattr(model, "model_weights", "") or model.model)
    if form not in _FROM_FILES:
        raise AttachError(_unknown(name, f"load format {form!r} does not read them from files"))
    path = _local(name, getattr(model, "revision", None), getattr(load, "download_dir", None))
    return f"{form}:" + weights_digest(path, code=bool(getattr(model, "trust_remote_code", False)))


def _local(name: str, revision: str | None, cache: str | None) -> Path:
    """Where the files of a model are: it is a path, or was fetched from the hub."""
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise AttachError(_unknown(name, "it is no path")) from None
    for file in ("config.json", "adapter_config.json", "params.json"):
        try:
            found = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
        except ValueError:  # not even an id of the hub
            break
        if isinstance(found, str):
            return Path(found).parent
    raise AttachError(_unknown(name, "it is neither a path nor in the cache of the hub"))


def _unknown(name: str, why: str) -> str:
    return (
        f"the weights of {name!r} cannot be told from others: {why}. Name their revision yourself: "
        'kv_connector_extra_config={"weights": "my-model@2026-01-31"}, a text that changes '
        "whenever they do"
    )


def _draft(vllm_config: Any, given: str | None) -> str:
    """Digest of what a draft model adds to the KV; empty without one.

    The user's name for the weights stands for it too, where its own files cannot be found.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None:
        return ""
    config = config_digest(draft.hf_config.to_dict(), _IGNORED)
    try:
        weights = _weights(vllm_config, draft, None)
    except AttachError:
        if given is None:
            raise
        weights = f"given:{given}:{draft.model}"
    return f"{speculative.method}:{config}:{weights}"


def _set(config: Any, names: Iterable[str]) -> str:
    """Digest of those settings that are set at all; nothing if none is."""
    found = {name: value for name in names if (value := getattr(config, name, None))}
    return config_digest(found) if found else ""


def _lora(vllm_config: Any) -> str:
    """How adapters are applied, where it is not to all that their files hold."""
    lora = getattr(vllm_config, "lora_config", None)
    dtype = str(getattr(lora, "lora_dtype", None) or "auto")
    found = {
        "dtype": "" if dtype in ("auto", str(vllm_config.model_config.dtype)) else dtype,
        "modules": sorted(getattr(lora, "target_modules", None) or ()),
        "tower": bool(getattr(lora, "enable_tower_connector_lora", False)),
    }
    return config_digest(found) if any(found.values()) else ""


# ---------------------------------------------------------------------- numbers


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def _context(model: Any) -> int | str:
    """Longest context, where it changes the position embeddings; else nothing."""
    text = getattr(model, "hf_text_config", model.hf_config)
    scaling = getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None) or {}
    kinds = str(scaling)
    plain = not any(kind in kinds for kind in ("longrope", "dynamic", "yarn", "su"))
    return "" if plain else int(model.max_model_len)


def _topology(parallel: Any) -> str:
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    )
    return ",".join(f"{name.split('_')[0]}={getattr(parallel, name, 1)}" for name in names)
