"""Stacked copies do what the single ones do, in fewer calls."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import torch

from tierkv.abc import Move
from tierkv.device.bits import copy_move
from tierkv.device.stacking import stack


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=lambda pair: pair[0]),
    st.sampled_from([(2, 3), (6,), (1, 6)]),
    st.booleans(),
)
def test_it_does_what_single_copies_do(
    places: list[tuple[int, int]], shape: tuple[int, ...], turned: bool
) -> None:
    source = torch.arange(31 * 6).to(torch.bfloat16)
    one, other = torch.zeros(31 * 6).bfloat16(), torch.zeros(31 * 6).bfloat16()

    def moves(target: torch.Tensor) -> list[Move]:
        pairs = [
            (target[6 * t : 6 * t + 6].view(shape), source[6 * s : 6 * s + 6].view(shape))
            for t, s in places
        ]
        return [Move(a.T, b.T) if turned and len(shape) == 2 else Move(a, b) for a, b in pairs]

    for move in moves(one):
        copy_move(move)
    stacked = stack(moves(other))
    for move in stacked:
        copy_move(move)
    assert torch.equal(one, other)
    assert len(stacked) <= len(places)


def test_blocks_of_a_dense_cache_are_one_copy() -> None:
    cache, scratch = torch.rand(4, 512, 8), torch.zeros(8, 4, 64, 8)
    moves = [Move(scratch[i], cache[:, 64 * i : 64 * i + 64]) for i in range(8)]
    (one,) = stack(moves[::-1])
    assert tuple(one.target.shape) == (8, 4, 64, 8)
    copy_move(one)
    assert torch.equal(scratch.transpose(0, 1).reshape(4, 512, 8), cache)


def test_neighbouring_pages_are_one_copy_and_others_are_not() -> None:
    pool, section = torch.rand(10, 16, 4, 8), torch.zeros(4, 64, 8)  # NHD pages
    for pages, calls in (
        ([3, 4, 5, 6], 1),
        ([3, 4, 7, 8], 2),
        ([7, 5, 3, 1], 4),
        ([2, 2, 2, 2], 1),
    ):
        moves = [
            Move(section[:, 16 * i : 16 * i + 16], pool[page].transpose(0, 1))
            for i, page in enumerate(pages)
        ]
        stacked = stack(moves)
        assert len(stacked) == calls, pages
        for move in stacked:
            copy_move(move)
        assert torch.equal(section, torch.cat([pool[p].transpose(0, 1) for p in pages], 1))


def test_tensors_of_other_storages_stay_apart() -> None:
    targets, source = [torch.zeros(2, 2) for _ in range(3)], torch.rand(3, 2, 2)
    stacked = stack([Move(target, source[i]) for i, target in enumerate(targets)])
    assert len(stacked) == 3
