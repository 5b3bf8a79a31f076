"""Every format is found out, and read as it is meant."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest
import zstandard

from tests.traces import samples
from tierkv.errors import TraceError
from tierkv.traces import FORMATS, Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkv.traces import TraceRequest


def read(path: Path, text: str, **options: object) -> list[TraceRequest]:
    path.write_text(text)
    return list(open_trace(path, **options))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_mooncake(path: Path) -> None:
    a, b, c = read(path, samples.MOONCAKE)
    assert (a.time, a.keys, a.tokens, a.output_tokens) == (0.0, (0, 1), 1000, 5)
    assert (b.time, b.keys, b.block_tokens) == (1.5, (0, 1, 2, 3), 512)
    # sessions are inferred; what everybody begins with makes none
    assert a.session == b.session != c.session
    assert (a.stop_reason, a.duration, a.next_in) == (None, None, None)


def test_weka_sessions_are_spread_and_their_deltas_undone(path: Path) -> None:
    requests = read(path, samples.WEKA, block_tokens=64, hours=1.0)
    assert [r.time for r in requests] == sorted(r.time for r in requests)
    assert all(0 <= r.time < 3610 for r in requests)
    one = [r for r in requests if r.session.startswith("one/")]
    assert [r.session for r in one] == ["one/main", "one/helper", "one/helper", "one/main"]
    first, sub, again, last = one
    assert [len(r.keys) for r in one] == [4, 2, 2, 6]
    assert again.keys[:1] == sub.keys[:1]
    assert again.keys[1] != sub.keys[1]
    assert last.keys[:4] == first.keys  # and not the sub-agent's
    assert [r.stop_reason for r in one] == ["tool_use", None, None, "end_turn"]
    assert (first.duration, sub.duration, first.output_tokens) == (2.5, None, 3)
    # ids are local to a session
    two = next(r for r in requests if r.session == "two/main")
    assert not set(two.keys) & set(first.keys)
    assert [r.time for r in read(path, samples.WEKA, hours=1.0, seed=1)] != [
        r.time for r in requests
    ]


def test_weka_blocks_are_joined_and_the_incomplete_one_left_out(path: Path) -> None:
    fine = [r for r in read(path, samples.WEKA) if r.session == "one/main"]
    coarse = [r for r in read(path, samples.WEKA, block_tokens=128) if r.session == "one/main"]
    assert [r.keys for r in coarse] == [r.keys[1::2] for r in fine]
    assert [r.tokens for r in coarse] == [256, 384]
    assert {r.block_tokens for r in coarse} == {128}
    path.write_text(samples.WEKA)
    for wrong in (32, 100):
        with pytest.raises(TraceError, match=f"cannot be joined to {wrong}"):
            list(open_trace(path, block_tokens=wrong))


def test_magagent_is_put_in_order_of_arrival(path: Path) -> None:
    a, b = read(path, samples.MAGAGENT)
    assert (a.session, a.time, a.keys, a.tokens) == ("1", 1.0, (5,), 64)
    assert (b.session, b.tokens, b.output_tokens) == ("0", 128, 20)


def test_azure_requests_share_nothing(path: Path) -> None:
    a, b = read(path, samples.AZURE)
    assert (a.time, len(a.keys), a.tokens, a.output_tokens) == (0.0, 3, 130, 10)
    assert (b.time, len(b.keys)) == (1.25, 1)
    assert not set(a.keys) & set(b.keys)
    assert len(read(path, samples.AZURE, block_tokens=100)[0].keys) == 2


def test_chat_logs_share_their_history(path: Path) -> None:
    a, b = read(path, samples.CHAT)
    # "\0user\0" and 600 letters are 606 bytes: two blocks; the reply completes a third
    assert (len(a.keys), len(a.reply_keys), a.tokens) == (2, 1, 128)
    assert (a.output_tokens, a.stop_reason, a.session) == (70, "tool_use", "chat")
    assert b.time - a.time == 30.0
    assert b.keys[:3] == a.keys + a.reply_keys
    assert len(b.keys) > 3
    # without times and names: a second apart, and the session is inferred
    rest = samples.CHAT.replace('"session": "chat", ', "").replace("timestamp", "x")
    c, d = read(path, rest)
    assert (c.time, d.time) == (0.0, 1.0)
    assert c.session == d.session
    assert c.keys == a.keys


@pytest.mark.parametrize("form", sorted(samples.ALL))
@pytest.mark.parametrize("packed", ["plain", "zstd", "gzip"])
def test_any_format_may_be_compressed_and_is_read_again(form: str, packed: str, path: Path) -> None:
    data = samples.ALL[form].encode()
    expected = read(path, samples.ALL[form])
    packs: dict[str, Callable[[bytes], bytes]] = {
        "plain": bytes,
        "zstd": zstandard.compress,
        "gzip": gzip.compress,
    }
    path.write_bytes(packs[packed](data))
    trace = open_trace(path)
    assert list(trace) == list(trace) == expected
    assert list(open_trace(path, form=form)) == expected
    assert list(trace.loaded()) == expected
    assert form in FORMATS
    assert trace.header.bytes_per_token == 131072
    assert str(path) in repr(trace)


def test_frames_and_blank_lines_may_follow_one_another(path: Path) -> None:
    expected = read(path, samples.MOONCAKE)
    lines = samples.MOONCAKE.encode().split(b"\n")
    path.write_bytes(b"".join(zstandard.compress(b"\r\n\n" + line + b"\n") for line in lines))
    assert list(open_trace(path)) == expected


def test_a_part_of_a_trace(path: Path) -> None:
    path.write_text(samples.MOONCAKE)
    trace = open_trace(path)
    assert [r.time for r in trace.between(1.0, 2.0)] == [1.5]
    parts = [*trace.between(0.0, 1.5), *trace.between(1.5, 9.0)]
    assert parts == list(trace)
    assert list(Trace.of(trace.header, reversed(parts))) == parts


@pytest.mark.parametrize(
    ("name", "options", "counts"),
    [
        ("mooncake_fast25_conversation.jsonl.zst", {}, (12031, 288500, 182790)),
        ("mooncake_fast25_synthetic.jsonl.zst", {}, (3993, 121877, 43924)),
        ("agentic_lmcache_magagent.blocks64.jsonl.zst", {}, (746, 22718, 3654)),
        ("azure_llm_2023_code.csv.zst", {}, (8819, 286682, 286682)),
    ],
)
def test_public_traces_have_what_is_said_of_them(
    name: str, options: dict[str, int], counts: tuple[int, int, int]
) -> None:
    requests = list(open_trace(samples.public(name), **options))  # type: ignore[arg-type]
    keys = [key for request in requests for key in request.keys]
    assert (len(requests), len(keys), len(set(keys))) == counts
    assert [r.time for r in requests] == sorted(r.time for r in requests)
    parents: dict[int, int] = {}
    for request in requests:  # an id has one parent
        for parent, key in zip((-1, *request.keys), request.keys, strict=False):
            assert parents.setdefault(key, parent) == parent


@pytest.mark.stress
def test_the_agentic_trace_has_what_is_said_of_it() -> None:
    path = samples.public("agentic_weka_710.delta.jsonl.zst")
    requests = list(open_trace(path, block_tokens=2048))
    keys = [key for request in requests for key in request.keys]
    assert (len(requests), len(set(keys))) == (49334, 107471)
    assert len(keys) == 2923385
