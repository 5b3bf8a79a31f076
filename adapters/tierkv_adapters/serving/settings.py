"""Settings of an adapter for a serving engine, read from what the engine passes through."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from tierkv.config.fields import did_you_mean
from tierkv.errors import ConfigError
from tierkv.units import parse_duration

__all__ = ["PageForm", "RankSettings", "ServingSettings"]

_ONLY_FOR = {"ready_fraction": "trtllm", "lost_after": "trtllm"}

PageForm = Literal["auto", "opaque", "described"]
"""How pages are stored: as bytes, or as tensors with axes, which lossy codecs need."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The adapter's own settings; make them with :meth:`parse`.

    Attributes:
        config: The engine of each rank: a TOML file, or a mapping of
            :class:`~tierkv.config.EngineConfig`'s fields; None takes what the environment says.
        socket_dir: Folder for the ranks' sockets; None makes a private one.
        block_tokens: Tokens of a block; rounded up to whole pages.
        load_deadline: Seconds after which a load is not waited for and the rest is computed;
            None: as long as the tiers answer.
        save_decoded: Whether the KV of decoded tokens is stored too, or only that of prompts.
        min_load_tokens: Fewest tokens that are worth a load.
        retry_after: Seconds for which a block whose load failed is not offered.
        layout: How pages are stored.
        ready_fraction: Share of each rank's first memory tier that may be held ready for
            TensorRT-LLM, from 0 to 1.
        lost_after: Seconds for which TensorRT-LLM's requests wait for KV that was held for them and
            is damaged, with no other copy in any tier; then the engine ends with an error, as a
            load cannot be taken back there. ``"never"``: they wait until they are cancelled.
    """

    config: str | Mapping[str, Any] | None = None
    socket_dir: str | None = None
    block_tokens: int = 64
    load_deadline: float | None = 10.0
    save_decoded: bool = True
    min_load_tokens: int = 0
    retry_after: float = 30.0
    layout: PageForm = "auto"
    ready_fraction: float = 0.5
    lost_after: float | None = 30.0

    @classmethod
    def parse(
        cls, values: Mapping[str, object] | None, *, engine: str | None = None
    ) -> ServingSettings:
        """Check settings and give them their types. Durations are numbers or text (``"10s"``).

        Args:
            values: The settings; None: all are as they are by default.
            engine: Adapter that reads them, e.g. ``"vllm"``; to it, settings that only another
                one reads are unknown. None knows all.

        Raises:
            ConfigError: naming the first one that is unknown or malformed.
        """
        if values is None:
            return cls()
        if not isinstance(values, Mapping):
            raise ConfigError(f"the settings of tierkv are a mapping, not {values!r:.80}")
        known = [
            field.name
            for field in fields(cls)
            if engine is None or _ONLY_FOR.get(field.name, engine) == engine
        ]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r} of tierkv; {did_you_mean(str(name), known)}",
                    setting=str(name),
                )
        return cls(**{name: _PARSERS[name](name, value) for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How patient a rank is.

    Attributes:
        fence_patience: Seconds for which a step waits for stores that read pages which it is about
            to overwrite; then they are given up, and it waits for their copies alone.
        load_grace: Seconds behind its deadline after which a load is cancelled.
        sessions: Sessions that requests named, and the application did not create, that are kept.
        complain_every: Seconds between two lines of the log of one kind.
    """

    fence_patience: float = 2.0
    load_grace: float = 1.0
    sessions: int = 1024
    complain_every: float = 30.0


def _refuse(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"setting {name!r} of tierkv is {wanted}, not {value!r:.80}", setting=name)


def _config(name: str, value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is not None and not isinstance(value, str | Mapping):
        raise _refuse(name, value, "the path of a TOML file, or a mapping")
    return value


def _text(name: str, value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is not None and (not isinstance(value, str) or not value):
        raise _refuse(name, value, "a path")
    return value


def _count(name: str, value: object, least: int) -> object:
    if type(value) is not int or value < least:
        raise _refuse(name, value, f"a whole number of at least {least}")
    return value


def _flag(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refuse(name, value, "a duration such as '10s'")
    try:
        return parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"setting {name!r} of tierkv: {error}", setting=name) from None


def _deadline(name: str, value: object) -> object:
    if value is None:
        return None
    seconds = _seconds(name, value)
    if seconds <= 0:
        raise _refuse(name, value, "positive, or nothing for no deadline")
    return seconds


def _patience(name: str, value: object) -> object:
    return None if value == "never" else _seconds(name, value)


def _form(name: str, value: object) -> object:
    if value not in get_args(PageForm):
        raise _refuse(name, value, f"one of {', '.join(get_args(PageForm))}")
    return value


def _share(name: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _refuse(name, value, "a number from 0 to 1")
    return float(value)


_PARSERS: dict[str, Any] = {
    "config": _config,
    "socket_dir": _text,
    "block_tokens": lambda name, value: _count(name, value, 1),
    "load_deadline": _deadline,
    "save_decoded": _flag,
    "min_load_tokens": lambda name, value: _count(name, value, 0),
    "retry_after": _seconds,
    "layout": _form,
    "ready_fraction": _share,
    "lost_after": _patience,
}
