from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.units import format_bytes, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * 2**30),
        ("64GB", 64 * 10**9),
        ("1.5 mib", 1536 * 1024),
        (" 7 B ", 7),
        ("4096", 4096),
        (0, 0),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e3", "1.5", "8 giga", "8Gi B", -1, True, 1.5, None, "9" * 400]
)
def test_what_is_not_a_size_is_refused(text: int | str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("150ms", 0.15), ("6h", 21600.0), ("2d", 172800.0), ("1.5", 1.5), (3, 3.0), ("10us", 1e-5)],
)
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "h", "-1s", "1 year", "inf", "nan", float("inf"), float("nan"), -0.5, True, None, 10**400],
)
def test_what_is_not_a_duration_is_refused(text: float | str) -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(text)


@given(st.integers(0, 2**62))
def test_bytes_read_back_from_their_plain_text(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes
    assert parse_bytes(f"{nbytes % 10**18}") == nbytes % 10**18


def test_sizes_are_written_in_binary_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "5 TiB",
    ]
