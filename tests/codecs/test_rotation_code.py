"""Machine code of the rotated codecs gives what torch gives, to the bit, on every processor."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierkv import jit
from tierkv.testing.codecs import same_bits, sample
from tierkv_codecs import rotation_trials
from tierkv_codecs.rot import Rot2, Rot3, Rot4, Rotated
from tierkv_codecs.rotation_code import LONGEST, ROUNDS, decoder, features, module

if TYPE_CHECKING:
    from tierkv_codecs.rotation_code import Features

CODECS = (Rot4(), Rot3(), Rot2())
WITHOUT = ((), (ROUNDS,), (ROUNDS, "avx512f"), (ROUNDS, "avx512f", "fma"))


def encoded(codec: Rotated, source: torch.Tensor) -> memoryview:
    data = memoryview(bytearray(codec.encoded_bytes(tuple(source.shape), "bfloat16", "v")))
    codec.encode(source, "v", data)
    return data


def decoded(
    codec: Rotated,
    data: memoryview,
    like: torch.Tensor,
    able: Features | None,
    monkeypatch: pytest.MonkeyPatch,
) -> torch.Tensor:
    def code(bits: int, dim: int, rounds: bool) -> Any:
        return None if able is None else rotation_trials._made(bits, dim, rounds)

    monkeypatch.setattr(rotation_trials, "features", lambda: able)
    monkeypatch.setattr(rotation_trials, "code", code)
    into = torch.empty_like(like)
    codec.decode(data, "v", into)
    return into


def native() -> Features:
    if jit.host() is None:
        pytest.skip("there is no compiler")
    able = features()
    assert able is not None
    return able


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("dim", [1, 7, 16, 32, 80, 256, 576])
@pytest.mark.parametrize("less", WITHOUT, ids=lambda names: "no " + ", ".join(names))
def test_every_kind_of_processor_gives_torchs_bits(
    codec: Rotated, dim: int, less: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    able = native() - {*less}
    source = sample("bfloat16", (3, 11, dim), dim) * 5
    source[1, 4] = 0
    data = encoded(codec, source)
    expected = decoded(codec, data, source, None, monkeypatch)
    assert same_bits(decoded(codec, data, source, able, monkeypatch), expected)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("first", [2.0**exponent for exponent in (-70, -90, -110, -122, -126)])
def test_denormal_numbers_survive(
    codec: Rotated, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = native()
    source = sample("bfloat16", (2, 9, 64), 3)
    data = encoded(codec, source)
    data[:4] = struct.pack("f", first)  # the smallest step: the encoder finds none as small
    expected = decoded(codec, data, source, None, monkeypatch)
    assert same_bits(decoded(codec, data, source, able, monkeypatch), expected)
    smallest = torch.finfo(torch.bfloat16).smallest_normal
    assert first > 2.0**-122 or bool(((expected != 0) & (expected.abs() < smallest)).any())


def test_rows_that_are_too_long_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    able = native()

    def fail(bits: int, dim: int, able: Features) -> None:
        raise AssertionError(dim)

    monkeypatch.setattr(rotation_trials, "decoder", fail)
    source = sample("bfloat16", (1, 2, LONGEST + 1), 4)
    decoded(Rot4(), encoded(Rot4(), source), source, able, monkeypatch)
    source = source[..., :LONGEST].contiguous()
    with pytest.raises(AssertionError, match=str(LONGEST)):
        decoded(Rot4(), encoded(Rot4(), source), source, able, monkeypatch)


def test_code_is_made_once_and_for_the_features_at_hand() -> None:
    able = native()
    assert decoder(4, 32, able) is decoder(4, 32, able)
    assert "@llvm.x86.avx512.permvar.sf.512(<16 x float> %" in module(4, 32, frozenset({"avx512f"}))
    plain = module(4, 32, frozenset())
    assert "x86" not in plain.partition("define")[2]


def test_no_rows_are_no_work() -> None:
    decoder(4, 32, native())(None, None, None, 0)
