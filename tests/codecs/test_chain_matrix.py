"""Every chain of up to three codecs: any values, any memory, and no damage unseen."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.codecs.flipped import Flipped
from tierkv import chains, registry
from tierkv.abc import BytesCodec, TensorBytesCodec
from tierkv.errors import CodecError, TierKVError
from tierkv.pipeline import Pipeline
from tierkv.testing.codecs import same_bits, sample
from tierkv.testing.parts import memory_for, new_frame, one_layer, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = {name: registry.resolve("codecs", name) for name in registry.names("codecs")}
PACKERS = [name for name, kind in SHIPPED.items() if issubclass(kind, TensorBytesCodec)]
SQUEEZERS = [name for name, kind in SHIPPED.items() if issubclass(kind, BytesCodec)]
KINDS = ("normal", "constant", "outliers", "tiny", "zeros", "far", "huge", "nan", "infinite")
FRAME = (2, 3, 8)  # heads, tokens, dim


CHAINS = [
    "+".join(filter(None, parts))
    for parts in itertools.product(("", "flipped"), ("", *PACKERS), ("", *SQUEEZERS))
    if any(parts)
]


@pytest.fixture(autouse=True)
def _third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = registry.resolve

    def resolve(kind: Any, name: str) -> Any:
        return Flipped if name == "flipped" else real(kind, name)

    monkeypatch.setattr(chains, "resolve", resolve)
    chains.stored_chain.cache_clear()
    yield
    chains.stored_chain.cache_clear()


def values(kind: str, shape: tuple[int, int, int], dtype: str, seed: int) -> torch.Tensor:
    source = sample("float32", shape, seed)
    if kind == "constant":
        source[...] = 3.25
    elif kind == "outliers":
        source[:, :, ::5] *= 300
    elif kind == "tiny":
        source *= 1e-6 if dtype == "float16" else 1e-39
    elif kind == "zeros":
        source[...] = 0.0
        source[:, ::2] = -0.0
    elif kind == "far":
        source += 1000
    elif kind == "huge":
        source *= torch.finfo(getattr(torch, dtype)).max / 4
    elif kind in ("nan", "infinite"):
        source.view(-1)[seed % source.numel()] = float("nan" if kind == "nan" else "-inf")
    return source.to(getattr(torch, dtype))


def laid_out(source: torch.Tensor, strides: str) -> torch.Tensor:
    if strides == "permuted":
        return source.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if strides == "spread":
        room = torch.zeros([2 * n for n in source.shape], dtype=source.dtype)
        room[::2, 1::2, ::2] = source
        return room[::2, 1::2, ::2]
    return source


def there_and_back(
    chain: chains.Chain, source: torch.Tensor, tensor: str, into: torch.Tensor
) -> None:
    dtype = str(source.dtype).removeprefix("torch.")
    packed = memoryview(bytearray(chain.packed_bytes(tuple(source.shape), dtype, tensor)))
    chain.pack(source, tensor, packed)
    if chain.squeezer is not None:
        out = memoryview(bytearray(2 * len(packed) + 1024))
        nbytes = chain.squeezer.encode(packed, out)
        assert nbytes is not None
        back = memoryview(bytearray(b"\xa5" * len(packed)))
        chain.squeezer.decode(out[:nbytes], back)
        assert back == packed
        packed = back
    chain.unpack(packed, tensor, into)


@pytest.mark.parametrize("text", CHAINS)
@hypothesis.given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    tensor=st.sampled_from(["k", "v", "latent"]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 70)),
    strides=st.sampled_from(["contiguous", "permuted", "spread"]),
    target=st.sampled_from(["contiguous", "permuted", "spread"]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 999),
)
@hypothesis.settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_any_values_come_back_within_the_bound_or_are_refused(
    text: str,
    dtype: str,
    tensor: str,
    shape: tuple[int, int, int],
    strides: str,
    target: str,
    kind: str,
    seed: int,
) -> None:
    chain = chains.parse_chain(text)
    source = laid_out(values(kind, shape, dtype, seed), strides)
    into = laid_out(torch.zeros(shape, dtype=source.dtype), target)
    try:
        there_and_back(chain, source, tensor, into)
    except CodecError:
        assert not chain.lossless
        assert kind in ("huge", "nan", "infinite"), "refused what it could encode"
        return
    if chain.lossless:
        assert same_bits(into, source)
        return
    assert bool(into.isfinite().all())
    assert chain.packer is not None
    ways = [t.double() for t in (source, into)]
    seen = source
    for codec in chain.tensor_codecs:
        seen = codec.encode(seen, tensor)
        ways = [codec.encode(way, tensor) for way in ways]
    bound = chain.packer.error_bound(seen, tensor).double()
    assert bool(((ways[1] - ways[0]).abs() <= bound).all())


def frame_of(text: str) -> tuple[bytearray, Any]:
    heads, tokens, dim = FRAME
    space = one_layer("bfloat16", heads, dim, block_tokens=tokens)
    frame, _, label = new_frame(Pipeline(space, text), memory_for(space.layout, tokens, 1))
    header = opened(frame, space, label)
    assert header.sections

    def check(data: bytearray) -> bool:
        try:
            opened(memoryview(data), space, label)
        except TierKVError:
            return False
        return True

    return bytearray(frame), check


@pytest.mark.parametrize("text", CHAINS)
def test_a_damaged_byte_is_seen_whichever_chain_stored_it(text: str) -> None:
    data, check = frame_of(text)
    assert check(data)
    places = random.Random(text).sample(range(len(data)), 60)
    for place in places:
        data[place] ^= 1 << place % 8
        assert not check(data), f"byte {place} of {len(data)}"
        data[place] ^= 1 << place % 8
    assert check(data)


@pytest.mark.parametrize("text", ["raw", "int8", "rot4+planes"])
def test_every_single_byte_counts(text: str) -> None:
    data, check = frame_of(text)
    for place in range(len(data)):
        data[place] ^= 0x10
        assert not check(data), f"byte {place} of {len(data)}"
        data[place] ^= 0x10
