"""What the API calls, as recorded: against the driver, classes, and a copy that is installed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tierkv.testing.trtllm.outputs import (
    FirstOutput,
    FirstRequestData,
    SecondOutput,
    SecondRequestData,
)
from tierkv.testing.trtllm.reference import ReferenceScheduler, ReferenceWorker
from tierkv.testing.trtllm.signatures import Signatures, installed, mismatches, recorded

if TYPE_CHECKING:
    from pathlib import Path

APIS: tuple[Literal["first", "second"], ...] = ("first", "second")
CLASSES = {
    "first": {"RequestData": FirstRequestData, "SchedulerOutput": FirstOutput},
    "second": {"RequestData": SecondRequestData, "SchedulerOutput": SecondOutput},
}


@pytest.mark.parametrize("api", APIS)
def test_the_driver_has_the_recorded_data_classes(api: Literal["first", "second"]) -> None:
    found = {
        name: [field.name for field in dataclasses.fields(kind)]
        for name, kind in CLASSES[api].items()
    }
    assert found == recorded(api).dataclasses


@pytest.mark.parametrize("api", APIS)
def test_the_reference_connector_can_be_called(api: Literal["first", "second"]) -> None:
    known = recorded(api)
    assert mismatches(known.scheduler, ReferenceScheduler) == []
    assert mismatches(known.worker, ReferenceWorker) == []


def test_mismatches_are_named() -> None:
    class Wrong(ABC):
        def build_connector_meta(self) -> int:
            return 0

        @abstractmethod
        def get_num_new_matched_tokens(self, request: Any, num: int) -> None: ...

        request_finished = 3

        def cancel_load(self, request: Any) -> int:
            return 0

        def wait_for_initialization(self, *more: Any, **named: Any) -> int:
            return 0

    found = mismatches(recorded("second").scheduler, Wrong)

    assert [line.split(":")[0] for line in found] == [
        "Wrong.build_connector_meta(self) -> 'int' cannot be called as "
        "build_connector_meta(scheduler_output)",
        "Wrong.get_num_new_matched_tokens is abstract",
        "Wrong.request_finished is not callable",
        "Wrong has no update_state_after_alloc(request, block_ids)",
        "Wrong.cancel_load(self, request",
    ]


def _source(known: Signatures) -> str:
    lines = ["import cuda_that_is_not_here", "from abc import ABC, abstractmethod", ""]
    for name, fields in known.dataclasses.items():
        lines += ["@dataclass", f"class {name}:", *(f"    {one}: int = 0" for one in fields), ""]
    for side in (known.scheduler, known.worker):
        lines += [f"class {side.name}(ABC):", "    def __init__(self, llm_args): ..."]
        for name, parameters in (*side.abstract.items(), *side.inherited.items()):
            if name in side.abstract:
                lines.append("    @abstractmethod")
            lines.append(f"    def {name}({', '.join(['self', *parameters])}): ...")
        lines.append("")
    return "\n".join(lines)


def _install(root: Path, known: Signatures, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = known.modules[0].replace("tensorrt_llm", "fake_tensorrt_llm", 1).split(".")
    path = root.joinpath(*package).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (root / "fake_tensorrt_llm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(root))


@pytest.mark.parametrize("api", APIS)
def test_an_installed_copy_that_is_as_recorded(
    api: Literal["first", "second"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = recorded(api)
    _install(tmp_path, known, _source(known), monkeypatch)

    found = installed(known, "fake_tensorrt_llm")

    assert found is not None
    assert (found.differences, found.unknown) == ([], [])
    assert found.path.is_relative_to(tmp_path)
    assert "fake_tensorrt_llm" not in sys.modules, "found and read, never imported"
    other = recorded("second" if api == "first" else "first")
    assert installed(other, "fake_tensorrt_llm") is None


def test_an_installed_copy_that_has_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = recorded("second")
    source = (
        _source(known)
        .replace("    @abstractmethod\n    def request_finished(", "    def request_finished(")
        .replace("def start_load_kv(self, stream)", "def start_load_kv(self, stream, step)")
        .replace("    def wait_for_initialization(self): ...\n", "")
        .replace("    cache_salt: int = 0\n", "")
        .replace("def get_connector_meta(", "def get_news(self): ...\n    def get_connector_meta(")
    )
    ast.parse(source)
    _install(tmp_path, known, source, monkeypatch)

    found = installed(known, "fake_tensorrt_llm")

    assert found is not None
    scheduler, worker = known.scheduler.name, known.worker.name
    assert found.unknown == [f"{worker}.get_news"]
    assert [line for line in found.differences if "RequestData" not in line] == [
        f"{scheduler} has no wait_for_initialization",
        f"{scheduler}.request_finished is not abstract",
        f"{worker}.start_load_kv takes ['stream', 'step'], recorded: ['stream']",
    ]
    assert any("RequestData has the fields" in line for line in found.differences)


def test_nothing_is_installed() -> None:
    assert installed(recorded("first"), "no_such_package_of_this_name") is None


def test_the_copy_that_is_installed_here() -> None:
    if importlib.util.find_spec("tensorrt_llm") is None:
        pytest.skip("TensorRT-LLM is not installed")
    found = [one for one in map(installed, map(recorded, APIS)) if one is not None]
    assert found, "neither module is there: the API has moved"
    for one in found:
        assert one.differences == [], one.path
