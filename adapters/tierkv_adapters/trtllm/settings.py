"""Where the adapter's settings come from, and which of the runtime's it cannot serve.

The runtime forbids further keys in ``kv_connector_config``, and hands only variables that begin
with ``TRTLLM`` or ``TLLM`` on to the processes of its ranks. So everything is read from the file
that ``TLLM_TIERKV_CONFIG`` names: the engine's settings as in any ``tierkv.toml``, the adapter's in
a table ``[serving]``, and, where the weights cannot be read, who computes in ``[identity]``.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tierkv.config import load_config
from tierkv.errors import ConfigError
from tierkv_adapters.serving.settings import ServingSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierkv.config import EngineConfig

__all__ = ["VARIABLE", "AdapterConfig", "check_llm_args", "read_config"]

VARIABLE: Final = "TLLM_TIERKV_CONFIG"
"""Names the configuration file; the runtime hands it on to every rank."""

_IDENTITY: Final = ("model", "weights")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the file says.

    Attributes:
        engine: The engine's settings, as any rank takes them.
        serving: The adapter's own.
        model: Name of the model, in place of the runtime's; None: the runtime's.
        weights: What tells the weights apart, in place of a digest of their files; None: digest.
    """

    engine: EngineConfig
    serving: ServingSettings
    model: str | None = None
    weights: str | None = None


def read_config(environ: Mapping[str, str] = os.environ) -> AdapterConfig:
    """Read the file that the environment names; without one, ``TIERKV_*`` alone.

    Raises:
        ConfigError: if the file cannot be read, or a key is unknown or malformed.
    """
    path = environ.get(VARIABLE)
    values: dict[str, Any] = {} if not path else _toml(path)
    try:
        serving = ServingSettings.parse(_table(values, "serving"))
        _check_serving(serving)
        identity = _table(values, "identity")
        for name, value in identity.items():
            if name not in _IDENTITY or not isinstance(value, str) or not value:
                raise ConfigError(
                    f"identity.{name} = {value!r}: the table [identity] holds "
                    f"{' and '.join(_IDENTITY)}, each a text"
                )
        engine = load_config(values if path else None).config
    except ConfigError as error:
        where = f"{path} (from {VARIABLE})" if path else f"{VARIABLE} is not set"
        raise ConfigError(f"{where}: {error}", setting=error.setting) from None
    return AdapterConfig(engine, serving, identity.get("model"), identity.get("weights"))


def _toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{VARIABLE}: cannot read {path}: {error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{VARIABLE}: {path} is not valid TOML: {error}") from error


def _check_serving(serving: ServingSettings) -> None:
    if serving.config is not None:
        raise ConfigError(
            "serving.config: the engine's settings stand in this file itself, outside of [serving]"
        )
    if serving.layout == "described":
        raise ConfigError(
            "serving.layout = 'described': TensorRT-LLM does not tell how its kernels order the "
            "bytes of a page; pages are 'opaque', and codecs must be lossless"
        )


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    table = values.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table, not {table!r:.80}")
    return table


def _value(args: Any, name: str, default: Any = None) -> Any:
    for part in name.split("."):
        args = getattr(args, part, None)
        if args is None:
            return default
    return args


_REFUSED: Final = (
    ("pipeline_parallel_size", lambda v: v > 1, "1", "a stage knows only some of the layers"),
    ("context_parallel_size", lambda v: v > 1, "1", "a rank holds only some of the tokens"),
    ("enable_attention_dp", bool, "false", "each rank would have a scheduler of its own"),
    ("max_beam_width", lambda v: v > 1, "1", "beams write into blocks that they share"),
    (
        "kv_cache_config.host_cache_size",
        lambda v: v > 0,
        "0, or leave it out",
        "the runtime would move blocks under the adapter; a host tier of tierkv takes its place",
    ),
    ("kv_cache_config.sink_token_length", lambda v: v > 0, "0", "the KV then depends on evictions"),
    (
        "kv_cache_config.cross_kv_cache_fraction",
        bool,
        "nothing",
        "an encoder's KV has no prefix that could be shared",
    ),
    ("sparse_attention_config", bool, "nothing", "its index caches are not handed to a connector"),
)


def check_llm_args(llm_args: Any) -> None:
    """Refuse settings of the runtime with which KV could be wrong, or never reused.

    Unknown settings pass: the runtime itself refuses what it cannot combine with a connector.

    Raises:
        ConfigError: naming each one, why, and what to set instead.
    """
    problems = []
    for name, is_set, instead, why in _REFUSED:
        value = _value(llm_args, name)
        try:
            refused = value is not None and is_set(value)
        except TypeError:
            refused = True
        if refused:
            problems.append(f"{name} = {value!r} ({why}): set {instead}")
    backend = _value(llm_args, "backend")
    if backend not in (None, "pytorch", "_autodeploy"):
        problems.append(f"backend = {backend!r} (it has no connectors): set 'pytorch'")
    if problems:
        raise ConfigError("tierkv cannot serve this TensorRT-LLM set-up: " + "; ".join(problems))
