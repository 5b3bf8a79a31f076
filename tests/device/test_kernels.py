"""The kernel for strided pieces copies what torch copies; who has none does without."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.fake_cuda import FakeCudaDevice
from tierkv.abc import Move
from tierkv.device import kernels
from tierkv.device.bits import copy_move

if TYPE_CHECKING:
    from collections.abc import Sequence

# random pieces, on the CPU: Triton's interpreter runs the kernel itself
SCRIPT = """
import random, torch
from tierkv.abc import Move
from tierkv.device.bits import copy_move
from tierkv.device.kernels import find_piece_kernel

kernel = find_piece_kernel(torch.device("cpu"))
assert kernel is not None
taken = 0
for seed in range(40):
    rng = random.Random(seed)
    pages, tokens, heads, dim = (rng.randint(1, n) for n in (12, 9, 5, 40))
    dtype = rng.choice([torch.int8, torch.bfloat16, torch.float32, torch.int64])
    room = rng.randint(0, 3)
    pool = torch.randint(-9, 9, (pages, tokens + room, heads, dim + room)).to(dtype)
    order = rng.sample(range(pages), pages)
    frames = [torch.zeros(pages, heads, tokens, dim).to(dtype) for _ in range(2)]
    for kind, target in enumerate(frames):
        moves = [
            Move(target[i], pool[page, :tokens, :, :dim].transpose(0, 1))
            for i, page in enumerate(order)
        ]
        left = kernel(moves) if kind else moves
        taken += len(moves) - len(left)
        for move in left:
            copy_move(move)
    assert torch.equal(*frames), seed
    back = torch.zeros_like(pool)  # and scattered back
    moves = [
        Move(back[page, :tokens, :, :dim].transpose(0, 1), frames[1][i])
        for i, page in enumerate(order)
    ]
    for move in kernel(moves):
        copy_move(move)
    right = torch.zeros_like(pool)
    right[:, :tokens, :, :dim] = pool[:, :tokens, :, :dim]
    assert torch.equal(back, right), seed
assert taken > 50, taken
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_it_copies_what_torch_copies() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


def test_without_triton_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "triton", None)
    assert kernels.find_piece_kernel(torch.device("cpu")) is None


def test_one_that_fails_or_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, memory: torch.device) -> None:
            raise RuntimeError("no C compiler")

    class Wrong:
        def __init__(self, memory: torch.device) -> None:
            self._memory = memory

        works = kernels.PieceKernel.works

        def __call__(self, moves: Sequence[Move]) -> list[Move]:
            for move in moves[:-1]:
                copy_move(move)
            return []

    class Right(Wrong):
        def __call__(self, moves: Sequence[Move]) -> list[Move]:
            for move in moves:
                copy_move(move)
            return []

    monkeypatch.setattr(kernels, "triton", object())
    for kind, used in ((Failing, False), (Wrong, False), (Right, True)):
        monkeypatch.setattr(kernels, "PieceKernel", kind)
        found = kernels.find_piece_kernel(torch.device("cpu"))
        assert (found is not None) is used, kind


def test_the_device_gives_it_strided_pieces_and_copies_the_rest() -> None:
    seen: list[int] = []

    def kernel(moves: Sequence[Move]) -> list[Move]:
        seen.append(len(moves))
        copy_move(moves[0])
        return list(moves[1:])

    device = FakeCudaDevice()
    device._copies.kernel = kernel  # type: ignore[assignment]
    pool = device.allocate(6 * 256)
    assert pool is not None
    pool.copy_(torch.arange(6 * 256).byte())
    pages = pool.view(6, 16, 4, 4)
    frame = torch.zeros(6, 4, 16, 4, dtype=torch.uint8)
    moves = [Move(frame[i], pages[i].transpose(0, 1)) for i in range(6)]
    device.copy(moves, device.stores)
    assert torch.equal(frame, pages.transpose(1, 2))
    pool.zero_()
    device.copy([Move(source, target) for target, source in moves], device.loads)
    assert torch.equal(frame, pages.transpose(1, 2))
    assert seen == [6, 6]
