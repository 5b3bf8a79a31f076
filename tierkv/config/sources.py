"""Which fields of a spec somebody set, and which were left at their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierkv.config.policies import Hybrid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["left_out"]


def left_out(built: Any, raw: Any, path: str) -> Iterator[str]:
    """Fields of the specs in a setting that were left at their defaults.

    Args:
        built: The setting: a spec, a sequence of them, or a plain value.
        raw: What it was made of. Of a table it is known which keys it has; of a spec that was made
            in code, only which of its fields differ from the defaults.
        path: Name of the setting.

    Yields:
        Paths such as ``"tiers[0].high"``.
    """
    if isinstance(built, Hybrid):
        rules = raw["rules"] if isinstance(raw, Mapping) else getattr(raw, "rules", raw)
        yield from left_out(built.rules, rules, f"{path}.rules")
    elif isinstance(built, tuple):
        items: Sequence[Any] = raw if isinstance(raw, list | tuple) else built
        for number, (spec, item) in enumerate(zip(built, items, strict=True)):
            yield from left_out(spec, item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(built):
        given: Collection[str] = raw if isinstance(raw, Mapping) else _changed(built)
        for field in dataclasses.fields(built):
            if field.name not in given:
                yield f"{path}.{field.name}"


def _changed(spec: Any) -> set[str]:
    """Fields that are not as in a spec of which only what has no default was given."""
    fields = dataclasses.fields(spec)
    missing = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    bare = type(spec)(**{name: getattr(spec, name) for name in needed})
    return needed | {f.name for f in fields if getattr(spec, f.name) != getattr(bare, f.name)}
