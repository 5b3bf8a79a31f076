"""Machine code and torch give the same bits of ``ecq``, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.codecs.test_ecq import CODECS, decode, encode, spinning
from tierkv import jit
from tierkv.errors import CodecError
from tierkv.testing.codecs import same_bits, sample
from tierkv_codecs import step_code, step_trials
from tierkv_codecs.ecq import Ecq4, Stepped

LOOPS = step_trials.loops
SHAPES = (
    *((1, 1, 1), (2, 7, 16), (1, 65, 96), (3, 33, 63), (2, 130, 40)),
    *((1, 64, 2), (4, 200, 64), (2, 100, 130), (1, 9, 256)),
)
KINDS = ("normal", "spread", "still", "spinning", "tiny", "far")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if jit.host() is None:
        pytest.skip("llvmlite is not installed")


def values(kind: str, shape: tuple[int, int, int]) -> torch.Tensor:
    found = sample("float32", shape, sum(shape))
    if kind == "spread":
        found *= 10.0 ** (4 * sample("float32", (shape[0], 1, shape[2]), 1))
        found *= 10.0 ** (2 * sample("float32", (shape[0], shape[1], 1), 2))
    elif kind == "still":
        found[:, :, ::3] = 1.7
        found[:, ::2] = -0.0
        found[-1, :, -1] = 0.3
    elif kind == "spinning" and shape[2] % 2 == 0:
        found = spinning(tokens=shape[1], dim=shape[2])[: shape[0]].expand(shape)
    elif kind == "tiny":
        found *= 1e-38
    elif kind == "far":
        found += 1e4
    return found.bfloat16().contiguous()


def both_ways(
    codec: Stepped, source: torch.Tensor, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[bytes, torch.Tensor]]:
    """In torch, and in machine code."""
    found = []
    for fast in (False, True):
        monkeypatch.setattr(step_trials, "loops", LOOPS if fast else lambda *key: None)
        data = bytes(encode(codec, source, tensor))
        found.append((data, decode(codec, data, tensor, source)))
    return found


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_machine_code_and_torch_give_the_same_bits(
    codec: Stepped, shape: tuple[int, int, int], tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        plain, fast = both_ways(codec, values(kind, shape), tensor, monkeypatch)
        assert plain[0] == fast[0], kind
        assert same_bits(plain[1], fast[1]), kind


def test_machine_code_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Watched(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            used.append(name)
            return super().__getitem__(name)

    def loops(way: str, dim: int, nibbles: bool) -> Watched:
        found = LOOPS(way, dim, nibbles)
        assert found is not None
        return Watched(found)

    monkeypatch.setattr(step_trials, "loops", loops)
    source = values("spinning", (2, 70, 32))
    for tensor in "kv":
        decode(Ecq4(), encode(Ecq4(), source, tensor), tensor, source)
    assert set(used) == set(step_code._FUNCTIONS)


def test_other_tensors_take_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trials, "loops", lambda *key: pytest.fail("memory it cannot take"))
    plain = values("normal", (2, 8, 16))
    spread = torch.zeros(4, 16, 16, dtype=torch.bfloat16)[::2, ::2]
    spread.copy_(plain)
    for tensor in "kv":
        for source in (plain.half(), plain.float()):
            decode(Ecq4(), encode(Ecq4(), source, tensor), tensor, source)
        Ecq4().decode(memoryview(encode(Ecq4(), spread, tensor)), tensor, spread)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 2.0**121])
def test_machine_code_refuses_what_torch_refuses(bad: float) -> None:
    source = values("normal", (2, 70, 33))
    for at in ((0, 0, 0), (1, 69, 32), (1, 3, 31)):
        wrong = source.clone()
        wrong[at] = bad
        for tensor in "kv":
            with pytest.raises(CodecError, match="ecq4"):
                encode(Ecq4(), wrong, tensor)


def test_nothing_is_written_beside_the_target() -> None:
    for shape in SHAPES:
        source = values("normal", shape)
        for codec in CODECS:
            for tensor in "kv":
                data = encode(codec, source, tensor)
                room = torch.full((source.numel() + 64,), 7.0, dtype=torch.bfloat16)
                codec.decode(memoryview(data), tensor, room[32:-32].view(shape))
                assert bool((room[:32] == 7).all())
                assert bool((room[-32:] == 7).all())
