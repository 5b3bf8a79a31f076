"""Checks that all specs share: types of fields, and names that nobody knows."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NONE", "check_types", "did_you_mean", "set_field"]

NONE: Final = type(None)
"""Allows a field to be left out; see :func:`check_types`."""


def did_you_mean(wrong: str, known: Sequence[str]) -> str:
    """End of an error message: the closest known name, or all of them."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def check_types(spec: object, what: str, **kinds: type | tuple[type, ...]) -> None:
    """Check the types of a spec's fields.

    Args:
        spec: The spec.
        what: How messages call it.
        **kinds: Type, or types, of each field to check; ``bool`` is no number here.

    Raises:
        ConfigError: if a field has another type.
    """
    # bool is an int to Python, and "4" is a number to nobody: both are mistakes worth naming
    for name, kind in kinds.items():
        value = getattr(spec, name)
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join("nothing" if k is type(None) else k.__name__ for k in allowed)
            raise ConfigError(f"{what}: {name} must be {wanted}, not {value!r}", setting=name)


def set_field(spec: object, name: str, value: object) -> None:
    """Set a field while a frozen spec is being made."""
    object.__setattr__(spec, name, value)  # the specs are frozen for everyone else
