"""``int6 int4 int3 int2 fp8 rot4 rot3 rot2``: bounds, sizes, groups, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tierkv.errors import CodecError
from tierkv.layout import Layer, TensorSpec
from tierkv.testing.codecs import sample
from tierkv_codecs.affine import GROUP, Groups
from tierkv_codecs.fp8 import Fp8
from tierkv_codecs.grouped import Grouped, Int2, Int3, Int4, Int6
from tierkv_codecs.packing import FIELDS, pack, packed_bytes, unpack
from tierkv_codecs.rot import Rot2, Rot3, Rot4

if TYPE_CHECKING:
    from tierkv.abc import TensorBytesCodec

AFFINE: tuple[Grouped, ...] = (Int6(), Int4(), Int3(), Int2())
ROTATED: tuple[Grouped, ...] = (Rot4(), Rot3(), Rot2())
CODECS: tuple[TensorBytesCodec, ...] = (*AFFINE, *ROTATED, Fp8())
DTYPES = ("bfloat16", "float16", "float32")

affine = pytest.mark.parametrize("codec", AFFINE, ids=lambda c: c.name)
rotated = pytest.mark.parametrize("codec", ROTATED, ids=lambda c: c.name)
every = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)


def encode(codec: TensorBytesCodec, source: torch.Tensor, tensor: str) -> bytearray:
    dtype = str(source.dtype).removeprefix("torch.")
    out = bytearray(codec.encoded_bytes(tuple(source.shape), dtype, tensor))
    codec.encode(source, tensor, memoryview(out))
    return out


def there_and_back(codec: TensorBytesCodec, source: torch.Tensor, tensor: str) -> torch.Tensor:
    into = torch.empty(source.shape, dtype=source.dtype)
    codec.decode(memoryview(encode(codec, source, tensor)), tensor, into)
    return into


def bits_a_number(codec: TensorBytesCodec, shape: tuple[int, ...], tensor: str) -> float:
    numbers = shape[0] * shape[1] * shape[2]
    return codec.encoded_bytes(shape, "bfloat16", tensor) * 8 / numbers


@hypothesis.given(
    st.sampled_from(CODECS),
    st.sampled_from(DTYPES),
    st.sampled_from(["k", "v", "latent"]),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 70),
    st.floats(-30, 30),
    st.integers(0, 99),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_bound_holds_at_every_shape_and_magnitude(
    codec: TensorBytesCodec,
    dtype: str,
    tensor: str,
    heads: int,
    tokens: int,
    dim: int,
    exponent: float,
    seed: int,
) -> None:
    source = (sample("float64", (heads, tokens, dim), seed) * 10.0**exponent).to(
        getattr(torch, dtype)
    )
    try:
        found = there_and_back(codec, source, tensor)
    except CodecError:
        limit = 65504.0 if dtype == "float16" else 2.0**120
        assert not bool((source.abs() <= limit).all()), "refused what it could encode"
        return
    bound = codec.error_bound(source, tensor).double()
    assert bool(((found.double() - source.double()).abs() <= bound).all())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("dim", [1, 63, 80, 96, 112, 256])
@pytest.mark.parametrize("tensor", ["k", "v"])
@affine
def test_f023_error_is_half_a_step_for_every_head_dim(
    codec: Grouped, dim: int, tensor: str
) -> None:
    # far from zero, so that padding zeros inside a range would show; a step is rounded up by at
    # most the ratio of its row, here below 3 %
    source = sample("float32", (3, 32, dim), dim) + 1000
    groups = Groups.of((3, 32, dim), tensor)
    for piece, found in zip(
        groups.cut(source), groups.cut(there_and_back(codec, source, tensor)), strict=True
    ):
        span = piece.amax(groups.axis, keepdim=True) - piece.amin(groups.axis, keepdim=True)
        half = span.double() / ((1 << codec.bits) - 1) / 2
        assert bool(((found - piece).double().abs() <= 1.1 * half + 1000 * 2.0**-22).all())


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-7, 60000.0])
def test_f024_constant_tensors_are_exact(codec: TensorBytesCodec, dtype: str, value: float) -> None:
    source = torch.full((2, 8, 16), value, dtype=getattr(torch, dtype))
    for tensor in ("k", "v"):
        if tensor == "v" and codec in ROTATED and value:
            continue  # rotated like any other row
        assert torch.equal(there_and_back(codec, source, tensor), source), tensor


@every
def test_f024_one_constant_channel_is_exact_beside_others(codec: TensorBytesCodec) -> None:
    source = sample("float16", (2, 16, 8), 3)
    source[:, :, 5] = 0.1
    found = there_and_back(codec, source, "k")
    assert torch.equal(found[:, :, 5], source[:, :, 5])
    assert bool(found.isfinite().all())


@every
def test_f025_an_outlier_key_channel_hardly_costs_the_others(codec: TensorBytesCodec) -> None:
    plain = sample("float32", (2, 64, 64), 4)
    source = plain.clone()
    source[:, :, 7] *= 100
    others = [c for c in range(64) if c != 7]
    error = (there_and_back(codec, source, "k") - source)[..., others].norm()
    alone = (there_and_back(codec, plain, "k") - plain)[..., others].norm()
    assert float(error) <= 1.05 * float(alone)


@affine
def test_f025_an_outlier_token_hardly_costs_other_values(codec: Grouped) -> None:
    plain = sample("float32", (2, 64, 64), 6)
    source = plain.clone()
    source[:, 9] *= 100
    others = [t for t in range(64) if t != 9]
    error = (there_and_back(codec, source, "v") - source)[:, others].norm()
    alone = (there_and_back(codec, plain, "v") - plain)[:, others].norm()
    assert float(error) <= 1.05 * float(alone)


@rotated
def test_f025_outlier_values_are_spread_by_the_rotation(codec: Grouped) -> None:
    source = sample("float32", (2, 64, 64), 7)
    source[:, :, ::16] *= 10
    twin = {2: Int2(), 3: Int3(), 4: Int4()}[codec.bits]
    error = (there_and_back(codec, source, "v") - source).norm()
    assert float(error) < float((there_and_back(twin, source, "v") - source).norm())


@pytest.mark.parametrize(("codec", "share"), [(Rot4(), 0.0105), (Rot3(), 0.037), (Rot2(), 0.125)])
def test_rotated_error_is_that_of_lloyd_and_max(codec: Grouped, share: float) -> None:
    # Max 1960: 0.0095, 0.0345, 0.1175 of the variance of a normal number; 64 to a row
    source = sample("float32", (4, 256, 64), 8)
    error = (there_and_back(codec, source, "v") - source).square().mean() / source.square().mean()
    assert float(error) < share


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(codec: TensorBytesCodec, dtype: str, bad: float) -> None:
    source = sample(dtype, (2, 4, 8))
    source[1, 2, 3] = bad
    for tensor in ("k", "v"):
        with pytest.raises(CodecError, match=codec.name):
            there_and_back(codec, source, tensor)
        with pytest.raises(CodecError):
            codec.error_bound(source, tensor)


@every
def test_the_largest_half_precision_values_are_kept_finite(codec: TensorBytesCodec) -> None:
    source = torch.tensor([-65504.0, 65504.0, 0.0, 1.0], dtype=torch.float16).view(1, 1, 4)
    for tensor in ("k", "v"):
        try:
            found = there_and_back(codec, source, tensor)
        except CodecError:
            pytest.fail("65504 is a finite value")
        assert bool(found.isfinite().all())


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_at_the_end_of_the_range_are_refused(codec: TensorBytesCodec, dtype: str) -> None:
    top = torch.finfo(getattr(torch, dtype)).max
    source = torch.tensor([-top, top], dtype=getattr(torch, dtype)).view(1, 1, 2)
    with pytest.raises(CodecError, match="huge"):
        there_and_back(codec, source, "v")


@pytest.mark.parametrize(
    ("codec", "k", "v"),
    [
        (Int6(), 6.375, 6.375),
        (Int4(), 4.375, 4.375),
        (Int3(), 3.375, 3.375),
        (Int2(), 2.375, 2.375),
        (Fp8(), 8.25, 8.25),
        (Rot4(), 4.75, 4.125),
        (Rot3(), 3.375, 3.125),
        (Rot2(), 2.75, 2.125),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_bits_a_number_count_everything(codec: TensorBytesCodec, k: float, v: float) -> None:
    head = 0 if codec == Fp8() else 64 / (8 * 64 * 64)  # the row of steps: 8 bytes a tensor
    assert bits_a_number(codec, (8, 64, 64), "k") == k + head
    assert bits_a_number(codec, (8, 64, 64), "v") == v + head


@every
def test_states_of_other_ranks_are_encoded_by_row(codec: TensorBytesCodec) -> None:
    for shape in ((7,), (3, 7), (2, 3, 4, 7)):
        source = sample("float32", shape, 10)
        error = (there_and_back(codec, source, "k").double() - source.double()).abs()
        assert bool((error <= codec.error_bound(source, "k")).all())


@every
def test_only_floats_of_two_and_four_bytes_are_supported(codec: TensorBytesCodec) -> None:
    for dtype in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "int8", "bool"):
        spec = TensorSpec("k", dtype, (2, 8))
        assert codec.supports(Layer(0, (spec,)), spec) is (dtype in DTYPES)


@pytest.mark.parametrize("codec", [*AFFINE, *ROTATED], ids=lambda c: c.name)
@pytest.mark.parametrize(
    "numbers", [(0.0, 1.5), (-1.0, 1.5), (1.0, 3.0), (float("nan"), 1.5), (1.0, 1.5)]
)
def test_a_row_of_steps_that_is_none_is_refused(
    codec: TensorBytesCodec, numbers: tuple[float, float]
) -> None:
    source = sample("bfloat16", (2, 8, 16))
    data = encode(codec, source, "v")
    data[:8] = bytes(torch.tensor(numbers, dtype=torch.float32).view(torch.uint8).numpy())
    with pytest.raises(CodecError, match="no scale"):
        codec.decode(memoryview(data), "v", torch.empty_like(source))


def test_groups_are_as_equal_as_they_can_be() -> None:
    assert Groups.of((2, 9, 80), "v").size == 40
    assert Groups.of((2, 9, 96), "v").size == 48
    assert Groups.of((2, 100, 96), "k").size == 50
    for length in range(1, 300):
        groups = Groups.of((1, 1, length), "v")
        sizes = [piece.shape[-1] for piece in groups.cut(torch.empty(1, 1, length))]
        assert sum(sizes) == length
        assert len(sizes) == groups.places
        assert max(sizes) <= GROUP


@hypothesis.given(st.sampled_from(sorted(FIELDS)), st.integers(1, 20), st.integers(1, 9))
@hypothesis.settings(deadline=None)
def test_codes_are_packed_without_loss(bits: int, rows: int, dim: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, dim), dtype=torch.uint8)
    out = bytearray(b"\xff" * packed_bytes(rows, dim, bits))
    pack(codes, bits, memoryview(out))
    found = torch.full_like(codes, 0xFF)
    unpack(memoryview(out), bits, found)
    assert torch.equal(found, codes)
    if rows % 8 == 0:
        assert len(out) == rows * dim * bits // 8
