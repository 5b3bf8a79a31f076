"""Frames arrive however they are cut, and what is none of them is a typed error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv_adapters.remote.wire import (
    HEAD,
    MOST_BODY,
    MOST_HEADER,
    FrameReader,
    WireError,
    decode_header,
    encode,
    pack_changes,
    pack_tokens,
    unpack_changes,
    unpack_tokens,
)

if TYPE_CHECKING:
    import random


@given(
    frames=st.lists(
        st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary()), max_size=4
    ),
    cuts=st.randoms(use_true_random=False),
)
def test_frames_arrive_however_they_are_cut(
    frames: list[tuple[dict[str, Any], bytes]], cuts: random.Random
) -> None:
    data = b"".join(encode(header, body) for header, body in frames)
    reader, got = FrameReader(), []
    while data:
        size = cuts.randint(1, len(data))
        got += list(reader.feed(data[:size]))
        data = data[size:]
    assert got == frames


@given(data=st.binary(max_size=64))
def test_garbage_is_a_typed_error_or_waits_for_more(data: bytes) -> None:
    reader = FrameReader()
    try:
        for header, _ in reader.feed(data):
            assert isinstance(header, dict)
    except WireError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(0, 0),
        HEAD.pack(MOST_HEADER + 1, 0),
        HEAD.pack(1, MOST_BODY + 1),
        HEAD.pack(2**32 - 1, 2**32 - 1),
        HEAD.pack(2, 0) + b"[]",
        HEAD.pack(4, 0) + b"null",
        HEAD.pack(2, 0) + b"\xff\xff",
        HEAD.pack(100_000, 0) + b"[" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_d7_lengths_and_headers_are_checked_before_they_are_believed(data: bytes) -> None:
    with pytest.raises(WireError):
        list(FrameReader().feed(data))


def test_arrays_travel_and_are_checked() -> None:
    assert list(unpack_tokens(pack_tokens([0, 7, 2**32 - 1]))) == [0, 7, 2**32 - 1]
    for bad in ([-1], [2**32], ["a"]):
        with pytest.raises(ConfigError, match="32 bits"):
            pack_tokens(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no array"):
        unpack_tokens(b"abc")
    changes: Any = [(bytes([n]) * 34, n) for n in range(256)]
    assert unpack_changes(pack_changes(changes)) == changes
    with pytest.raises(WireError, match="no list of parts"):
        unpack_changes(bytes(36))
    with pytest.raises(ConfigError, match="too long"):
        encode({"name": "x" * MOST_HEADER})
    with pytest.raises(WireError, match="JSON"):
        decode_header(b"{")
