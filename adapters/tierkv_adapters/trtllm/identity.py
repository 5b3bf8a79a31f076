"""Who computes the KV: the model's files, the runtime, and everything that changes the numbers."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tierkv.blocks import Identity
from tierkv.errors import AttachError, ConfigError
from tierkv_adapters.serving.weights import files_digest, weights_digest
from tierkv_adapters.trtllm.bases import engine_version
from tierkv_adapters.trtllm.settings import VARIABLE

if TYPE_CHECKING:
    from tierkv_adapters.trtllm.settings import AdapterConfig

__all__ = ["identity_of", "model_folder"]

# settings of the runtime that change the numbers, or their order, and not only when they are made
_FACTS: Final = (
    *("dtype", "attn_backend", "model_kwargs", "quant_config", "kv_cache_config.dtype"),
    *("kv_cache_config.tokens_per_block", "moe_expert_parallel_size", "enable_attention_dp"),
    *("checkpoint_format", "trust_remote_code", "max_seq_len", "load_format"),
    *("kv_cache_config.max_attention_window", "speculative_config"),
)
_CONFIGS: Final = ("config.json", "hf_quant_config.json", "quantize_config.json")


def identity_of(llm_args: Any, config: AdapterConfig, shard: tuple[int, int]) -> Identity:
    """Identity of what one rank computes, without a LoRA adapter.

    Reads the weights the first time that they are seen: seconds per gigabyte.

    Raises:
        ConfigError: if the weights cannot be told from others; says what to write.
    """
    model = str(_get(llm_args, "model") or "")
    if _is_dummy(llm_args):  # random numbers of each start, whatever they are called
        weights = f"dummy:{uuid.uuid4()}"
    else:
        weights = config.weights or _weights(llm_args, model)
    facts = [("engine", "tensorrt_llm"), ("version", engine_version())]
    facts += [(name, _text(_get(llm_args, name))) for name in _FACTS]
    facts += [("tensor_parallel_size", str(shard[1]))]
    name = config.model or Path(model).name or "model"
    return Identity(f"trtllm:{name}", weights, shard=shard, extra=tuple(facts))


def model_folder(llm_args: Any) -> Path | None:
    """Directory of the model's files: the model itself, or its place in the hub's local cache."""
    model = str(_get(llm_args, "model") or "")
    if model and Path(model).exists():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        found = snapshot_download(model, revision=_get(llm_args, "revision"), local_files_only=True)
    except Exception:  # noqa: BLE001 - not in the cache, or no name of a repository
        return None
    return Path(found)


def _weights(llm_args: Any, model: str) -> str:
    folder = model_folder(llm_args)
    why = f"there is no directory {model!r}, nor a copy of it in the hub's cache"
    if folder is not None:
        try:
            digest = weights_digest(folder, code=bool(_get(llm_args, "trust_remote_code")))
            present = [folder / name for name in _CONFIGS if (folder / name).is_file()]
            return f"{digest}+{files_digest(folder, present)}"
        except AttachError as error:
            why = str(error)
    raise ConfigError(
        f"the weights of {model!r} cannot be told from others ({why}): name them in the file of "
        f'{VARIABLE}: [identity] weights = "my-model@2026-01-31"'
    )


def _is_dummy(llm_args: Any) -> bool:
    form = _get(llm_args, "load_format")
    return "dummy" in str(getattr(form, "name", form)).lower()


def _get(args: Any, name: str) -> Any:
    for part in name.split("."):
        args = getattr(args, part, None)
        if args is None:
            return None
    return args


def _text(value: Any) -> str:
    """A value as text that is the same in every process."""
    if value is None or isinstance(value, str | int | float | bool):
        return str(value)
    dump = getattr(value, "model_dump", None)
    try:
        plain = dump(mode="json") if dump is not None else getattr(value, "__dict__", str(value))
    except (TypeError, ValueError):  # something in it that is no JSON: told by its text, below
        plain = dump() if dump is not None else str(value)
    text = json.dumps(plain, sort_keys=True, default=str)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # where an object lies differs by process
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
