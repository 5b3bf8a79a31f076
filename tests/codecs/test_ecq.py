"""``ecq4 ecq3 ecq2``: the shipped suite, bounds, steps, frequencies, damage."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tierkv.errors import CodecError
from tierkv.layout import Layer, TensorSpec
from tierkv.testing.codecs import TensorBytesCodecTests, same_bits, sample
from tierkv_codecs import rope
from tierkv_codecs.ecq import Ecq2, Ecq3, Ecq4, Stepped
from tierkv_codecs.rot import Rot2, Rot3, Rot4
from tierkv_codecs.zstd import Zstd

CODECS: tuple[Stepped, ...] = (Ecq4(), Ecq3(), Ecq2())
DTYPES = ("bfloat16", "float16", "float32")
every = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)


class TestEcq4(TensorBytesCodecTests):
    def make(self) -> Ecq4:
        return Ecq4()


class TestEcq2(TensorBytesCodecTests):
    def make(self) -> Ecq2:
        return Ecq2()


def encode(codec: Stepped | Rot4 | Rot3 | Rot2, source: torch.Tensor, tensor: str) -> bytearray:
    dtype = str(source.dtype).removeprefix("torch.")
    out = bytearray(codec.encoded_bytes(tuple(source.shape), dtype, tensor))
    codec.encode(source, tensor, memoryview(out))
    return out


def decode(
    codec: Stepped, data: bytes | bytearray, tensor: str, like: torch.Tensor
) -> torch.Tensor:
    into = torch.empty(like.shape, dtype=like.dtype)
    codec.decode(memoryview(data), tensor, into)
    return into


def there_and_back(codec: Stepped, source: torch.Tensor, tensor: str) -> torch.Tensor:
    return decode(codec, encode(codec, source, tensor), tensor, source)


def entropy_coded(data: bytes | bytearray) -> int:
    """Bits behind ``zstd``."""
    room = memoryview(bytearray(len(data) + 64))
    size = Zstd().encode(memoryview(data), room)
    assert size is not None
    return 8 * size


def spinning(base: float = 10_000.0, tokens: int = 64, dim: int = 64) -> torch.Tensor:
    """Keys with a rotary embedding: noise about a mean, turned from token 1000 on."""
    plain = 0.5 * sample("float32", (4, tokens, dim), 0) + 2 * sample("float32", (4, 1, dim), 9)
    place = torch.arange(1000, 1000 + tokens).double()[:, None]
    angle = place * base ** (-torch.arange(0, dim, 2).double() / dim)
    cosine, sine = angle.cos().float(), angle.sin().float()
    first, second = plain[..., : dim // 2], plain[..., dim // 2 :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


@hypothesis.given(
    st.sampled_from(CODECS),
    st.sampled_from(DTYPES),
    st.sampled_from(["k", "v", "latent"]),
    st.integers(1, 4),
    st.integers(1, 140),
    st.integers(1, 40),
    st.floats(-38, 36),
    st.sampled_from(["normal", "spread", "far", "still"]),
    st.integers(0, 99),
)
@hypothesis.settings(max_examples=120, deadline=None)
def test_bound_holds_at_every_shape_and_magnitude(
    codec: Stepped,
    dtype: str,
    tensor: str,
    heads: int,
    tokens: int,
    dim: int,
    exponent: float,
    kind: str,
    seed: int,
) -> None:
    wide = sample("float64", (heads, tokens, dim), seed)
    if kind == "spread":
        wide *= 10.0 ** (4 * sample("float64", (heads, 1, dim), seed + 1))
        wide *= 10.0 ** (2 * sample("float64", (heads, tokens, 1), seed + 2))
    elif kind == "far":
        wide += 1e4
    elif kind == "still":
        wide[:, :, ::3] = 1.7
    source = (wide * 10.0**exponent).to(getattr(torch, dtype))
    try:
        found = there_and_back(codec, source, tensor)
    except CodecError:
        limit = 65504.0 if dtype == "float16" else 2.0**120
        assert not bool((source.abs() <= limit).all()), "refused what it could encode"
        return
    bound = codec.error_bound(source, tensor).double()
    assert bool(((found.double() - source.double()).abs() <= bound).all())
    assert bool(found.isfinite().all())


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-7, 60000.0])
def test_f024_constant_keys_and_zeros_are_exact(codec: Stepped, dtype: str, value: float) -> None:
    source = torch.full((2, 70, 16), value, dtype=getattr(torch, dtype))
    assert same_bits(there_and_back(codec, source, "k"), source)
    assert torch.equal(there_and_back(codec, torch.zeros_like(source), "v"), 0 * source)


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_f024_constant_channels_are_exact_beside_ones_that_turn(codec: Stepped, dtype: str) -> None:
    source = spinning().to(getattr(torch, dtype))
    source[1, :, 5] = 0.1
    source[0, :, 40] = -7
    found = there_and_back(codec, source, "k")
    assert same_bits(found[1, :, 5], source[1, :, 5])
    assert same_bits(found[0, :, 40], source[0, :, 40])


@every
def test_f025_an_outlier_key_channel_hardly_costs_the_others(codec: Stepped) -> None:
    plain = sample("float32", (2, 64, 64), 4)
    source = plain.clone()
    source[:, :, 7] *= 100
    others = [c for c in range(64) if c not in (7, 39)]  # the pair shares its error
    error = (there_and_back(codec, source, "k") - source)[..., others].norm()
    alone = (there_and_back(codec, plain, "k") - plain)[..., others].norm()
    assert float(error) <= 1.2 * float(alone)


@every
def test_f025_an_outlier_token_hardly_costs_other_values(codec: Stepped) -> None:
    plain = sample("float32", (2, 64, 64), 6)
    source = plain.clone()
    source[:, 9] *= 100
    others = [t for t in range(64) if t != 9]
    error = (there_and_back(codec, source, "v") - source)[:, others].norm()
    alone = (there_and_back(codec, plain, "v") - plain)[:, others].norm()
    assert float(error) <= 1.2 * float(alone)


def test_small_values_keep_their_own_precision() -> None:
    # the values of tokens that everything attends to are small
    source = sample("float32", (2, 64, 64), 7)
    source[:, 0] /= 1000
    found = there_and_back(Ecq4(), source, "v")[:, 0]
    assert float((found - source[:, 0]).norm() / source[:, 0].norm()) < 0.15


@pytest.mark.parametrize(
    ("codec", "peer"), [(Ecq4(), Rot4()), (Ecq3(), Rot3()), (Ecq2(), Rot2())], ids=lambda c: c.name
)
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_fewer_bits_than_fixed_codes_of_the_same_error(
    codec: Stepped, peer: Rot4 | Rot3 | Rot2, tensor: str
) -> None:
    source = spinning().bfloat16() if tensor == "k" else sample("bfloat16", (4, 64, 64), 3)
    dtype = "bfloat16"
    theirs = torch.empty_like(source)
    data = memoryview(encode(peer, source, tensor))
    peer.decode(data, tensor, theirs)
    mine = there_and_back(codec, source, tensor)
    bits = entropy_coded(encode(codec, source, tensor)) / source.numel()
    error = [float((t.float() - source.float()).square().mean()) for t in (mine, theirs)]
    more = 0.5 * math.log2(error[1] / error[0])  # bits that the difference in error is worth
    fixed = 8 * peer.encoded_bytes(tuple(source.shape), dtype, tensor) / source.numel()
    assert bits - more < fixed - 0.1


def test_frequencies_of_a_rotary_embedding_are_found() -> None:
    for base in (10_000.0, 500_000.0):
        keys = spinning(base)
        found = rope.frequencies([keys], np.zeros(32, bool))
        due = base ** (-np.arange(0, 64, 2) / 64) * rope.WHEEL / (2 * np.pi)
        apart = (found - due + rope.WHEEL / 2) % rope.WHEEL - rope.WHEEL / 2
        assert float(np.abs(apart).max()) < 8, base  # half a bin of the spectrum


def test_keys_that_spin_take_fewer_bits_turned_back() -> None:
    turned = spinning().bfloat16()
    other = turned[..., torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    rel = {}
    for name, source in (("turned", turned), ("shuffled", other)):
        found = there_and_back(Ecq4(), source, "k").float() - source.float()
        bits = entropy_coded(encode(Ecq4(), source, "k")) / source.numel()
        rel[name] = bits + 0.5 * math.log2(float(found.square().mean()))
    assert rel["turned"] < rel["shuffled"] - 0.5


def test_noise_does_not_turn() -> None:
    still = np.zeros(32, bool)
    turning = [
        int((rope.frequencies([sample("float32", (1, 64, 64), seed)], still) != 0).sum())
        for seed in range(20)
    ]
    assert sum(turning) <= 6  # of 640: chance, where it is worth its bits


@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 64, 65, 200])
@pytest.mark.parametrize("dim", [1, 2, 63, 80])
def test_turning_is_undone(tokens: int, dim: int) -> None:
    keys = sample("float32", (2, tokens, dim), tokens)
    half = rope.pairs(dim)
    frequency = np.random.default_rng(dim).integers(0, rope.WHEEL, half)
    angle = rope.angles(frequency, tokens)
    assert torch.allclose(rope.turn(rope.turn_back(keys, angle), angle), keys, atol=1e-5)


def test_the_wheel_is_the_same_on_every_machine() -> None:
    # no entry lies so near the middle between two float32 that a library's last bit could decide
    for step in range(rope.WHEEL):
        for f in (math.cos, math.sin):
            exact = f(2 * math.pi * step / rope.WHEEL)
            near = {
                float(torch.tensor(exact * (1 + shift), dtype=torch.float32))
                for shift in (-1e-14, 1e-14)
            }
            assert len(near) == 1 or abs(exact) < 1e-12, step


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(codec: Stepped, dtype: str, bad: float) -> None:
    source = sample(dtype, (2, 4, 8))
    source[1, 2, 3] = bad
    for tensor in ("k", "v"):
        with pytest.raises(CodecError, match=codec.name):
            encode(codec, source, tensor)
        with pytest.raises(CodecError):
            codec.error_bound(source, tensor)


@every
def test_the_largest_half_precision_values_are_kept_finite(codec: Stepped) -> None:
    source = torch.tensor([-65504.0, 65504.0, 0.0, 1.0], dtype=torch.float16).view(1, 1, 4)
    for tokens in (1, 5):
        for tensor in ("k", "v"):
            many = source.repeat(1, tokens, 1)
            many[:, 0, 1] -= 32
            assert bool(there_and_back(codec, many, tensor).isfinite().all())


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_at_the_end_of_the_range_are_refused(codec: Stepped, dtype: str) -> None:
    top = torch.finfo(getattr(torch, dtype)).max
    source = torch.tensor([-top, top], dtype=getattr(torch, dtype)).view(1, 1, 2)
    with pytest.raises(CodecError, match="huge"):
        encode(codec, source, "v")


@every
def test_states_of_other_ranks_are_rows(codec: Stepped) -> None:
    for shape in ((7,), (3, 7), (2, 3, 4, 7)):
        source = sample("float32", shape, 10)
        for tensor in ("k", "state"):
            miss = (there_and_back(codec, source, tensor).double() - source.double()).abs()
            assert bool((miss <= codec.error_bound(source, tensor)).all())


@every
def test_damaged_heads_are_refused_and_other_damage_stays_in_bounds(codec: Stepped) -> None:
    source = spinning().bfloat16()
    data = encode(codec, source, "k")
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        wrong = bytearray(data)
        wrong[:4] = bytes(torch.tensor([bad]).view(torch.uint8).numpy())
        with pytest.raises(CodecError, match="no step"):
            decode(codec, wrong, "k", source)
    wrong = bytearray(data)
    wrong[4 + 32] = 0xFF  # high byte of the first frequency
    with pytest.raises(CodecError, match="frequency"):
        decode(codec, wrong, "k", source)
    for at in range(100, len(data), 371):
        wrong = bytearray(data)
        wrong[at] ^= 0x55
        decode(codec, wrong, "k", source)  # checksums are the frame's: here it only must not fail


def test_only_floats_are_supported() -> None:
    for dtype in ("float64", "int8", "float8_e4m3fn"):
        spec = TensorSpec("k", dtype, (2, 8))
        assert not Ecq4().supports(Layer(0, (spec,)), spec)
