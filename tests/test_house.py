"""The house rules that no other tool checks."""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
ROOTS = {"tierkv": ".", "tierkv_backends": "backends", "tierkv_codecs": "codecs"}
ROOTS |= {"tierkv_adapters": "adapters"}
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "adapters",
    "backends",
    "benchmarks",
    "codecs",
    "constraints.txt",
    "pyproject.toml",
    "tests",
    "tierkv",
}
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_METHODS = 400, 60, 300, 20


def _git(*args: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(
        ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.splitlines()


@cache
def _product() -> dict[str, Path]:
    """Every module of the distribution by its dotted name."""
    found = {}
    for package, folder in ROOTS.items():
        base = ROOT / folder
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _trees_are_forgotten() -> Iterator[None]:
    gc.disable()  # trees have no cycles, and walking through some hundred MB of them takes longest
    yield
    gc.enable()
    _tree.cache_clear()


def _all_python() -> list[Path]:
    extra = [p for folder in ("tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    return [*_product().values(), *sorted(extra)]


def test_the_top_level_is_fixed() -> None:
    names = {line.split("/")[0] for line in _git("ls-files")}

    assert names <= TOP_LEVEL
    # a folder with an __init__.py here would hide the standard library's `codecs`
    for folder in ("adapters", "backends", "codecs"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_files_functions_and_classes_stay_small() -> None:
    too_big = []
    for path in _all_python():
        where = path.relative_to(ROOT)
        if (lines := len(path.read_text().splitlines())) > MAX_FILE:
            too_big.append(f"{where}: {lines} lines")
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            is_class = isinstance(node, ast.ClassDef)
            if size > (MAX_CLASS if is_class else MAX_FUNCTION):
                too_big.append(f"{where}:{node.lineno} {node.name}: {size} lines")
            methods = [
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            # conformance suites have one method per named check, as many as there are checks
            suite = node.name.startswith("Test") or node.name.endswith("Tests")
            if is_class and len(methods) > MAX_METHODS and not suite:
                too_big.append(f"{where}:{node.lineno} {node.name}: {len(methods)} methods")

    assert too_big == []


@pytest.mark.parametrize("name", sorted(_product()))
def test_each_module_says_what_it_is_and_what_is_public(name: str) -> None:
    tree = _tree(_product()[name])
    assert ast.get_docstring(tree), f"{name} has no docstring"
    forbidden = {"utils", "util", "common", "helpers", "helper", "misc"}
    last = name.rpartition(".")[2]
    assert last not in forbidden
    assert not re.search(r"(_v\d+|_new|_old)$", last)

    if all(isinstance(node, ast.Expr) for node in tree.body):
        return  # a bare package
    assigned = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and "__all__" in ast.unparse(node).partition("=")[0]
    ]
    assert len(assigned) == 1, f"{name} has no __all__"
    assert assigned[0] is not None
    listed = ast.literal_eval(assigned[0])
    assert len(set(listed)) == len(listed)
    # mutants of a suite are reached through its list of them
    bare = _is_package(name) or name.endswith("_mutants")
    missing = set() if bare else _defined(tree) - set(listed)
    assert not missing, f"{name}: public but not in __all__: {sorted(missing)}"


def _is_package(name: str) -> bool:
    return _product()[name].name == "__init__.py"


def _defined(tree: ast.Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")}


def test_every_listed_name_is_there() -> None:
    for name in _product():
        if name.startswith("tierkv_adapters") or name.endswith("__main__"):
            continue  # needs an extra; its own tests import it
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"


def test_nothing_runs_stored_bytes_as_code() -> None:
    """Invariant S1: no pickle, eval, exec or torch.load in the product."""
    found = []
    # they stand in for engines, which pickle what they tell their own workers
    engines = ("tierkv.testing.serving.replay", "tierkv.testing.trtllm.engine")
    for name, path in _product().items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom) and name not in engines:
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                found += [name for n in names if n.split(".")[0] in ("pickle", "marshal", "shelve")]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "hash" and name.startswith("tierkv.testing"):
                    continue  # suites check that values are hashable; no key is made there
                if called in ("eval", "exec", "hash", "torch.load", "__import__"):
                    found.append(f"{name}:{node.lineno} {called}")

    assert found == []


def _imports(name: str) -> set[str]:
    """Modules of the distribution that ``name`` imports when it runs, inside functions too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:  # `from package import module` needs the module alone
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in _product() else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(_tree(_product()[name]))
    return {n for n in found if n in _product() and n != name}


def test_no_import_cycle_even_inside_functions() -> None:
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(_imports(name)):
                walk(target, (*path, name))
            done.add(name)

    for name in sorted(_product()):
        walk(name, ())


def test_the_floors() -> None:
    """The contracts of pyproject.toml, through import-linter."""
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout


HEAVY = (
    *("torch", "numpy", "anyio", "prometheus_client", "pydantic", "transformers"),
    *("tierkv_backends", "tierkv_codecs", "tierkv_adapters"),
)


@pytest.mark.parametrize(
    "code",
    [
        "import tierkv",
        "import tierkv; tierkv.Tier('host', '1GiB'); tierkv.Space; tierkv.Layout; tierkv.errors",
        "import tierkv; tierkv.load_config({'tiers': [{'kind': 'host', 'capacity': '1MiB'}]})",
    ],
)
def test_importing_loads_neither_torch_nor_a_plug_in(code: str) -> None:
    check = (
        f"{code}; import sys; sys.exit(', '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["tierkv.engine", "tierkv.views", "tierkv.decisions.core"])
def test_the_core_loads_torch_only_when_it_touches_tensors(module: str) -> None:
    check = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], check=False, timeout=60)

    assert done.returncode == 0


def test_public_names_of_the_package() -> None:
    import tierkv

    assert tierkv.__all__ == sorted(tierkv.__all__)
    assert dir(tierkv) == tierkv.__all__
    for name in tierkv.__all__:
        assert getattr(tierkv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Egnine'"):
        tierkv.Egnine  # noqa: B018
    lazy = {*tierkv._HOMES, *tierkv._MODULES, "__version__"}
    assert lazy == set(tierkv.__all__)


def test_one_version_everywhere() -> None:
    import tomllib

    import tierkv

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tierkv.__version__
    assert f"## {tierkv.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_adapters_are_tested_too() -> None:
    pytest.importorskip(
        "transformers",
        reason="the hf extra is not installed: tests/adapters was not collected",
    )
    assert (ROOT / "tests" / "adapters").is_dir()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_the_loop_is_the_one_that_was_asked_for(
    anyio_backend: tuple[str, dict[str, bool]],
) -> None:
    loop = asyncio.get_running_loop()

    assert loop.get_debug() == anyio_backend[1]["debug"]
    assert (type(loop).__module__ == "uvloop") == anyio_backend[1]["use_uvloop"]


@pytest.mark.anyio
async def test_what_is_not_about_loops_is_a_stress_test_on_the_others(
    anyio_backend: tuple[str, dict[str, bool]], request: pytest.FixtureRequest
) -> None:
    other = any(anyio_backend[1].values())
    assert other == (request.node.get_closest_marker("stress") is not None)


def test_f084_no_dependency_is_pinned_in_the_metadata() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(r for rows in optional.values() for r in rows)]:
        versions = requirement.partition(";")[0]  # a marker may compare
        assert "==" not in versions
        assert "<" not in versions
    # the pinned versions that the tests ran with live in constraints.txt alone
    assert "torch==" in (ROOT / "constraints.txt").read_text()
