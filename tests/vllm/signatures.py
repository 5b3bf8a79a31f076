"""What versions of vLLM ask of a connector, read from their source without importing it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BASE", "METRICS", "VERSIONS", "classes", "methods", "recorded"]

VERSIONS = ("0.28.0", "0.30.0", "0.32.0")
"""Versions whose signatures are recorded; the last is the one that the tests run with."""

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
METRICS = "distributed/kv_transfer/kv_connector/v1/metrics.py"
_RECORDED = Path(__file__).with_name("signatures.json")


def recorded() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By version and class: the arguments of each method, ``name=`` if it may be left out."""
    loaded: dict[str, dict[str, dict[str, list[str]]]] = json.loads(_RECORDED.read_text())
    return loaded


def classes(package: Path) -> dict[str, dict[str, list[str]]]:
    """The classes that a connector derives from, as vLLM in this directory has them."""
    base, metrics = package / BASE, package / METRICS
    return {
        "KVConnectorBase_V1": methods(base, "KVConnectorBase_V1"),
        "SupportsHMA": methods(base, "SupportsHMA"),
        "KVConnectorWorkerMetadata": methods(base, "KVConnectorWorkerMetadata"),
        "KVConnectorStats": methods(metrics, "KVConnectorStats"),
        "KVConnectorPromMetrics": methods(metrics, "KVConnectorPromMetrics"),
    }


def methods(file: Path, name: str) -> dict[str, list[str]]:
    """Arguments of the methods of a class; abstract methods begin with ``"abstract"``."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {f.name: _arguments(f) for f in node.body if isinstance(f, ast.FunctionDef)}
    return {}


def _arguments(function: ast.FunctionDef) -> list[str]:
    found, spec = list(_marks(function)), function.args
    names = [one.arg for one in spec.posonlyargs + spec.args]
    optional = len(names) - len(spec.defaults)
    found += [
        name if n < optional else f"{name}=" for n, name in enumerate(names) if n or _free(function)
    ]
    if spec.vararg is not None:
        found.append(f"*{spec.vararg.arg}")
    found += [f"{one.arg}=" for one in spec.kwonlyargs]
    if spec.kwarg is not None:
        found.append(f"**{spec.kwarg.arg}")
    return found


def _free(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "staticmethod" for one in function.decorator_list)


def _marks(function: ast.FunctionDef) -> Iterable[str]:
    if any("abstract" in ast.unparse(one) for one in function.decorator_list):
        yield "abstract"


if __name__ == "__main__":  # python -m tests.vllm.signatures VERSION=DIRECTORY ...
    import sys

    given = dict(one.split("=", 1) for one in sys.argv[1:])
    text = json.dumps({version: classes(Path(given[version])) for version in sorted(given)})
    _RECORDED.write_text(text.replace('}, "', '},\n"') + "\n")
