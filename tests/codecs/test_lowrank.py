"""``lowrank``: the shipped suite, where it wins, where it does not."""

from __future__ import annotations

import pytest
import torch

from tierkv.abc import TensorBytesCodec  # noqa: TC001 - read by helpers at run time
from tierkv.errors import CodecError
from tierkv.testing.codecs import TensorBytesCodecTests, same_bits, sample
from tierkv_codecs.grouped import Int2
from tierkv_codecs.lowrank import LowRank

SHAPE = (8, 64, 128)


class TestLowRank(TensorBytesCodecTests):
    def make(self) -> LowRank:
        return LowRank()


def smooth_latents(seed: int = 0) -> torch.Tensor:
    """Six slow movements over the tokens, mixed into every channel, and one per cent of noise."""
    source = torch.Generator().manual_seed(seed)
    heads, tokens, dim = SHAPE
    time = torch.arange(tokens) / tokens
    phase = torch.rand((heads, 1, 6), generator=source)
    moves = torch.sin(2 * torch.pi * (time[None, :, None] * torch.arange(1, 7) / 2 + phase))
    mixed = moves @ torch.randn((heads, 6, dim), generator=source)
    return (mixed + 0.01 * torch.randn(SHAPE, generator=source)).bfloat16()


def coded(codec: TensorBytesCodec, source: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What comes back, and bits a number."""
    dtype = str(source.dtype).removeprefix("torch.")
    data = bytearray(codec.encoded_bytes(tuple(source.shape), dtype, "k"))
    codec.encode(source, "k", memoryview(data))
    into = torch.empty_like(source)
    codec.decode(memoryview(data), "k", into)
    return into, len(data) * 8 / source.numel()


def error(found: torch.Tensor, source: torch.Tensor) -> float:
    return float((found.double() - source.double()).norm() / source.double().norm())


def test_it_beats_int2_on_smooth_latents_in_size_and_error() -> None:
    source = smooth_latents()
    low, bits = coded(LowRank(), source)
    two, more = coded(Int2(), source)
    assert bits < more
    assert error(low, source) < error(two, source) / 3


def test_noise_has_no_low_rank_and_int2_is_better_there() -> None:
    source = sample("bfloat16", SHAPE, 3)
    assert error(coded(LowRank(), source)[0], source) > error(coded(Int2(), source)[0], source)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rank_one_comes_back_to_the_precision_of_eight_bits(dtype: str) -> None:
    left, right = sample("float32", (2, 24, 1), 1), sample("float32", (2, 1, 40), 2)
    source = (left @ right).to(getattr(torch, dtype))
    assert error(coded(LowRank(), source)[0], source) < 0.01


def test_f025_an_outlier_channel_does_not_take_the_ranks_of_the_others() -> None:
    source = smooth_latents(1)
    large = source.clone()
    large[:, :, 7] *= 1000
    rest = [channel for channel in range(SHAPE[2]) if channel != 7]
    alone = error(coded(LowRank(), source)[0][..., rest], source[..., rest])
    beside = error(coded(LowRank(), large)[0][..., rest], large[..., rest])
    assert beside < 1.5 * alone


@pytest.mark.parametrize("tokens", [1, 2, 7, 63])
@pytest.mark.parametrize("dim", [1, 5, 80])
def test_bound_holds_at_every_shape_and_magnitude(tokens: int, dim: int) -> None:
    for scale in (1e-30, 1e-3, 1.0, 1e20):
        source = sample("float32", (2, tokens, dim), tokens + dim) * scale
        found = coded(LowRank(), source)[0].double()
        bound = LowRank().error_bound(source, "k")
        assert bool(((found - source.double()).abs() <= bound).all()), scale
        assert bool(found.isfinite().all())


def test_states_of_other_ranks_are_matrices() -> None:
    for shape in ((7,), (3, 7), (2, 3, 4, 7)):
        source = sample("float32", shape, 10)
        miss = (coded(LowRank(), source)[0].double() - source.double()).abs()
        assert bool((miss <= LowRank().error_bound(source, "k")).all())


def test_constant_channels_and_zeros_are_exact() -> None:
    source = smooth_latents(2)
    source[:, :, 3] = -1.5
    source[1] = 0
    found = coded(LowRank(), source)[0]
    assert same_bits(found[:, :, 3], source[:, :, 3])
    assert torch.equal(found[1], source[1])


def test_damaged_factors_are_noticed_by_their_length() -> None:
    source = smooth_latents()
    data = bytearray(LowRank().encoded_bytes(SHAPE, "bfloat16", "k"))
    with pytest.raises(CodecError, match="lowrank"):
        LowRank().decode(memoryview(data)[:-1], "k", source)
