"""Strict reading of ``Tier.options``: an unknown setting is an error, never ignored."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError
from tierkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.config import Tier

__all__ = ["check_choice", "check_disk", "check_options", "read_size"]


def check_options(tier: Tier, known: Sequence[str]) -> None:
    """Refuse options that this kind of tier does not have.

    Raises:
        ConfigError: naming the option, the nearest known one, and all known ones.
    """
    for name in tier.options:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"tier {tier.name!r}: no option {name!r} for kind {tier.kind!r}{hint} (known: {listed})"
        )


def read_size(tier: Tier, name: str, default: int) -> int:
    """Return an option that is a size, in bytes.

    Raises:
        ConfigError: naming the tier and the option.
    """
    try:
        return parse_bytes(tier.options.get(name, default))
    except ConfigError as error:
        raise ConfigError(f"tier {tier.name!r}, option {name!r}: {error}") from error


def check_choice(tier: Tier, name: str, choices: Sequence[str]) -> str:
    """Return an option that is one of some words; the first one is the default.

    Raises:
        ConfigError: naming the choices.
    """
    value = tier.options.get(name, choices[0])
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"tier {tier.name!r}: {name} must be one of {tuple(choices)}, not {value!r}"
        )
    return value


def check_disk(tier: Tier, minimum: int) -> str:
    """Return the root directory of a tier on disk.

    Raises:
        ConfigError: if there is no path, or the capacity is below ``minimum`` bytes.
    """
    if tier.root is None:
        raise ConfigError(f"tier {tier.name!r}: a tier of kind {tier.kind!r} needs a path")
    capacity = tier.capacity_bytes
    if capacity < minimum:
        raise ConfigError(
            f"tier {tier.name!r}: capacity {format_bytes(capacity)} is too small for kind "
            f"{tier.kind!r}; use at least {format_bytes(minimum)}"
        )
    return tier.root
