"""Predictors by name, as configurations spell them."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Predictor

__all__ = ["make_predictors"]


def make_predictors(
    text: str,
    find: Callable[[str], type[Predictor]],
    future: Sequence[tuple[float, int]] | None = None,
) -> list[Predictor]:
    """Make the predictors that a setting names.

    Args:
        text: Names between commas, each with options if need be:
            ``"arrival,return_time:chance=0.5:hold=30"``. Empty: none.
        find: Class of a name; see :func:`tierkv.registry.resolve`.
        future: (time, session) of every request to come, for those who need it; None: unknown.

    Raises:
        ConfigError: if a name or an option is unknown or malformed, or one needs the future.
    """
    made = []
    for item in text.split(",") if text.strip() else ():
        name, *options = (piece.strip() for piece in item.split(":"))
        kind = find(name)
        values = dict(_option(name, option) for option in options)
        _check_options(name, kind, values)
        try:
            if kind.offline:
                made.append(kind(future, **values))  # type: ignore[call-arg]
            else:
                made.append(kind(**values))
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"predictor {name!r}: {error}", setting="prefetch") from error
    return made


def _check_options(name: str, kind: type[Predictor], values: dict[str, float | int]) -> None:
    """Refuse options that the predictor does not have, and parts of what is counted."""
    takes = inspect.signature(kind).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    numbers = {key: p.default for key, p in takes.items() if isinstance(p.default, int | float)}
    for key, value in values.items():
        if key not in takes and not anything:
            known = ", ".join(f"{key}={number}" for key, number in numbers.items())
            raise ConfigError(
                f"predictor {name!r} has no option {key!r}; it has {known or 'none'}",
                setting="prefetch",
            )
        if isinstance(numbers.get(key), int) and not (isinstance(value, int) and value > 0):
            raise ConfigError(
                f"predictor {name!r}: {key} is a whole number above 0, not {value}",
                setting="prefetch",
            )


def _option(name: str, text: str) -> tuple[str, float | int]:
    key, equals, value = text.partition("=")
    try:
        if not equals or not key.isidentifier():
            raise ValueError
        number = float(value)
        if not 0 <= number < math.inf:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"predictor {name!r}: options are written ':key=number', of 0 or more, not {text!r}",
            setting="prefetch",
        ) from None
    return key, int(number) if number.is_integer() and "." not in value else number
