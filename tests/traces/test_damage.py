"""What is malformed or cut off is told, with the file and the line."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest
import zstandard

from tests.traces import samples
from tierkv.errors import TraceError
from tierkv.traces import Trace, TraceHeader, open_trace, write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.traces import TraceRequest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.mark.parametrize("form", sorted(samples.ALL))
def test_a_malformed_line_is_named(form: str, path: Path) -> None:
    lines = samples.ALL[form].strip().split("\n")
    for bad in ("{", "[]", '{"x": 1}', "a,b", "\ud800".encode("utf-8", "surrogatepass").hex()):
        path.write_text("\n".join([*lines, bad]) + "\n")
        with pytest.raises(TraceError) as told:
            list(open_trace(path))
        assert told.value.path == str(path)
        assert told.value.line == len(lines) + 1
        assert f"{path}, line {len(lines) + 1}: " in str(told.value)


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("mooncake", '"input_length": 1600', '"input_length": 9999'),
        ("mooncake", '"timestamp": 1500', '"timestamp": "soon"'),
        ("mooncake", "[0, 1, 2, 3]", "[0, null]"),
        ("mooncake", "[0, 1, 2, 3]", "7"),
        ("weka", '"keep": 4', '"keep": 5'),
        ("weka", '"keep": 4', '"keep": -1'),
        ("weka", "[[5, 1], [7, 1]]", "[[5]]"),
        ("magagent", '"t": 1.0', '"t": []'),
        ("azure", "64,2", "-64,2"),
        ("azure", "64,2", "64"),
        ("azure", "2023-11-16 18:17:05.2299600", "yesterday"),
        ("chat", '"role": "user"', '"rule": "user"'),
        ("chat", '"completion_tokens": 70', '"completion_tokens": "many"'),
        ("chat", "2026-01-01T00:00:30", "noon"),
    ],
)
def test_a_field_that_makes_no_sense_is_told(form: str, old: str, new: str, path: Path) -> None:
    assert old in samples.ALL[form]
    path.write_text(samples.ALL[form].replace(old, new))
    with pytest.raises(TraceError, match=r"line \d+: not a"):
        list(open_trace(path))


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"a": 1}\n', "\xff"])
def test_an_unknown_format_is_told_with_those_that_are_known(text: str, path: Path) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=r"of no known format .*mooncake"):
        open_trace(path)
    with pytest.raises(TraceError, match="no such format: 'csv'"):
        open_trace(path, form="csv")


def test_missing_and_empty_files(path: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        open_trace(path)
    for data in (b"", b"\n\n", zstandard.compress(b"")):
        path.write_bytes(data)
        with pytest.raises(TraceError, match="the file is empty"):
            open_trace(path)
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(str(tmp_path / "no" / "t"), Trace.of(TraceHeader(1), []))


@pytest.mark.parametrize("pack", [zstandard.compress, gzip.compress])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_compression_is_told_after_what_came_before(
    pack: object, damage: str, path: Path
) -> None:
    assert callable(pack)
    one = pack(samples.MOONCAKE.encode() + b"\n")
    data = bytearray(one + one)
    if damage == "cut":
        del data[-5:]
    else:
        data[len(one) + 12] ^= 0xFF
    path.write_bytes(data)
    got: list[TraceRequest] = []
    with pytest.raises(TraceError, match=str(path)):
        got.extend(open_trace(path))
    assert len(got) >= 3


def test_every_cut_of_a_compressed_trace_is_told(path: Path) -> None:
    data = zstandard.compress(samples.MAGAGENT.encode())
    for end in range(1, len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(TraceError):
            list(open_trace(path))


def test_blocks_of_another_size_are_refused(path: Path) -> None:
    path.write_text(samples.MOONCAKE)
    with pytest.raises(TraceError, match="mooncake: its blocks hold 512 tokens, not 64"):
        open_trace(path, block_tokens=64)
    path.write_text(samples.AZURE)
    with pytest.raises(TraceError, match="cannot hold 0 tokens"):
        open_trace(path, block_tokens=0)
