"""Digests of weight files: right after every change, read once while nothing changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tierkv.errors import AttachError
from tierkv_adapters.serving import weights
from tierkv_adapters.serving.weights import file_digest, weights_digest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The files that were read, in order."""
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    found: list[str] = []
    inner = weights._read

    def read(path: Path) -> str:
        found.append(path.name)
        return inner(path)

    monkeypatch.setattr(weights, "_read", read)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"one")
    (folder / "b.safetensors").write_bytes(b"two")
    (folder / "config.json").write_text("{}")
    return folder


def test_files_are_read_once(model: Path, reads: list[str]) -> None:
    first = weights_digest(model)
    assert weights_digest(model) == first
    assert reads == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("keep_times", [False, True])
def test_f007_other_weights_under_one_name(model: Path, reads: list[str], keep_times: bool) -> None:
    # also of the same length, and if whoever wrote them set the time of change back
    before = weights_digest(model)
    file = model / "a.safetensors"
    stat = file.stat()
    file.write_bytes(b"ONE")
    if keep_times:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_digest(model) != before
    file.write_bytes(b"one")
    assert weights_digest(model) == before


def test_names_and_borders_of_files_count(model: Path) -> None:
    before = weights_digest(model)
    (model / "a.safetensors").write_bytes(b"onet")
    (model / "b.safetensors").write_bytes(b"wo")
    moved = weights_digest(model)
    (model / "b.safetensors").rename(model / "c.safetensors")
    assert len({before, moved, weights_digest(model)}) == 3


def test_a_link_is_what_it_points_to(model: Path, tmp_path: Path) -> None:
    # the hub's cache keeps files under names of its own
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (other / name).symlink_to(model / name)
    assert weights_digest(other) == weights_digest(model)


def test_weights_of_every_format_count(model: Path) -> None:
    before = weights_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"other")
    assert weights_digest(model) != before


def test_code_beside_the_weights_counts_if_it_is_run(model: Path) -> None:
    (model / "modeling.py").write_text("a = 1")
    plain, run = weights_digest(model), weights_digest(model, code=True)
    (model / "modeling.py").write_text("a = 2")
    assert weights_digest(model) == plain
    assert weights_digest(model, code=True) != run


def test_a_damaged_cache_is_no_answer(model: Path, tmp_path: Path, reads: list[str]) -> None:
    before = weights_digest(model)
    for entry in (tmp_path / "cache" / "weights").glob("*.json"):
        entry.write_text('{"stamp": [], "digest": "0"}')
    assert weights_digest(model) == before
    assert len(reads) == 4


def test_without_a_place_for_the_cache_files_are_read_again(
    model: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights_digest(model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "file"))
    assert weights_digest(model) == before == weights_digest(model)
    assert len(reads) == 6


def test_no_weights_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="name the revision of the weights"):
        weights_digest(tmp_path)
    with pytest.raises(AttachError, match="cannot read"):
        file_digest(tmp_path / "nowhere.safetensors")
