"""Tests with a real vLLM: in processes of their own; where there is none they are skipped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from benchmarks.vllm.processes import find_python, run, why_not
from tests.vllm.models import model_directory
from tierkv.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.vllm.processes import Ran


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter of the environment with vLLM; skips the test if there is none, except in CI."""
    python = find_python()
    reason = why_not(python)
    if reason is not None:
        if "TIERKV_VLLM_PYTHON" in os.environ:  # it was asked for by name
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def vllm_run(vllm_python: Path) -> Callable[..., Ran]:
    """:func:`benchmarks.vllm.processes.run`: Python code in a fresh process with vLLM."""

    def call(code: str, args: object = None, **options: object) -> Ran:
        options.setdefault("python", vllm_python)
        return run(code, args, **options)  # type: ignore[arg-type]

    return call


@pytest.fixture(scope="session")
def vllm_model(vllm_python: Path) -> Callable[[str], str]:
    """Directory of a model by name, see :data:`tests.vllm.models.NAMES`."""

    def find(name: str) -> str:
        try:
            return str(model_directory(name))
        except MissingDependencyError as error:
            if os.environ.get("TIERKV_CI"):
                raise
            pytest.skip(f"model {name}: {error}")

    return find
