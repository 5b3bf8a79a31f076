"""Chains: three kinds of codecs in order, third-party ones included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from tests.codecs.flipped import Flipped
from tierkv import chains, registry
from tierkv.abc import TensorBytesCodec, TensorCodec
from tierkv.errors import CodecError, ConfigError, MissingDependencyError
from tierkv.layout import Layout, Space, TensorSpec
from tierkv.pipeline import Pipeline, deliver
from tierkv.testing.codec_mutants import Halved, Plain
from tierkv.testing.codecs import same_bits
from tierkv.testing.parts import memory_for, new_frame, one_layer, opened, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.layout import Layer


@dataclass(frozen=True)
class Shrunk(TensorCodec):
    """float32 as bfloat16; refuses negative numbers."""

    name: ClassVar[str] = "shrunk"
    lossless: ClassVar[bool] = False

    def output(
        self, shape: tuple[int, ...], dtype: str, tensor: str
    ) -> tuple[tuple[int, ...], str]:
        return shape, "bfloat16"

    def encode(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        if bool((source < 0).any()):
            raise CodecError("shrunk: negative")
        return source.to(torch.bfloat16)

    def decode(self, data: torch.Tensor, tensor: str, into: torch.Tensor) -> None:
        into.copy_(data)


@dataclass(frozen=True)
class Missing(TensorBytesCodec):
    """A codec whose library is not installed."""

    name: ClassVar[str] = "missing"


THIRD_PARTY: dict[str, Any] = {
    "flipped": Flipped,
    "halved": Halved,
    "plain": Plain,
    "shrunk": Shrunk,
}


@pytest.fixture(autouse=True)
def _third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = registry.resolve

    def resolve(kind: Any, name: str) -> Any:
        if name == "missing":
            raise MissingDependencyError("pip install missing")
        return THIRD_PARTY[name] if name in THIRD_PARTY else real(kind, name)

    monkeypatch.setattr(chains, "resolve", resolve)
    chains.stored_chain.cache_clear()
    yield
    chains.stored_chain.cache_clear()


@pytest.mark.parametrize(
    ("chain", "lossless"),
    [
        ("flipped", True),
        ("flipped+zstd", True),
        ("flipped+halved", False),
        ("flipped+halved+zstd", False),
        ("flipped+shrunk+plain", False),
        ("shrunk+lz4", False),
        ("halved", False),
    ],
)
def test_all_three_kinds_come_back(chain: str, lossless: bool) -> None:
    space = one_layer("float32")
    pipeline = Pipeline(space, chain)
    assert pipeline.lossless is lossless
    assert pipeline.chain == chain
    source, target = memory_for(space.layout, 16, 1), memory_for(space.layout, 16, None)
    for tensor in ("k", "v"):
        source.pieces(0, tensor, 0, 16)[0][1].abs_()
    frame, encoded, label = new_frame(pipeline, source)
    assert encoded.lossless is lossless
    header = opened(frame, space, label)
    # what only reorders is not worth a stage of its own: it is stored raw
    expected = "raw" if chain == "flipped" else chain.removesuffix("+lz4")
    assert {s.chain for s in header.sections} == {expected}
    deliver(header, frame, target, 0)
    wanted, found = (read(v, space.layout, 0, 0, 16) for v in (source, target))
    for key, value in wanted.items():
        if lossless:
            assert same_bits(found[key], value)
        else:
            assert torch.allclose(found[key], value, rtol=2**-8)


def test_a_tensor_codec_may_refuse() -> None:
    space = one_layer("float32")
    source, target = memory_for(space.layout, 16, 1), memory_for(space.layout, 16, None)
    source.pieces(0, "v", 0, 16)[0][1].abs_()
    frame, encoded, label = new_frame(Pipeline(space, "shrunk"), source)
    header = opened(frame, space, label)
    assert [s.chain for s in header.sections] == ["raw", "shrunk"]
    assert encoded.fallbacks == 1
    deliver(header, frame, target, 0)
    left, right = (read(v, space.layout, 0, 0, 16) for v in (source, target))
    assert same_bits(left[0, "k"], right[0, "k"])


def test_supports_is_asked_about_the_tensor_it_will_see() -> None:
    seen: list[TensorSpec] = []

    class Asking(Halved):
        def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
            seen.append(tensor)
            return False

    THIRD_PARTY["asking"] = Asking
    try:
        space = Space(one_layer("float32").identity, Layout.uniform(1, 2, 32, "float32"), 16)
        pipeline = Pipeline(space, "flipped+shrunk+asking")
        encoded = new_frame(pipeline, memory_for(space.layout, 16, 1))[1]
    finally:
        del THIRD_PARTY["asking"]
    assert encoded.lossless
    assert encoded.fallbacks == 0, "what is never supported is no refusal of values"
    assert {(t.dtype, t.shape) for t in seen} == {("bfloat16", (16, 32))}


@pytest.mark.parametrize(
    "text", ["zstd+flipped", "plain+flipped", "halved+plain", "raw+halved", "zstd+lz4"]
)
def test_the_order_is_fixed(text: str) -> None:
    with pytest.raises(ConfigError, match="out of place"):
        chains.parse_chain(text)


def test_names_that_are_too_long_for_a_header_are_refused() -> None:
    class Long(Flipped):
        name: ClassVar[str] = "f" * 60

    THIRD_PARTY[Long.name] = Long
    try:
        assert chains.parse_chain(Long.name).name == Long.name
        with pytest.raises(ConfigError, match="longer"):
            chains.parse_chain(Long.name + "+zstd")
    finally:
        del THIRD_PARTY[Long.name]


def test_a_codec_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="pip install missing"):
        chains.parse_chain("missing")
    with pytest.raises(CodecError, match="pip install missing"):
        chains.stored_chain("missing")


def test_a_stored_chain_that_failed_is_asked_again() -> None:
    with pytest.raises(CodecError):
        chains.stored_chain("later")
    THIRD_PARTY["later"] = Flipped
    try:
        assert chains.stored_chain("later").lossless
    finally:
        del THIRD_PARTY["later"]


# --------------------------------------------------------------- rules for layers and tensors


@pytest.mark.parametrize(
    ("text", "name", "lossless"),
    [
        ("int8+zstd", "int8+zstd", False),
        ("*:int8", "int8", False),
        ("K:int4/channel,V:int4/token", "k:int4/channel,v:int4/token", False),
        ("K:int8, V:rot4+zstd", "k:int8,v:rot4+zstd", False),
        ("0-3:raw,*:int8", "0-3:raw,int8", False),
        ("7:raw,0-9:V:zstd", "7:raw,0-9:v:zstd", True),
        ("*:latent:planes", "latent:planes", True),
    ],
)
def test_rules_have_a_canonical_text(text: str, name: str, lossless: bool) -> None:
    found = chains.parse_chains(text)
    assert found.name == name
    assert found.lossless is lossless
    assert chains.parse_chains(name) == found


def test_the_first_rule_that_fits_counts_and_the_rest_is_raw() -> None:
    found = chains.parse_chains("0:raw,2-3:K:int4/token,2-9:int8")
    wanted = {
        (0, "k"): "raw",
        (1, "k"): "raw",
        (2, "k"): "int4/token",
        (2, "v"): "int8",
        (9, "k"): "int8",
        (10, "k"): "raw",
    }
    assert {key: found.of(*key).name for key in wanted} == wanted
    plain = chains.parse_chains("int8")
    assert plain.of(5, "v") is plain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("intt8", "did you mean 'int8'"),
        ("int8/tokn", "did you mean 'token'"),
        ("planes/token", "no groupings; write 'planes' without"),
        ("9-3:raw", "did you mean 3-9"),
        ("foo bar:int8", "neither layers nor a tensor; write e.g. '0-3:raw'"),
        ("0:K:V:int8", "cannot read '0:K:V:int8'"),
        ("K:", "cannot read 'K:'"),
        ("K:int8,", "cannot read ''"),
        ("int8,K:int4", "'K:int4' is never reached, 'int8' comes first"),
        ("0-9:int8,3-5:raw", "'3-5:raw' is never reached"),
        ("int8+int8/token", "different names"),
    ],
)
def test_rules_that_cannot_be_read_say_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chains.parse_chains(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "rot3"])
def test_a_grouping_is_that_of_the_other_tensor(name: str) -> None:
    source = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

    def packed(chain: str, tensor: str) -> bytes:
        parsed = chains.parse_chain(chain)
        out = bytearray(parsed.packed_bytes((2, 24, 16), "bfloat16", tensor))
        parsed.pack(source, tensor, memoryview(out))
        into = torch.empty_like(source)
        parsed.unpack(memoryview(out), tensor, into)
        bound = parsed.packer.error_bound(source, tensor) if parsed.packer else torch.zeros(())
        assert bool(((into.double() - source.double()).abs() <= bound).all())
        return bytes(out)

    assert packed(f"{name}/channel", "v") == packed(name, "k")
    assert packed(f"{name}/token", "k") == packed(name, "v")
    assert packed(f"{name}/token", "k") != packed(name, "k")
    assert chains.stored_chain(f"{name}/token").name == f"{name}/token"
