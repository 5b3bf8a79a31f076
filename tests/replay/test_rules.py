"""The replay holds no rule of its own: what it does not decide, it cannot decide differently."""

from __future__ import annotations

import ast
from pathlib import Path

import tierkv.replay
import tierkv.traces

PACKAGE = Path(tierkv.replay.__file__).parent
MAY_USE = {
    "tierkv.abc": {"Arrival", "Departure"},  # events, which it reports
    "tierkv.blocks": None,
    "tierkv.decisions.coding_rules": {"Rule"},  # read back from a log's header
    "tierkv.decisions.core": {"Decisions"},
    "tierkv.decisions.log": {"replay", "runs"},
    "tierkv.decisions.predict": {"make_predictors"},
    "tierkv.decisions.prefetching": {"Plan", "Prefetching"},
    "tierkv.decisions.types": None,
    "tierkv.errors": None,
    "tierkv.layout": {"GroupKind"},
    "tierkv.registry": {"factory", "resolve"},
    "tierkv.traces": None,
    "tierkv.units": None,
}
"""What it may import, and which names of it; None: any."""
DECIDING = {"victim", "rank", "hold", "release", "expedite", "admit", "touch", "insert", "evict"}
"""Methods of policies, admissions and what else decides; ``release`` is also that of leases."""


def _trees() -> dict[str, ast.Module]:
    return {path.name: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}


def test_it_imports_what_decides_and_nothing_to_decide_with() -> None:
    wrong = []
    for name, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wrong += [f"{name}: {a.name}" for a in node.names if a.name.startswith("tierkv")]
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if not node.module.startswith("tierkv") or node.module.startswith("tierkv.replay"):
                continue
            if node.module.startswith("tierkv.traces"):
                continue
            allowed = MAY_USE.get(node.module, set())
            names = {alias.name for alias in node.names}
            if allowed is not None and not names <= allowed:
                wrong.append(f"{name}: {sorted(names - allowed)} of {node.module}")
    assert wrong == []


def test_it_derives_from_nothing_that_decides() -> None:
    bases = {
        ast.unparse(base)
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    assert bases <= set()


def test_it_never_looks_inside_the_decisions_nor_asks_a_policy() -> None:
    wrong = []
    for name, tree in _trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value)
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private and owner not in ("self", "cls"):
                wrong.append(f"{name}:{node.lineno} {owner}.{node.attr}")
            decides = owner.rpartition(".")[2] in ("decisions", "_decisions")
            if node.attr in DECIDING and not (decides and node.attr == "release"):
                wrong.append(f"{name}:{node.lineno} {owner}.{node.attr}")
    assert wrong == []


def test_what_sorts_or_compares_is_the_bound_alone() -> None:
    """Choosing among blocks takes an order of them; only the bound, which decides nothing, has it.

    Reports sort seconds, and nothing else is sorted.
    """
    found = {
        f"{name}: {node.id}"
        for name, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and node.id in ("heappop", "heappush", "heapq", "sorted", "nsmallest", "OrderedDict")
    }
    assert found == {"bound.py: heappop", "bound.py: heappush", "report.py: sorted"}


def test_traces_hold_no_rule_either() -> None:
    for path in Path(tierkv.traces.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("tierkv.decisions"), path
