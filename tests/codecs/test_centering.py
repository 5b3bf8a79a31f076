"""Planes centred on the means of their columns: found where there are rows, undone exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierkv.testing.codecs import sample
from tierkv_codecs import kernels, loops
from tierkv_codecs.centering import base_bytes, center, period, restore
from tierkv_codecs.planes import Planes


@pytest.fixture(params=["numpy", "plain Python", "compiled"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to do it that is installed."""
    find: Any = {
        "numpy": lambda *_: None,
        "plain Python": lambda name: getattr(loops, name),
        "compiled": kernels.kernel,
    }[request.param]
    if request.param == "compiled" and not kernels.available():
        pytest.skip("numba is not installed")
    monkeypatch.setattr("tierkv_codecs.centering.kernel", find)


def exponents(heads: int, tokens: int, dim: int, seed: int = 0) -> Any:
    """Exponents of keys: channels of different size."""
    size = sample("float32", (heads, 1, dim), seed + 1).mul(1.5).exp()
    keys = (sample("float32", (heads, tokens, dim), seed) * size).bfloat16()
    return (keys.view(torch.int16).numpy().reshape(-1).view(np.uint16) >> 7).astype(np.uint8)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_f023_rows_are_found_by_their_channels(dim: int) -> None:
    assert period(exponents(2, 64, dim, dim)) == dim


def test_no_rows_are_found_where_there_are_none() -> None:
    noise = np.random.default_rng(1).integers(0, 20, 20_000, dtype=np.uint8)
    assert period(noise) == 0
    assert period(np.zeros(4096, np.uint8)) == 0
    assert period(noise[:500]) == 0
    tokens = np.repeat(noise[:100], 64) + noise[:6400] % 2  # rows that differ, channels that do not
    assert period(tokens) == 0


@pytest.mark.parametrize("count", [1, 63, 64, 4096, 4097, 64 * 80, 64 * 80 + 13, 9999])
@pytest.mark.parametrize("columns", [64, 80])
def test_any_bytes_come_back(count: int, columns: int) -> None:
    plane = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    rest, found = np.empty_like(plane), np.empty_like(plane)
    base = center(plane, columns, rest)
    assert base.size == base_bytes(count, columns)
    restore(rest, columns, base, found)
    assert np.array_equal(found, plane)


def test_means_that_must_not_be_written_are_read(caplog: pytest.LogCaptureFixture) -> None:
    plane = exponents(2, 64, 64)
    rest, found = np.empty_like(plane), np.empty_like(plane)
    base = center(plane, 64, rest)
    rest.flags.writeable = base.flags.writeable = False
    restore(rest, 64, base, found)
    assert np.array_equal(found, plane)
    assert caplog.text == ""  # a loop would tell if it had to go on as plain Python


def test_all_ways_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = exponents(2, 70, 96)[:-5]
    mine = np.empty_like(plane)
    base = center(plane, 96, mine)
    monkeypatch.setattr("tierkv_codecs.centering.kernel", lambda *_: None)
    theirs = np.empty_like(plane)
    assert np.array_equal(center(plane, 96, theirs), base)
    assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_take_less_when_they_are_centred(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sample("float32", (2, 1, 64), 8).mul(0.7).exp()
    keys = (sample("float32", (2, 128, 64), 9) * size).to(getattr(torch, dtype))
    array: Any = keys.view(torch.uint8).numpy()
    data = memoryview(array).cast("B")
    out = memoryview(bytearray(len(data)))
    centred = Planes().encode(data, out)
    assert out[0] & 0x40
    back = bytearray(len(data))
    Planes().decode(out[:centred], memoryview(back))
    assert back == data
    monkeypatch.setattr("tierkv_codecs.planes.period", lambda plane: 0)
    plain = Planes().encode(data, out)
    assert not out[0] & 0x40
    assert centred is not None
    assert plain is not None
    assert centred < plain
