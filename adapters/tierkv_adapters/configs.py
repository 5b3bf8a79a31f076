"""Digests of configurations: alike in every process, whatever order things are kept in."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["config_digest"]


def config_digest(value: Any, ignored: Collection[str] = ()) -> str:
    """SHA-256, in hexadecimal, of a configuration: nested mappings, sequences, sets and scalars.

    Args:
        value: The configuration; what is none of these counts by its ``str``.
        ignored: Keys that change no number of the KV, at whatever depth.
    """
    plain = json.dumps(_plain(value, ignored), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def _plain(value: Any, ignored: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v, ignored) for k, v in value.items() if str(k) not in ignored}
    if isinstance(value, list | tuple):
        return [_plain(v, ignored) for v in value]
    if isinstance(value, set | frozenset):  # their order differs from process to process
        return sorted(str(_plain(v, ignored)) for v in value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
