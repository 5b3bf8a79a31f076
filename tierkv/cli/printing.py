"""The one form in which commands print JSON."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["SCHEMA_VERSION", "print_json"]

SCHEMA_VERSION: Final = 1


def print_json(result: dict[str, Any]) -> None:
    """Print a result, with the version of its form."""
    print(json.dumps({"schema_version": SCHEMA_VERSION} | result, indent=2))
