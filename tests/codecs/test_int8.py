"""``int8``: its bound, its groups, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tierkv.errors import CodecError
from tierkv.layout import Layer, TensorSpec
from tierkv.testing.codecs import sample
from tierkv_codecs.int8 import Int8

CODEC = Int8()


def there_and_back(source: torch.Tensor, tensor: str) -> torch.Tensor:
    dtype = str(source.dtype).removeprefix("torch.")
    out = memoryview(bytearray(CODEC.encoded_bytes(tuple(source.shape), dtype, tensor)))
    CODEC.encode(source, tensor, out)
    into = torch.empty(source.shape, dtype=source.dtype)
    CODEC.decode(out, tensor, into)
    return into


def group_range(source: torch.Tensor, tensor: str) -> torch.Tensor:
    axis = 1 if tensor == "k" else -1
    wide = source.double()
    return wide.amax(axis, keepdim=True) - wide.amin(axis, keepdim=True)


@pytest.mark.parametrize("dim", [1, 63, 80, 96, 112, 256])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("offset", [0, 1000, -1000])
def test_f023_error_is_half_a_step_for_every_head_dim(dim: int, tensor: str, offset: float) -> None:
    # float32, so that only the quantisation itself is left; far from zero, so that padding
    # zeros inside a range would show
    source = sample("float32", (3, 32, dim), dim) + offset
    error = (there_and_back(source, tensor).double() - source.double()).abs()
    rounding = source.double().abs().max() * 2.0**-22
    assert bool((error <= group_range(source, tensor) / 255 / 2 + rounding).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_the_bound_is_half_a_step_and_the_rounding_of_the_dtype(dtype: str, tensor: str) -> None:
    source = sample(dtype, (4, 64, 64), 1)
    bound = CODEC.error_bound(source, tensor).double()
    half = group_range(source, tensor) / 255 / 2
    eps = torch.finfo(source.dtype).eps
    assert bool((bound >= half).all())
    assert bool((bound <= half * 1.01 + source.double().abs().amax() * eps).all())


@hypothesis.given(
    st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    st.sampled_from(["k", "v"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(-40, 40),
    st.integers(0, 99),
)
def test_bound_holds_at_every_magnitude(
    dtype: str, tensor: str, heads: int, tokens: int, dim: int, exponent: float, seed: int
) -> None:
    source = (sample("float64", (heads, tokens, dim), seed) * 10.0**exponent).to(
        getattr(torch, dtype)
    )
    try:
        found = there_and_back(source, tensor)
    except CodecError:
        limit = torch.finfo(source.dtype).max / 16
        assert not bool((source.abs() < limit).all()), "refused what it could encode"
        return
    bound = CODEC.error_bound(source, tensor)
    assert bool(((found.double() - source.double()).abs() <= bound).all())
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-7, 60000.0])
def test_f024_constant_tensors_are_exact(dtype: str, value: float) -> None:
    source = torch.full((2, 8, 16), value, dtype=getattr(torch, dtype))
    for tensor in ("k", "v", "latent"):
        assert torch.equal(there_and_back(source, tensor), source)
        assert float(CODEC.error_bound(source, tensor).max()) == 0


def test_f024_one_constant_channel_is_exact_beside_others() -> None:
    source = sample("float16", (2, 16, 8), 3)
    source[:, :, 5] = 0.1
    found = there_and_back(source, "k")
    assert torch.equal(found[:, :, 5], source[:, :, 5])
    assert bool(found.isfinite().all())


def test_f025_an_outlier_key_channel_costs_the_others_nothing() -> None:
    plain = sample("float32", (2, 64, 64), 4)
    source = plain.clone()
    source[:, :, 7] *= 100
    found = there_and_back(source, "k")
    others = [c for c in range(64) if c != 7]
    assert torch.equal(found[..., others], there_and_back(plain, "k")[..., others])
    # attention scores: the error stays within what the channels' bounds allow for this query
    query = sample("float32", (2, 16, 64), 5)
    error = (query @ (found - source).transpose(1, 2)).double().abs()
    allowed = query.double().abs() @ CODEC.error_bound(source, "k").expand(2, 64, 64).transpose(
        1, 2
    )
    assert bool((error <= allowed + 1e-6).all())
    spread = (query @ source.transpose(1, 2)).std()
    assert float(error.max()) < 0.02 * float(spread)


def test_f025_an_outlier_token_costs_other_values_nothing() -> None:
    plain = sample("float32", (2, 64, 64), 6)
    source = plain.clone()
    source[:, 9] *= 100
    others = [t for t in range(64) if t != 9]
    found, reference = there_and_back(source, "v"), there_and_back(plain, "v")
    assert torch.equal(found[:, others], reference[:, others])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_what_is_not_finite_is_refused(dtype: str, bad: float, tensor: str) -> None:
    source = sample(dtype, (2, 4, 8))
    source[1, 2, 3] = bad
    with pytest.raises(CodecError, match="int8"):
        there_and_back(source, tensor)
    with pytest.raises(CodecError):
        CODEC.error_bound(source, tensor)


def test_the_largest_half_precision_values_are_kept_finite() -> None:
    source = torch.tensor([-65504.0, 65504.0, 0.0, 1.0], dtype=torch.float16).view(1, 1, 4)
    found = there_and_back(source, "v")
    assert torch.equal(found[..., :2], source[..., :2])
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_values_at_the_end_of_the_range_are_refused(dtype: str) -> None:
    top = torch.finfo(getattr(torch, dtype)).max
    source = torch.tensor([-top, top], dtype=getattr(torch, dtype)).view(1, 1, 2)
    with pytest.raises(CodecError, match="huge"):
        there_and_back(source, "v")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_subnormal_ranges_do_not_overflow_the_reciprocal(dtype: str) -> None:
    tiny = torch.finfo(getattr(torch, dtype)).smallest_normal
    source = torch.tensor([0.0, tiny / 2, tiny, 3 * tiny], dtype=getattr(torch, dtype))
    found = there_and_back(source.view(1, 1, 4), "v")
    bound = CODEC.error_bound(source.view(1, 1, 4), "v")
    assert bool(((found.double() - source.double()).abs() <= bound).all())


def test_minimum_and_maximum_come_back_exactly() -> None:
    source = sample("bfloat16", (2, 32, 16), 8)
    found = there_and_back(source, "v")
    assert torch.equal(found.amin(-1), source.amin(-1))
    assert torch.equal(found.amax(-1), source.amax(-1))


def test_large_tensors_are_done_in_tiles_with_the_same_result() -> None:
    source = sample("bfloat16", (5, 300, 256), 9)
    for tensor in ("k", "v"):
        whole = there_and_back(source, tensor)
        heads = [there_and_back(source[h : h + 1], tensor) for h in range(5)]
        assert torch.equal(whole, torch.cat(heads))


def test_states_of_other_ranks_are_quantised_by_row() -> None:
    for shape in ((7,), (3, 7), (2, 3, 4, 7)):
        source = sample("float32", shape, 10)
        error = (there_and_back(source, "k").double() - source.double()).abs()
        assert bool((error <= CODEC.error_bound(source, "k")).all())


def test_size_is_near_one_byte_per_element() -> None:
    assert CODEC.encoded_bytes((8, 64, 128), "bfloat16", "k") == 8 * 64 * 128 + 2 * 2 * 8 * 128
    assert CODEC.encoded_bytes((8, 64, 128), "bfloat16", "v") == 8 * 64 * 128 + 2 * 2 * 8 * 64
    assert CODEC.encoded_bytes((8, 0, 128), "bfloat16", "k") == 0


@pytest.mark.parametrize(
    ("dtype", "supported"),
    [
        ("bfloat16", True),
        ("float16", True),
        ("float32", True),
        ("float64", True),
        ("float8_e4m3fn", False),
        ("float8_e5m2", False),
        ("int8", False),
        ("int64", False),
        ("bool", False),
    ],
)
def test_only_floats_of_two_bytes_or_more_are_supported(dtype: str, supported: bool) -> None:
    spec = TensorSpec("k", dtype, (2, 8))
    assert CODEC.supports(Layer(0, (spec,)), spec) is supported


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_memory_kept_from_inference_mode_is_good_outside_it(dtype: str) -> None:
    source = sample(dtype, (2, 16, 8), 12)
    with ThreadPoolExecutor(1) as pool:  # a thread that has kept nothing yet

        def inside() -> torch.Tensor:
            with torch.inference_mode():
                return there_and_back(source, "v").clone()

        first = pool.submit(inside).result()
        assert torch.equal(pool.submit(there_and_back, source, "v").result(), first)
