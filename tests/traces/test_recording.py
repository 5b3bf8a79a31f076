"""The recorder: what it hears, what it keeps, what it lets nobody see."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pytest
import zstandard

from tests import kit
from tierkv.blocks import KeyChain
from tierkv.engine.tracing import TraceFile
from tierkv.errors import ConfigError, TraceError
from tierkv.traces import native, open_trace, recording
from tierkv.traces.recording import Recorder

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.blocks import BlockKey
    from tierkv.layout import Space
    from tierkv.traces import TraceRequest

SPACE = kit.space()
SECRET = bytes(range(32))


@dataclass
class Session:
    id: str = "chat"
    tenant: str = ""
    space: Space = SPACE


class Text(NamedTuple):
    keys: tuple[BlockKey, ...]
    tokens: int


@cache
def text(length: int, seed: int = 0) -> Text:
    chain = KeyChain(SPACE.root("", b""), SPACE.block_tokens)
    chain.follow(kit.tokens(length / 16, seed=seed))
    return Text(tuple(chain.keys), length)


def read(recorder: Recorder, path: Path) -> list[TraceRequest]:
    recorder.finish()
    path.write_bytes(recorder.lines())
    return list(open_trace(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_a_turn_is_told_piece_by_piece(path: Path) -> None:
    recorder, chat = Recorder(SECRET, 100.0, 1e9), Session()
    prompt, whole = text(40), text(70)
    recorder.arrived(chat, *prompt, 101.0)
    recorder.ended(chat, *prompt, 101.5)
    recorder.ended(chat, *whole, 103.0)
    recorder.hinted(chat, 104.0, "tool_use")
    recorder.hinted(chat, 104.0, None, 7.5)
    recorder.arrived(chat, *whole, 111.0)
    a, b = read(recorder, path)
    assert (a.time, a.tokens, a.output_tokens, a.duration) == (1.0, 40, 30, 2.0)
    assert (len(a.keys), len(a.reply_keys)) == (2, 2)
    assert (a.stop_reason, a.next_in, a.block_tokens) == ("tool_use", 7.5, 16)
    assert b.keys == a.keys + a.reply_keys
    assert b.session == a.session
    assert (b.time, b.duration, b.stop_reason) == (11.0, None, None)
    # three layers of K and V, two heads of eight float32
    assert open_trace(path).header.bytes_per_token == 3 * 2 * 2 * 8 * 4


def test_what_was_stored_without_a_match_is_a_request_too(path: Path) -> None:
    recorder, chat = Recorder(SECRET, 0.0, 0.0), Session()
    recorder.ended(chat, *text(70), 1.0)
    recorder.arrived(chat, *text(40, seed=1), 2.0)
    recorder.ended(chat, *text(70, seed=2), 3.0)  # not what was looked up
    recorder.ended(chat, *text(20, seed=2), 4.0)  # shorter than it
    a, b, c, d = read(recorder, path)
    assert (len(a.keys), a.duration, a.output_tokens) == (4, 0.0, 0)
    assert (len(b.keys), b.duration) == (2, None)
    assert (len(c.keys), len(d.keys)) == (4, 1)
    assert d.keys == c.keys[:1]


def test_names_and_keys_cannot_be_recognised(path: Path) -> None:
    prompt = text(70)
    recorders = [Recorder(SECRET, 0.0, 0.0), Recorder(SECRET, 0.0, 0.0), Recorder(b"x" * 32, 0, 0)]
    traces = []
    for recorder in recorders:
        for name in ("chat", "\ud800"):
            recorder.arrived(Session(name, "acme"), *prompt, 1.0)
        traces.append(read(recorder, path))
    a, again, b = traces
    assert a == again
    assert a[0].keys == a[1].keys
    assert a[0].session != a[1].session
    assert not set(a[0].keys) & set(b[0].keys)
    assert {a[0].session, a[0].tenant}.isdisjoint({b[0].session, b[0].tenant})
    data = path.read_bytes()
    assert b"chat" not in data
    assert b"acme" not in data
    for key in prompt.keys:
        assert int.from_bytes(key[:8], "little") not in a[0].keys
    with pytest.raises(ValueError, match="32 bytes"):
        Recorder(b"short", 0.0, 0.0)


def test_silent_turns_are_complete_after_a_while(path: Path) -> None:
    recorder = Recorder(SECRET, 0.0, 0.0)
    for number in range(3):
        recorder.arrived(Session(str(number)), *text(20), float(number))
    recorder.hinted(Session("0"), 30.0, "end_turn")  # heard of again
    assert recorder.lines() == b""
    recorder.tick(61.5)
    assert recorder.waiting == 1
    recorder.hinted(Session("1"), 62.0, "too late")
    recorder.tick(62.5)
    assert recorder.waiting == 2
    assert "1 turns open" in repr(recorder)
    assert [r.stop_reason for r in read(recorder, path)] == ["end_turn", None, None]


@pytest.mark.parametrize(("most", "still_open"), [(2, 2), (100, 3)])
def test_memory_is_bounded_and_what_is_lost_is_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch, most: int, still_open: int
) -> None:
    monkeypatch.setattr(recording, "_LIMIT", 2000)  # three turns of two blocks
    monkeypatch.setattr(recording, "_OPEN", most)
    recorder = Recorder(SECRET, 0.0, 0.0)
    for number in range(10):
        recorder.arrived(Session(str(number)), *text(40), float(number))
    assert recorder.waiting == 10 - still_open
    recorder.finish()
    path.write_bytes(recorder.lines())
    trace = open_trace(path)
    assert [r.time for r in trace] == [0.0, 1.0, 2.0]
    assert trace.lost == 7
    recorder.arrived(Session(), *text(40), 20.0)
    recorder.finish()
    recorder.discard()
    assert recorder.lines() == b""


def test_two_threads_may_write_at_once(path: Path) -> None:
    recorder = Recorder(SECRET, 0.0, 0.0)
    parts: list[bytes] = []

    def write() -> None:
        parts.extend(recorder.lines() for _ in range(200))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2000):
        recorder.arrived(Session(), *text(20), float(number))
    for thread in threads:
        thread.join(60)
    recorder.finish()
    parts.append(recorder.lines())
    data = sorted(b"".join(parts).splitlines(), key=lambda line: native.MARK.encode() not in line)
    assert sum(b'"t":' in line for line in data) == 2000
    assert len(data) == 2001


# --------------------------------------------------------------------------- the file


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
@pytest.mark.parametrize("torn", [0, 1, 20])
def test_a_restart_appends_and_takes_away_what_a_crash_cut_off(
    name: str, torn: int, tmp_path: Path
) -> None:
    path = tmp_path / name
    for run in range(3):
        file = TraceFile(str(path), 10.0, 1e9 + run)
        for number in range(2):
            file.recorder.arrived(Session(), *text(20), 10.0 + number)
        file.close()
        file.close()
        whole = path.read_bytes()
        if torn and run < 2:
            more = TraceFile(str(tmp_path / f"other-{name}"), 10.0, 0.0)
            more.recorder.arrived(Session(), *text(40), 10.0)
            more.close()
            path.write_bytes(whole + (tmp_path / f"other-{name}").read_bytes()[:torn])
            with pytest.raises(TraceError):
                list(open_trace(path))
    assert [r.time for r in open_trace(path)] == [0.0, 1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_file_is_flushed_when_it_is_worth_it(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "t.zst"), 0.0, 0.0)
    assert not file.due(100.0)
    file.recorder.arrived(Session(), *text(20), 100.0)
    assert not file.due(101.0)  # its turn may go on
    assert file.due(161.0)
    assert not file.due(200.0)  # that is under way
    file.flush()
    assert not file.due(300.0)
    assert len(list(open_trace(tmp_path / "t.zst"))) == 1
    for number in range(300):
        file.recorder.arrived(Session(), *text(20), 300.0 + number / 1e3)
    assert file.due(300.5)  # many of them wait no longer
    file.close()
    assert len(list(open_trace(tmp_path / "t.zst"))) == 301


def test_one_engine_a_file_and_a_place_where_it_can_be(tmp_path: Path) -> None:
    path = str(tmp_path / "t.zst")
    file = TraceFile(path, 0.0, 0.0)
    with pytest.raises(ConfigError, match="another engine writes to it"):
        TraceFile(path, 0.0, 0.0)
    file.close()
    TraceFile(path, 0.0, 0.0).close()
    with pytest.raises(ConfigError, match="No such file") as told:
        TraceFile(str(tmp_path / "no" / "t.zst"), 0.0, 0.0)
    assert told.value.setting == "trace"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mine.txt", b"no newline at the end"),
        ("mine.zst", b"no frame at all"),
        ("mine.jsonl.zst", zstandard.ZstdCompressor().compress(b"a frame of another kind")),
        ("big.zst", zstandard.ZstdCompressor().compress(random.Random(1).randbytes(200_000))),
        ("t.jsonl.zst", b'{"tierkv_trace":1}\n'),  # a trace, of another name
    ],
)
def test_what_is_no_trace_is_left_alone(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="it holds something else"):
        TraceFile(str(path), 0.0, 0.0)
    assert path.read_bytes() == content


def test_a_device_is_no_place_for_a_trace() -> None:
    for path in ("/dev/full", "/dev/zero"):
        with pytest.raises(ConfigError, match="no regular file"):
            TraceFile(path, 0.0, 0.0)


def test_a_disk_that_refuses_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TraceFile(str(tmp_path / "t.zst"), 0.0, 0.0)

    class Full:
        closed = False

        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.closed = True

    file._file.close()
    monkeypatch.setattr(file, "_file", Full())
    for number in range(2):
        file.recorder.arrived(Session(), *text(20), float(number))
    assert file.due(100.0)
    file.flush()
    assert "breaks off here" in caplog.text
    assert "broken off" in repr(file)
    file.recorder.arrived(Session(), *text(20), 200.0)
    file.recorder.finish()
    assert not file.due(300.0)
    assert file.recorder.waiting == 0
    file.close()
