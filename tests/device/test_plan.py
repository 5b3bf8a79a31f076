"""Merged and sorted copies put the same bytes in the same places as a naive copier."""

from __future__ import annotations

from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tierkv.abc import Move
from tierkv.device.bits import as_bits, copy_move
from tierkv.device.plan import BULK_BYTES, Plan, bytes_at, plan
from tierkv.errors import LayoutError

BULK = 64  # so that small tensors show every kind


def carry_out(done: Plan) -> None:
    for run in (*done.bulk, *done.small):
        target, source = run.tensors()
        target.copy_(source)
    for move in done.strided:
        copy_move(move)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, tuple[int, int, int], str, str]]:
    """Moves (first element, shape, layout of the target, of the source) that do not overlap."""
    found, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 8))):
        shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 9)))
        kinds = st.sampled_from(["plain", "turned", "sliced"])
        found.append((at, shape, draw(kinds), draw(kinds)))
        at += 2 * shape[0] * shape[1] * shape[2] + draw(st.sampled_from([0, 0, 0, 1, 5]))
    return found


def place(memory: torch.Tensor, at: int, shape: tuple[int, int, int], kind: str) -> torch.Tensor:
    heads, tokens, dim = shape
    room = memory[at : at + 2 * heads * tokens * dim]
    if kind == "turned":  # tokens before heads, as in an NHD page
        return room[: room.numel() // 2].view(tokens, heads, dim).transpose(0, 1)
    if kind == "sliced":  # every head has room for twice the tokens
        return room.view(heads, 2 * tokens, dim)[:, :tokens]
    return room[: room.numel() // 2].view(heads, tokens, dim)


@hypothesis.given(batches(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
def test_it_does_what_a_naive_copier_does(
    batch: list[tuple[int, tuple[int, int, int], str, str]], dtype: torch.dtype
) -> None:
    size = 6000
    bits = as_bits(torch.empty(0, dtype=dtype)).dtype
    source = torch.randint(0, 200, (size,), dtype=torch.int64).to(bits).view(dtype)
    naive, merged = (torch.zeros(size, dtype=bits).view(dtype) for _ in range(2))
    for target in (naive, merged):
        moves = [Move(place(target, a, s, t), place(source, a, s, f)) for a, s, t, f in batch]
        if target is naive:
            for move in moves:
                copy_move(move)
        else:
            done = plan(moves, BULK)
            carry_out(done)
    assert torch.equal(as_bits(naive), as_bits(merged))
    assert all(run.nbytes >= BULK for run in done.bulk)
    assert all(run.nbytes < BULK for run in done.small)
    assert done.nbytes == sum(m.source.numel() * m.source.element_size() for m in moves)
    for one, other in pairwise(sorted([*done.bulk, *done.small])):
        touching = (one.target + one.nbytes, one.source + one.nbytes)
        assert touching != (other.target, other.source), "two neighbours were left apart"


def test_a_whole_frame_is_one_copy() -> None:
    pool, frame = torch.zeros(40, 2, 4096).byte(), torch.zeros(40 * 2 * 4096).byte()
    parts = list(frame.view(80, 4096))
    moves = [Move(t, s) for t, s in zip(pool.view(80, 4096), parts, strict=True)]
    done = plan(moves[::-1])
    assert (len(done.bulk), len(done.small), len(done.strided)) == (1, 0, 0)
    assert done.merged == 79
    assert done.bulk[0].nbytes == done.nbytes == frame.numel()


def test_neighbours_on_one_side_alone_stay_apart() -> None:
    target, source = torch.zeros(200_000).byte(), torch.zeros(200_000).byte()
    size = BULK_BYTES
    gap = [Move(target[i * size : (i + 1) * size], source[i * (size + 1) :][:size]) for i in (0, 1)]
    swapped = [
        Move(target[:size], source[size : 2 * size]),
        Move(target[size:][:size], source[:size]),
    ]
    for moves in (gap, swapped):
        done = plan(moves)
        assert (len(done.bulk), done.merged) == (2, 0)


def test_long_runs_of_a_strided_tensor_are_bulk() -> None:
    cache, frame = torch.zeros(8, 4096, 128).bfloat16(), torch.zeros(8, 128, 128).bfloat16()
    done = plan([Move(frame, cache[:, 256:384])])
    assert [run.nbytes for run in done.bulk] == [32 << 10] * 8
    assert not done.strided
    done = plan([Move(frame[:, :64], cache[:, 256:320])])  # runs of 16 KiB
    assert len(done.strided) == 1
    assert not done.bulk


def test_expanded_sources_and_empty_moves() -> None:
    target, one = torch.zeros(3, 5), torch.tensor([[1.0], [2.0], [3.0]])
    nothing = torch.zeros(0, 5)
    done = plan([Move(target, one.expand(3, 5)), Move(nothing, nothing.clone())])
    carry_out(done)
    assert torch.equal(target, one.expand(3, 5))
    assert len(done.strided) == 1


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 1)),
        (torch.zeros(6), torch.zeros(2, 3)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
    ],
)
def test_moves_that_do_not_fit_are_refused(target: torch.Tensor, source: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match="shapes and element sizes"):
        plan([Move(target, source)])


def test_dtypes_of_one_size_are_copied_bit_for_bit() -> None:
    bits = torch.tensor([0x7FA0, -0x5F, 1], dtype=torch.int16)  # two of them are NaNs as bfloat16
    target = torch.zeros(3, dtype=torch.bfloat16)
    copy_move(Move(target, bits))
    assert torch.equal(target.view(torch.int16), bits)
    with pytest.raises(LayoutError, match="complex128"):
        as_bits(torch.zeros(1, dtype=torch.complex128))


def test_bytes_at_an_address() -> None:
    memory = torch.arange(100).byte()
    found = bytes_at(memory.data_ptr() + 7, 5, memory)
    assert found.tolist() == [7, 8, 9, 10, 11]
    found[0] = 99
    assert memory[7] == 99
