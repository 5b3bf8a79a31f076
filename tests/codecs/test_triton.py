"""Codecs in device memory: kernels give the bits of the torch paths, and know when to stand back.

Without a GPU Triton's interpreter runs the kernels on CPU tensors, and its compiler shows what they
become; both only where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.codecs.triton_checks import CODECS, Case, check_batch, check_codec, check_refusals, tough
from tierkv.errors import CodecError
from tierkv_codecs import accelerated
from tierkv_codecs.fp8 import Fp8
from tierkv_codecs.int8 import Int8
from tierkv_codecs.triton import coding

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import TensorBytesCodec

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


# --------------------------------------------------------------------------- kernels


def run(*command: str, **environment: str) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize("how", ["few", pytest.param("some", marks=pytest.mark.stress)])
@pytest.mark.timeout(900)
def test_the_interpreter_gives_the_bits_of_torch(how: str) -> None:
    run("-m", "tests.codecs.triton_checks", how)


@needs_triton
@pytest.mark.parametrize("target", [80, pytest.param(90, marks=pytest.mark.stress)])
@pytest.mark.timeout(600)
def test_compiled_kernels_fuse_and_approximate_nothing(target: int, tmp_path: Path) -> None:
    found = json.loads(
        run("-m", "tests.codecs.triton_ptx", str(target), TRITON_CACHE_DIR=str(tmp_path))
    )
    assert len(found) >= 16
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.name))
class TestOnGpu:
    pytestmark = on_gpu

    def test_every_kind_of_tensor(self, codec: TensorBytesCodec) -> None:
        check_codec(codec, "cuda")

    def test_a_batch(self, codec: TensorBytesCodec) -> None:
        check_batch(codec, "cuda")

    def test_refusals(self, codec: TensorBytesCodec) -> None:
        check_refusals(codec, "cuda")

    def test_the_codec_itself_takes_tensors_of_the_device(self, codec: TensorBytesCodec) -> None:
        for tensor in "kv":
            case = Case((2, 33, 80), "bfloat16", tensor)
            values = tough(case)
            size = codec.encoded_bytes(case.shape, case.dtype, tensor)
            here, there = bytearray(size), bytearray(size)
            codec.encode(values, tensor, memoryview(here))
            codec.encode(values.cuda(), tensor, memoryview(there))
            assert here == there
            back, device = torch.empty_like(values), torch.empty_like(values, device="cuda")
            codec.decode(memoryview(here), tensor, back)
            codec.decode(memoryview(here), tensor, device)
            assert torch.equal(device.cpu(), back)
            assert all(accelerated._verdicts.values()), accelerated._verdicts


# --------------------------------------------------------------------------- who does it


class Elsewhere:
    """A tensor in the memory of a device that is not here."""

    device = torch.device("cuda", 0)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype
        self.crossed = 0

    def numel(self) -> int:
        return self.values.numel()

    def cpu(self) -> torch.Tensor:
        self.crossed += 1
        return self.values

    def copy_(self, values: torch.Tensor) -> None:
        self.crossed += 1
        self.values.copy_(values)


def bytes_of(room: torch.Tensor) -> memoryview:
    rows: Any = room.numpy()
    return memoryview(rows[0])


def inside(tensor: Any) -> torch.Tensor:
    return tensor.values if isinstance(tensor, Elsewhere) else tensor


class Kernels:
    """What :mod:`tierkv_codecs.triton.coding` offers, on a device that is not here."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.used = 0

    def takes(self, codec: TensorBytesCodec, tensor: Any) -> bool:
        del codec, tensor
        return self.wrong != "unknown"

    def room(self, codec: TensorBytesCodec, *rest: Any) -> torch.Tensor:
        shape, dtype, tensor, _ = rest
        if self.wrong == "broken":
            raise RuntimeError("no C compiler")
        if self.wrong == "full" and shape == (2, 9, 16):
            raise torch.cuda.OutOfMemoryError
        return torch.zeros((1, codec.encoded_bytes(shape, dtype, tensor)), dtype=torch.uint8)

    def encode(
        self, codec: TensorBytesCodec, sources: list[Any], tensor: str, out: torch.Tensor
    ) -> list[bool]:
        self.used += 1
        values = inside(sources[0])
        try:
            codec.encode(values, tensor, bytes_of(out))
        except CodecError:
            return [True]
        out[0, -1] += self.wrong == "encoding"
        return [False]

    def decode(
        self,
        codec: TensorBytesCodec,
        data: torch.Tensor,
        heads: list[memoryview],
        tensor: str,
        targets: list[Any],
    ) -> None:
        del heads
        self.used += 1
        values = inside(targets[0])
        codec.decode(bytes_of(data), tensor, values)
        values += self.wrong == "decoding"


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give :mod:`accelerated` other kernels; the sample stays in host memory."""
    monkeypatch.setattr(accelerated, "_verdicts", {})
    to = torch.Tensor.to

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.clone() if args and args[0] == Elsewhere.device else to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", stay)

    def give(kernels: Kernels | None) -> Kernels | None:
        monkeypatch.setattr(accelerated, "_module", lambda: kernels)
        return kernels

    return give


def both_ways(codec: TensorBytesCodec, values: torch.Tensor) -> tuple[bytes, Elsewhere, Elsewhere]:
    out = memoryview(bytearray(codec.encoded_bytes(tuple(values.shape), "bfloat16", "k")))
    source, target = Elsewhere(values), Elsewhere(torch.zeros_like(values))
    assert accelerated.encode(codec, source, "k", out)  # type: ignore[arg-type]
    assert accelerated.decode(codec, out, "k", target)  # type: ignore[arg-type]
    return bytes(out), source, target


@pytest.mark.parametrize("wrong", ["", "broken", "encoding", "decoding", "full", "unknown", "none"])
def test_kernels_are_used_where_they_are_right(
    wrong: str, trust: Any, caplog: pytest.LogCaptureFixture
) -> None:
    codec, values = Int8(), torch.randn(2, 9, 16).bfloat16()
    kernels = trust(None if wrong == "none" else Kernels(wrong))
    due = memoryview(bytearray(codec.encoded_bytes((2, 9, 16), "bfloat16", "k")))
    codec.encode(values, "k", due)
    back = torch.empty_like(values)
    codec.decode(due, "k", back)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found, source, target = both_ways(codec, values)
            assert found == bytes(due)
            assert torch.equal(target.values, back)
            assert source.crossed == target.crossed == int(wrong != ""), "who did it?"
    said = sum("int8" in record.message for record in caplog.records)
    assert said == int(wrong in ("broken", "encoding", "decoding")), "once, not at each call"
    if not wrong:
        assert kernels.used == 2 + 4  # the sample, then two calls each way


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.name))
def test_every_codec_asks(codec: TensorBytesCodec, trust: Any) -> None:
    trust(None)
    for tensor in "kv":
        values = torch.randn(2, 9, 16).bfloat16()
        size = codec.encoded_bytes((2, 9, 16), "bfloat16", tensor)
        here, there = memoryview(bytearray(size)), memoryview(bytearray(size))
        codec.encode(values, tensor, here)
        source: Any = Elsewhere(values)
        codec.encode(source, tensor, there)
        assert here == there
        back, target = torch.zeros_like(values), Elsewhere(torch.zeros_like(values))
        codec.decode(here, tensor, back)
        codec.decode(here, tensor, target)  # type: ignore[arg-type]
        assert torch.equal(target.values, back)
        assert source.crossed == target.crossed == 1


def test_what_kernels_refuse_is_an_error(trust: Any) -> None:
    trust(Kernels())
    values = torch.full((1, 4, 4), float("nan")).bfloat16()
    with pytest.raises(CodecError, match="int8: NaN"):
        both_ways(Int8(), values)


def test_host_memory_and_nothing_are_left_to_the_codec() -> None:
    room = memoryview(bytearray(64))
    nothing = Elsewhere(torch.empty(0, 4, 4))
    for tensor in (torch.zeros(1, 2, 3), nothing):
        assert not accelerated.encode(Int8(), tensor, "k", room)  # type: ignore[arg-type]
        assert not accelerated.decode(Int8(), room, "k", tensor)  # type: ignore[arg-type]


def test_triton_is_loaded_for_nothing_in_host_memory() -> None:
    run(
        "-c",
        "import sys, torch\n"
        "from tierkv_codecs.int8 import Int8\n"
        "from tierkv_codecs.fp8 import Fp8\n"
        "from tierkv_codecs.rot import Rot4\n"
        "for codec in (Int8(), Fp8(), Rot4()):\n"
        "    x = torch.zeros(1, 2, 4)\n"
        "    room = memoryview(bytearray(codec.encoded_bytes((1, 2, 4), 'float32', 'k')))\n"
        "    codec.encode(x, 'k', room)\n"
        "    codec.decode(room, 'k', x)\n"
        "found = [m for m in sys.modules if m.split('.')[0] == 'triton'"
        " or m.startswith('tierkv_codecs.triton')]\n"
        "sys.exit(', '.join(found) or 0)",
    )


@pytest.mark.parametrize("fast", ["0", "1"])
def test_they_can_be_switched_off(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_FAST", fast)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = accelerated._module.__wrapped__()
    assert found is (coding if fast == "1" else None)


def test_what_there_are_kernels_for() -> None:
    from tierkv_codecs.lowrank import LowRank
    from tierkv_codecs.rot import Rot4

    like = torch.zeros(2, 3, 80)
    assert all(coding.takes(codec, like) for codec in CODECS)
    lowrank: Any = LowRank()
    assert not coding.takes(lowrank, like)
    assert not coding.takes(Int8(), like.double())
    assert not coding.takes(Int8(), torch.zeros(2, 2, 2, 2))
    assert not coding.takes(Int8(), torch.zeros(0, 2))
    assert coding.takes(Int8(), torch.zeros(1, 8192))
    assert not coding.takes(Int8(), torch.zeros(1, 8193))
    assert coding.takes(Rot4(), torch.zeros(1, 512))
    assert not coding.takes(Rot4(), torch.zeros(1, 513))


def test_fp8_zeros_have_one_encoding() -> None:
    codec = Fp8()
    for values in (torch.zeros(2, 33, 48), -torch.zeros(2, 33, 48)):
        out = bytearray(codec.encoded_bytes((2, 33, 48), "float32", "k"))
        codec.encode(values, "k", memoryview(out))
        assert not any(out[: 2 * 48 * 4]), "a magnitude below zero"
