"""Strict reading of ``Tier.options``: an unknown setting is an error, never ignored."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.config import Tier

__all__ = ["check_options"]


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
