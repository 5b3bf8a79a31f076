"""Settings of the tier, from one entry of vLLM's ``secondary_tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from tierkv.config.fields import did_you_mean
from tierkv.errors import ConfigError
from tierkv.units import parse_duration
from tierkv_adapters.serving.settings import ServingSettings

__all__ = ["TierSettings"]

_SHARED: Final = ("config", "load_deadline", "retry_after")
_LOCALITIES: Final = ("LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a user may say of the tier; make it with :meth:`parse`.

    Attributes:
        config: The engine: a TOML file, or a mapping of :class:`~tierkv.config.EngineConfig`'s
            fields; None takes what the environment says.
        manager: Token of a manager that was lent in this process, used instead.
        load_deadline: Seconds after which a promotion is given up, and vLLM computes; None: as
            long as the tiers take.
        retry_after: Seconds for which a key whose load failed is a miss.
        ttl: Seconds that a chunk lives after its last use; None: until it is evicted.
        weights: Revision of the weights as named by the user; None reads the files.
        identity: Further facts that tell this KV from other KV, e.g. a patched kernel.
        lora_paths_are_stable: Whether the files of a LoRA adapter never change under one path.
            vLLM's keys hold an adapter's name and path alone: without this promise, what was
            stored while LoRA is enabled is not used by later processes.
        weights_are_fixed: Whether the weights in place never change while vLLM runs. Without this
            promise, what was stored before vLLM reset its caches (for a weight update, but also to
            sleep) is not used again by this process, and what is stored since by no other.
        locality: Where the storage is, as vLLM's filters ask: ``"LOCAL"``, ``"REMOTE"`` or None.
    """

    config: str | Mapping[str, Any] | None = None
    manager: str | None = None
    load_deadline: float | None = 10.0
    retry_after: float = 30.0
    ttl: float | None = None
    weights: str | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    lora_paths_are_stable: bool = False
    weights_are_fixed: bool = False
    locality: str | None = None

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> TierSettings:
        """Check settings and give them their types.

        Raises:
            ConfigError: naming the first one that is unknown or malformed.
        """
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r} of the tier; {did_you_mean(str(name), known)}",
                    setting=str(name),
                )
        shared = ServingSettings.parse({n: v for n, v in values.items() if n in _SHARED})
        given = {n: _OWN[n](n, v) for n, v in values.items() if n not in _SHARED}
        return cls(**{name: getattr(shared, name) for name in _SHARED}, **given)


def _refuse(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"setting {name!r} of the tier is {wanted}, not {value!r:.80}", setting=name)


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _refuse(name, value, "a text that is not empty")
    return value


def _ttl(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refuse(name, value, "a duration such as '6h'")
    seconds = parse_duration(value)
    if seconds <= 0:
        raise _refuse(name, value, "positive, or nothing for no end")
    return seconds


def _facts(name: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        raise _refuse(name, value, "a mapping of texts")
    return dict(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _locality(name: str, value: object) -> str | None:
    if value is not None and value not in _LOCALITIES:
        raise _refuse(name, value, f"one of {', '.join(_LOCALITIES)}")
    return None if value is None else str(value)


_OWN: dict[str, Any] = {
    "manager": _text,
    "ttl": _ttl,
    "weights": _text,
    "identity": _facts,
    "lora_paths_are_stable": _flag,
    "weights_are_fixed": _flag,
    "locality": _locality,
}
