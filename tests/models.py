"""Real models for tests: fetched once, skipped with the reason where that cannot be done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.errors import MissingDependencyError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_model", "model_directory"]


def model_directory(name: str) -> Path:
    """Directory of a real model; skips the test if its weights cannot be had, except in CI."""
    from tierkv_adapters.hf.models import ensure_model

    try:
        return ensure_model(name)
    except MissingDependencyError as error:
        if os.environ.get("TIERKV_CI"):
            raise
        pytest.skip(f"model {name}: {error}")


def load_model(name: str) -> tuple[Any, Any]:
    """A real model in float32 and its tokenizer."""
    from tierkv_adapters.hf.demo.loading import load_model as load

    return load(model_directory(name))
