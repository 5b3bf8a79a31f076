"""The own format gives back what was written, and says where it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.traces import samples
from tierkv.errors import TraceError
from tierkv.traces import Trace, TraceHeader, TraceRequest, native, open_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADER = TraceHeader(16, 1024, "a test")
IDS = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=4)
REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        time=st.integers(0, 10**9).map(lambda us: us / 1e6),
        session=TEXT,
        tenant=TEXT,
        keys=st.lists(IDS, max_size=5).map(tuple),
        tokens=st.integers(0, 100),
        output_tokens=st.integers(0, 100),
        block_tokens=st.sampled_from([16, 32]),
        stop_reason=st.none() | st.just("tool_use"),
        next_in=st.none() | st.floats(0, 1e6),
        duration=st.none() | st.floats(0, 1e6),
        reply_keys=st.lists(IDS, max_size=3).map(tuple),
    ),
    max_size=8,
)


@given(requests=REQUESTS, packed=st.booleans())
def test_what_is_written_comes_back(
    requests: list[TraceRequest], packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / ("t.jsonl.zst" if packed else "t.jsonl")
    trace = Trace.of(HEADER, requests)
    trace.lost = len(requests)
    assert write_trace(str(path), trace) == len(requests)
    back = open_trace(path)
    assert back.header == HEADER
    assert list(back) == list(trace)
    assert back.lost == trace.lost
    assert path.read_bytes().startswith(b"\x28\xb5\x2f\xfd" if packed else b'{"tierkv_trace":1')


@pytest.mark.parametrize("form", sorted(samples.ALL))
def test_every_format_converts(form: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(samples.ALL[form])
    trace = open_trace(tmp_path / "in")
    write_trace(str(tmp_path / "out.zst"), trace)
    back = open_trace(tmp_path / "out.zst")
    assert list(back) == [replace(r, time=round(r.time, 6)) for r in trace]
    assert back.header == trace.header


def test_a_turn_writes_only_what_is_new(tmp_path: Path) -> None:
    keys = tuple(range(1000))
    turns = [TraceRequest(t, "s", "", keys[: 900 + t], 16, 0, 16) for t in range(3)]
    write_trace(str(tmp_path / "t"), Trace.of(HEADER, turns))
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [line.get("keep") for line in lines[1:]] == [0, 900, 901]
    assert list(open_trace(tmp_path / "t")) == turns


def test_sessions_beyond_those_remembered_are_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_SESSIONS", 2)
    turns = [TraceRequest(t, str(t % 3), "", (1, 2, t), 16, 0, 16) for t in range(9)]
    turns += [TraceRequest(9 + t, "a", "", (1, 2, t), 16, 0, 16) for t in range(2)]
    write_trace(str(tmp_path / "t"), Trace.of(HEADER, turns))
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [line["keep"] for line in lines[1:]] == [0] * 10 + [2]
    assert list(open_trace(tmp_path / "t")) == turns


def _runs(*epochs: float) -> bytes:
    out = b""
    for epoch in epochs:
        deltas = native.Deltas()
        requests = [TraceRequest(t, "s", "", (7, t), 32, 0, 16) for t in (5, 2)]
        out += native.dump_header(HEADER, in_order=False, epoch=epoch)
        out += b"".join(native.dump_request(request, deltas) for request in requests)
        out += native.dump_lost(3)
    return out


def test_runs_of_an_engine_follow_each_other_in_time(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(_runs(1000.0, 1060.5))
    trace = open_trace(tmp_path / "t")
    for _ in range(2):
        assert [(r.time, r.session) for r in trace] == [
            *((2.0, "s"), (5.0, "s")),
            *((62.5, "s#2"), (65.5, "s#2")),
        ]
        assert trace.lost == 6


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"keep":0', b'"keep":1', "keeps 1 of 0 blocks"),
        (b'"keep":1', b'"keep":-1', "keeps -1 of"),
        (b'"n":2', b'"n":3', "3 of them its own"),
        (b'"new":"', b'"new":"%', "Only base64"),
        (b'"new":"', b'"new":"AAAA', "not a line of a tierkv trace"),
        (b'"t":5', b'"when":5', "'t' is missing"),
        (b'"tierkv_trace":1', b'"tierkv_trace":2', "reads version 1"),
        (b'"lost":3', b'"lost":"x"', "not a line of a tierkv trace"),
    ],
)
def test_malformed_lines_are_told(old: bytes, new: bytes, why: str, tmp_path: Path) -> None:
    data = _runs(1.0)
    assert old in data
    (tmp_path / "t").write_bytes(data.replace(old, new))
    with pytest.raises(TraceError, match=why):
        list(open_trace(tmp_path / "t"))


def test_a_header_without_its_fields_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(zstandard.compress(b'{"tierkv_trace":1}\n'))
    with pytest.raises(TraceError, match="'block_tokens' is missing"):
        open_trace(tmp_path / "t")


def test_what_was_there_stays_where_a_trace_cannot_be_read(tmp_path: Path) -> None:
    def broken() -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, "s", "", (1,), 16, 0, 16)
        raise TraceError("source", 2, "damaged")

    target = tmp_path / "t"
    write_trace(str(target), Trace.of(HEADER, []))
    before = target.read_bytes()
    with pytest.raises(TraceError, match="damaged"):
        write_trace(str(target), Trace(HEADER, broken))
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
