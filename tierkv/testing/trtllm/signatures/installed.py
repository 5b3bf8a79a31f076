"""Compare an installed TensorRT-LLM with what was recorded, from its source, without importing."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tierkv.testing.trtllm.signatures import Side, Signatures

__all__ = ["Installed", "installed"]


class Installed(NamedTuple):
    """What was found.

    Attributes:
        path: The source that was read.
        differences: Where it is not as recorded; empty: nowhere.
        unknown: Hooks of its base classes that were not recorded: news to look at.
    """

    path: Path
    differences: list[str]
    unknown: list[str]


def installed(signatures: Signatures, package: str = "tensorrt_llm") -> Installed | None:
    """Compare the installed copy with one recorded generation.

    The copy is found through :func:`importlib.util.find_spec` of the top-level package, which
    imports nothing.

    Returns:
        None: no such package is installed, or it has none of that generation's modules.
    """
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        for module in signatures.modules:
            path = Path(folder).joinpath(*module.split(".")[1:]).with_suffix(".py")
            if path.is_file():
                return _compare(path, signatures)
    return None


def _compare(path: Path, signatures: Signatures) -> Installed:
    tree = ast.parse(path.read_text(), str(path))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    differences: list[str] = []
    unknown: list[str] = []
    for side in (signatures.scheduler, signatures.worker):
        node = classes.get(side.name)
        if node is None:
            differences.append(f"class {side.name} is not there")
        else:
            more, news = _compare_side(side, node)
            differences += more
            unknown += news
    for name, fields in signatures.dataclasses.items():
        node = classes.get(name)
        found = [] if node is None else _fields(node)
        if found != fields:
            differences.append(f"{name} has the fields {found}, recorded: {fields}")
    return Installed(path, differences, unknown)


def _compare_side(side: Side, node: ast.ClassDef) -> tuple[list[str], list[str]]:
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    public = {name: one for name, one in methods.items() if not name.startswith("_")}
    expected = dict(side.abstract) | dict(side.inherited)
    differences = [f"{side.name} has no {name}" for name in expected if name not in public]
    known = expected | dict(side.optional)
    for name, method in public.items():
        if name not in known:
            continue
        parameters = [one.arg for one in method.args.posonlyargs + method.args.args][1:]
        if parameters != known[name]:
            differences.append(f"{side.name}.{name} takes {parameters}, recorded: {known[name]}")
        if _is_abstract(method) != (name in side.abstract):
            state = "is" if _is_abstract(method) else "is not"
            differences.append(f"{side.name}.{name} {state} abstract")
    return differences, [f"{side.name}.{name}" for name in public if name not in known]


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith("abstractmethod") for one in method.decorator_list)


def _fields(node: ast.ClassDef) -> list[str]:
    targets = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
    return [target.id for target in targets if isinstance(target, ast.Name)]
