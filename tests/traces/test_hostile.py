"""Files made to do harm: told like any other damage, with bounded memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from tests.traces import samples
from tierkv.errors import TraceError
from tierkv.traces import lines, open_trace

if TYPE_CHECKING:
    from pathlib import Path

HEADER = {
    "tierkv_trace": 1,
    "block_tokens": 16,
    "bytes_per_token": 1,
    "origin": "here",
    "in_order": True,
}
REQUEST = {"t": 5.0, "s": "a", "in": 16, "out": 0, "n": 1, "keep": 0, "new": "AQAAAAAAAAA="}
MOONCAKE = {"timestamp": 9000, "input_length": 512, "output_length": 1, "hash_ids": [1]}
WEKA = {"t": 0.0, "type": "n", "in": 9, "out": 3, "keep": 0, "new": [[0, 1]]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def refused(path: Path, *rows: Any) -> str:
    """Why the last of these lines is refused; those before it are read."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TraceError) as told:
        list(open_trace(path))
    assert told.value.line == len(rows)
    return str(told.value)


@pytest.mark.parametrize("pack", [zstandard.ZstdCompressor(level=1).compress, gzip.compress])
def test_d7_compressed_data_made_to_swell_is_undone_a_little_at_a_time(
    pack: Any, path: Path
) -> None:
    path.write_bytes(pack(bytes(256 << 20)))
    tracemalloc.start()
    try:
        assert max(map(len, lines._chunks(str(path)))) <= 1 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 96 << 20


def test_d7_a_short_line_that_claims_many_blocks_is_refused(path: Path) -> None:
    row = {"id": "a", "hash_id_scope": "local", "requests": [{**WEKA, "new": [[0, 10**12]]}]}
    assert "more blocks" in refused(path, row)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,999999999,1\n")
    with pytest.raises(TraceError, match="a prompt of 999999999 tokens"):
        list(open_trace(path))


def test_deep_nesting_and_long_fields_are_told(path: Path) -> None:
    deep = '{"body":' * 900 + '{"messages":[]}' + "}" * 900
    path.write_text('{"messages":[]}\n' + deep + "\n")
    with pytest.raises(TraceError, match="line 2"):
        list(open_trace(path))
    path.write_text(samples.AZURE + "2023-11-16 18:17:09," + "9" * 200_000 + ",1\n")
    with pytest.raises(TraceError, match="line 4"):
        list(open_trace(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", float("nan")),
        ("timestamp", float("inf")),
        ("timestamp", 8999),  # earlier than the one before it
        ("input_length", -1),
        ("output_length", -1),
        ("hash_ids", [-1]),
        ("hash_ids", [1 << 64]),
        ("hash_ids", [1e300]),
    ],
)
def test_numbers_that_no_request_has_are_refused(field: str, value: object, path: Path) -> None:
    refused(path, MOONCAKE, {**MOONCAKE, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("t", float("nan")),
        ("t", float("-inf")),
        ("t", 4.0),  # the header says that they are in order
        ("in", -5),
        ("out", -5),
        ("block", 0),
        ("next", float("nan")),
        ("next", -1),
        ("next", "soon"),
        ("took", float("inf")),
        ("took", "x"),
        ("stop", {}),
        ("stop", ["a"]),
    ],
)
def test_fields_of_the_own_format_are_checked_too(field: str, value: object, path: Path) -> None:
    refused(path, HEADER, REQUEST, {**REQUEST, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0),
        ("block_tokens", -16),
        ("block_tokens", 10**30),
        ("bytes_per_token", -1),
        ("bytes_per_token", 10**30),
        ("bytes_per_token", "nan"),
    ],
)
def test_d7_a_header_with_blocks_that_nobody_has_is_refused(
    field: str, value: object, path: Path
) -> None:
    assert "not a line of a tierkv trace" in refused(path, HEADER | {field: value})


def test_bytes_that_a_header_leaves_open_are_those_that_were_asked_for(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in (HEADER, REQUEST)))
    assert open_trace(path, bytes_per_token=64).header.bytes_per_token == 1, "it tells"
    open_header = HEADER | {"bytes_per_token": 0}  # what a model of nothing but states has
    path.write_text("".join(json.dumps(row) + "\n" for row in (open_header, REQUEST)))
    trace = open_trace(path, bytes_per_token=64)
    assert trace.header.bytes_per_token == 64
    assert len(list(trace)) == 1
    for nbytes in (0, -1, 1 << 40):
        with pytest.raises(TraceError, match="bytes"):
            open_trace(path, bytes_per_token=nbytes)


def test_blocks_that_nobody_has_are_refused_where_the_format_leaves_them_open(path: Path) -> None:
    path.write_text(samples.AZURE)
    for size in (0, -1, 10**30):
        with pytest.raises(TraceError, match=r"a block cannot hold|no block has"):
            open_trace(path, block_tokens=size)
