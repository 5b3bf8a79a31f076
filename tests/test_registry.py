from __future__ import annotations

import sys
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, get_args

import pytest

from tierkv import abc, registry
from tierkv.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

POLICIES = (
    *("adaptive", "arc", "fifo", "gdsf", "gittins", "importance", "lfu", "lfu_decay"),
    *("lrfu", "lru", "lru2", "s3fifo", "size_aware"),
)
ADAPTERS = {"hf": "transformers", "trtllm": "tensorrt_llm", "vllm": "vllm"}
PREDICTORS = ["arrival", "chain", "oracle", "return_time", "sequential"]
BUILT_IN = [
    ("backends", "device", abc.ResidentBackend),
    ("backends", "file", abc.Backend),
    ("backends", "host", abc.Backend),
    ("backends", "nvme", abc.Backend),
    ("codecs", "ecq2", abc.TensorBytesCodec),
    ("codecs", "ecq3", abc.TensorBytesCodec),
    ("codecs", "ecq4", abc.TensorBytesCodec),
    ("codecs", "fp8", abc.TensorBytesCodec),
    ("codecs", "int2", abc.TensorBytesCodec),
    ("codecs", "int3", abc.TensorBytesCodec),
    ("codecs", "int4", abc.TensorBytesCodec),
    ("codecs", "int6", abc.TensorBytesCodec),
    ("codecs", "int8", abc.TensorBytesCodec),
    ("codecs", "lowrank", abc.TensorBytesCodec),
    ("codecs", "lz4", abc.BytesCodec),
    ("codecs", "planes", abc.BytesCodec),
    ("codecs", "rans", abc.BytesCodec),
    ("codecs", "raw", abc.TensorBytesCodec),
    ("codecs", "rot2", abc.TensorBytesCodec),
    ("codecs", "rot3", abc.TensorBytesCodec),
    ("codecs", "rot4", abc.TensorBytesCodec),
    ("codecs", "zstd", abc.BytesCodec),
    ("devices", "cpu", abc.Device),
    ("devices", "cuda", abc.Device),
    ("devices", "sim", abc.Device),
    ("admissions", "all", abc.Admission),
    ("admissions", "second_use", abc.Admission),
    ("admissions", "tinylfu", abc.Admission),
    ("admissions", "write_budget", abc.Admission),
    *(("policies", name, abc.Policy) for name in POLICIES),
    *(("predictors", name, abc.Predictor) for name in PREDICTORS),
]

MODULE = """
from tierkv.abc import Policy


class Newest(Policy):
    name = "newest"


NOT_A_PLUGIN = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Install a distribution of one module by hand, as a third party's wheel would."""
    modules: list[str] = []

    def place(name: str, source: str, entry_points: str) -> None:
        site = tmp_path / name
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(site))
        modules.append(name)
        registry.refresh()

    yield place
    monkeypatch.undo()
    for name in modules:
        sys.modules.pop(name, None)
    registry.refresh()


@pytest.mark.parametrize(("kind", "name", "base"), BUILT_IN)
def test_every_built_in_name_loads(kind: registry.Kind, name: str, base: type) -> None:
    found = registry.resolve(kind, name)

    assert issubclass(found, base)
    assert name in registry.names(kind)


def test_this_list_of_built_in_names_is_complete() -> None:
    listed = {(kind, name) for kind, name, _ in BUILT_IN}
    listed |= {("adapters", name) for name in ADAPTERS}

    assert listed == {
        (kind, name) for kind in get_args(registry.Kind) for name in registry.names(kind)
    }


@pytest.mark.parametrize(("name", "library"), ADAPTERS.items())
def test_what_an_adapter_is_for_is_looked_for_and_not_imported(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    assert registry.lacks("adapters", name) == library
    (tmp_path / library).mkdir()  # a folder of that name is no library
    invalidate_caches()
    assert registry.lacks("adapters", name) == library
    (tmp_path / library / "__init__.py").write_text("raise RuntimeError('no driver')")
    invalidate_caches()
    assert registry.lacks("adapters", name) is None
    assert library not in sys.modules
    monkeypatch.setitem(sys.modules, library, None)
    assert registry.lacks("adapters", name) == library
    assert registry.lacks("backends", name) is None


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_known_and_loads(name: str) -> None:
    assert registry.resolve("adapters", name).__name__ == f"tierkv_adapters.{name}"


def test_an_installed_package_adds_a_name(install: object) -> None:
    place = install
    assert callable(place)
    before = registry.names("policies")
    place("fakeplug", MODULE, "[tierkv.policies]\nnewest = fakeplug:Newest\n")

    found = registry.resolve("policies", "newest")

    assert found.__module__ == "fakeplug"
    assert registry.names("policies") == sorted([*before, "newest"])


def test_nothing_is_imported_before_it_is_asked_for(install: object) -> None:
    assert callable(install)
    install("fakeplug", "raise RuntimeError('no driver')", "[tierkv.policies]\nbad = fakeplug:X\n")

    assert "bad" in registry.names("policies")
    assert "fakeplug" not in sys.modules


def test_two_owners_of_one_name_are_an_error(install: object) -> None:
    assert callable(install)
    install("fakeplug", MODULE, "[tierkv.policies]\nlru = fakeplug:Newest\nx = fakeplug:Newest\n")
    install("rival", MODULE, "[tierkv.policies]\nx = rival:Newest\n")

    with pytest.raises(ConfigError, match=r"'lru' is registered 2 times.*fakeplug:Newest"):
        registry.resolve("policies", "lru")
    with pytest.raises(ConfigError, match="'x' is registered 2 times"):
        registry.resolve("policies", "x")


@pytest.mark.parametrize("kind_of_error", ["ImportError", "OSError", "RuntimeError"])
def test_f085_a_failing_import_is_an_error_with_a_hint(install: object, kind_of_error: str) -> None:
    assert callable(install)
    install(
        "fakeplug",
        f"raise {kind_of_error}('libfoo.so: cannot open shared object file')",
        "[tierkv.backends]\nfoo = fakeplug:Foo\n",
    )

    with pytest.raises(MissingDependencyError, match=r"'foo'.*libfoo\.so.*fakeplug"):
        registry.resolve("backends", "foo")


def test_f085_a_library_that_is_not_installed_is_named(install: object) -> None:
    assert callable(install)
    entry = "[tierkv.backends]\nfoo = fakeplug:Foo\n"
    install("fakeplug", "import no_such_library", entry)
    install(
        "oldplug", "import json.no_such_part", entry.replace("foo", "old").replace("fake", "old")
    )

    with pytest.raises(
        MissingDependencyError, match="'foo' needs no_such_library, which is not in"
    ):
        registry.resolve("backends", "foo")
    # the library is there, but too old or too new
    with pytest.raises(MissingDependencyError, match=r"cannot be imported.*json\."):
        registry.resolve("backends", "old")


def test_a_module_without_the_attribute_is_named(install: object) -> None:
    assert callable(install)
    install("fakeplug", MODULE, "[tierkv.policies]\nfoo = fakeplug:Missing\n")

    with pytest.raises(ConfigError, match="fakeplug has no attribute 'Missing'"):
        registry.resolve("policies", "foo")


@pytest.mark.parametrize(
    ("kind", "attribute"), [("policies", "NOT_A_PLUGIN"), ("backends", "Newest")]
)
def test_what_is_not_a_plugin_is_refused(
    install: object, kind: registry.Kind, attribute: str
) -> None:
    assert callable(install)
    install("fakeplug", MODULE, f"[tierkv.{kind}]\nfoo = fakeplug:{attribute}\n")

    with pytest.raises(ConfigError, match=r"is not a subclass of tierkv\.abc\."):
        registry.resolve(kind, "foo")


def test_a_typing_mistake_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'zstd'"):
        registry.resolve("codecs", "ztsd")


@pytest.mark.parametrize(("kind", "name"), [("backends", "redis"), ("backends", "s3")])
def test_f079_a_planned_name_is_refused_as_not_available(kind: registry.Kind, name: str) -> None:
    with pytest.raises(ConfigError, match="not available in this version"):
        registry.resolve(kind, name)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such kind"):
        registry.resolve("backend", "host")  # type: ignore[arg-type]
