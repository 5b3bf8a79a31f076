"""The compiled loops give what torch and numpy give, to the bit; so do they uncompiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierkv.testing.codecs import same_bits, sample
from tierkv_codecs import (
    affine_loops,
    byte_loops,
    fitting_loops,
    kernels,
    loops,
    rans_loops,
    rotation_loops,
    rotation_trials,
)
from tierkv_codecs.fp8 import Fp8
from tierkv_codecs.grouped import Int2, Int3, Int4, Int6
from tierkv_codecs.int8 import Int8
from tierkv_codecs.planes import Planes
from tierkv_codecs.rot import Rot2, Rot3, Rot4

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import TensorBytesCodec

MODULES = ("centering", "compiled", "fp8", "int8", "packing", "planes", "rotating")
LOOPS = (affine_loops, byte_loops, fitting_loops, loops, rans_loops, rotation_loops)
CODECS: tuple[TensorBytesCodec, ...] = (
    Int8(),
    Int6(),
    Int4(),
    Int3(),
    Int2(),
    Fp8(),
    Rot2(),
    Rot3(),
    Rot4(),
)
CODE = rotation_trials.code
SHAPES = ((1, 1, 1), (2, 7, 16), (1, 65, 96), (3, 33, 63))


def use(monkeypatch: pytest.MonkeyPatch, find: Callable[..., Any]) -> list[str]:
    """Make every codec take its loops from ``find``; returns the names that were asked for."""
    asked: list[str] = []

    def kernel(name: str, *variant: int) -> Any:
        asked.append(name)
        return find(name, *variant)

    for module in MODULES:
        monkeypatch.setattr(f"tierkv_codecs.{module}.kernel", kernel)
    compiles = find("split2") is not None
    monkeypatch.setattr(rotation_trials, "code", CODE if compiles else lambda *key: None)
    return asked


def decoded(
    codec: TensorBytesCodec, data: bytearray, like: torch.Tensor, name: str
) -> torch.Tensor:
    into = torch.empty_like(like)
    codec.decode(memoryview(data), name, into)
    return into


def plain(name: str, *_: int) -> Any:
    return next(getattr(module, name) for module in LOOPS if name in module.__all__)


@pytest.fixture(params=["compiled", "plain Python"])
def find(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "plain Python":
        return plain
    if not kernels.available():
        pytest.skip("numba is not installed")
    return kernels.kernel


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_loops_and_torch_give_the_same_bits(
    codec: TensorBytesCodec,
    shape: tuple[int, int, int],
    tensor: str,
    find: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = sample("bfloat16", shape, sum(shape)) * 30 + 1
    if source.numel() > 100:
        source[:, 0] *= 1e-5  # and some in e4m3's subnormals
    use(monkeypatch, lambda *_: None)
    data = bytearray(codec.encoded_bytes(shape, "bfloat16", tensor))
    codec.encode(source, tensor, memoryview(data))
    expected = decoded(codec, data, source, tensor)
    asked = use(monkeypatch, find)
    again = bytearray(len(data))
    codec.encode(source, tensor, memoryview(again))
    assert again == data
    found = decoded(codec, data, source, tensor)
    assert asked, "no loop was used"
    assert torch.equal(found, expected)  # a zero of either sign is zero
    assert same_bits(found + 0, expected + 0)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(2, 203, 128), (3, 64, 192)])
def test_wide_registers_give_the_same_bits(
    codec: TensorBytesCodec, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.available():
        pytest.skip("numba is not installed")
    source = sample("bfloat16", shape, 11) * sample("bfloat16", (shape[0], 1, shape[2]), 12).exp()
    source[0, 5] = -0.0
    source[1, :, 7] *= 1e-38
    for tensor in ("k", "v"):
        found = []
        for find in (lambda *_: None, kernels.kernel):
            use(monkeypatch, find)
            data = bytearray(codec.encoded_bytes(shape, "bfloat16", tensor))
            codec.encode(source, tensor, memoryview(data))
            found.append((data, decoded(codec, data, source, tensor) + 0))
        assert found[0][0] == found[1][0]
        assert same_bits(found[0][1], found[1][1])


def test_planes_split_and_merge_the_same(
    find: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sample("bfloat16", (9000,), 5).view(torch.uint8).numpy().tobytes()
    use(monkeypatch, lambda *_: None)
    plain = memoryview(bytearray(len(data)))
    size = Planes().encode(memoryview(data), plain)
    asked = use(monkeypatch, find)
    fast = memoryview(bytearray(len(data)))
    assert Planes().encode(memoryview(data), fast) == size
    assert fast == plain
    assert size is not None
    found = bytearray(len(data))
    Planes().decode(fast[:size], memoryview(found))
    assert found == data
    assert set(asked) == {"split2", "merge2", "distances"}


def test_strided_targets_and_other_dtypes_take_the_other_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str, *_: int) -> Any:
        return lambda *args: pytest.fail(f"{name} was run on memory it cannot take")

    for codec in CODECS:
        for dtype in ("float16", "bfloat16"):
            source = sample(dtype, (2, 8, 16), 1)
            data = bytearray(codec.encoded_bytes((2, 8, 16), dtype, "v"))
            use(monkeypatch, lambda *_: None)
            codec.encode(source, "v", memoryview(data))
            use(monkeypatch, fail)
            room = torch.empty(2, 16, 8, dtype=source.dtype).transpose(1, 2)
            into = room if dtype == "bfloat16" else torch.empty_like(source)
            codec.decode(memoryview(data), "v", into)
            error = (into.double() - source.double()).abs()
            use(monkeypatch, lambda *_: None)
            assert bool((error <= codec.error_bound(source, "v")).all())


def test_loops_have_one_name_each_and_call_each_other_by_it() -> None:
    assert tuple(module.__name__.split(".")[-1] for module in LOOPS) == kernels._MODULES
    known = [name for module in LOOPS for name in module.__all__]
    assert len(set(known)) == len(known)
    for name, inner in kernels.CALLS.items():
        function = next(getattr(m, name) for m in LOOPS if name in m.__all__)
        called = set(function.__code__.co_names) & set(known)
        assert called == set(inner), name


def test_kernels_can_be_switched_off() -> None:
    code = "from tierkv_codecs import kernels; print(kernels.available(), kernels.kernel('split2'))"
    env = os.environ | {"TIERKV_FAST": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "None"]


def test_available_says_whether_numba_is_there() -> None:
    expected = importlib.util.find_spec("numba") is not None
    assert kernels.available() is (expected and os.environ.get("TIERKV_FAST") != "0")
