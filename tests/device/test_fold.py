"""The device checksum: the same numbers everywhere and for ever, and what it must notice."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tierkv import views
from tierkv.device import fold, fold_digests, fold_tensors

FOLDING: Any = sys.modules["tierkv.device.fold"]
TILE = FOLDING._TILE * 4  # bytes
SIZES = [0, 64, 128, TILE - 64, TILE, TILE + 64, 3 * TILE + 128]

GOLDEN = {
    0: "00000000000000000000000000000000",
    64: "d33f14d209874407354659b72b086ebe",
    TILE + 64: "9bd7c89cf13eacedd7f683e3d51a8b95",
}


def pattern(size: int) -> bytes:
    return bytes(i * 37 % 251 for i in range(size))


def noise(size: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(size))


def split_mix(seed: int, place: int) -> int:
    full = 2**64 - 1
    z = (seed + (place + 1) * 0x9E3779B97F4A7C15) & full
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
    return (z ^ (z >> 31)) | 1


def slow_fold(data: bytes) -> bytes:
    """The definition, word by word."""
    out = b""
    tile = TILE // 4
    for seed in (0x746965726B760001, 0x746965726B760002):
        total = len(data) * split_mix(seed, 2**48)
        for i in range(len(data) // 4):
            word = int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True)
            weight = split_mix(seed, i % tile) * split_mix(seed, 2**32 + i // tile)
            total += word * weight
        out += (total % 2**64).to_bytes(8, "little")
    return out


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


@pytest.mark.parametrize("size", GOLDEN)
def test_golden_values(size: int) -> None:
    assert fold(memoryview(pattern(size))).hex() == GOLDEN[size]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_the_definition_says(size: int) -> None:
    data = noise(size)
    assert fold(memoryview(data)) == slow_fold(bytes(data))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [0, 64, TILE, 5 * TILE + 192])
def test_the_form_for_accelerators_gives_the_same(
    size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(size * count)
    whole = as_tensor(data).view(count, size)
    expected = [fold(memoryview(data)[i * size : (i + 1) * size]) for i in range(count)]
    assert fold_digests(FOLDING.fold_rows(whole)) == expected
    monkeypatch.setattr(FOLDING, "_ROUND_WORDS", 2 * FOLDING._TILE)  # several rounds
    assert fold_digests(FOLDING.fold_rows(whole)) == expected


def test_neighbours_of_equal_size_go_together() -> None:
    frame = as_tensor(noise(64 * 10))
    parts = [frame[64 * i : 64 * i + 64] for i in range(4)] + [frame[256:384], frame[448:512]]
    parts += [frame[512:576], frame[:64], as_tensor(noise(64))]
    rows = list(FOLDING._rows(parts))
    assert [tuple(r.shape) for r in rows] == [(4, 64), (1, 128), (2, 64), (1, 64), (1, 64)]
    found = torch.cat([FOLDING.fold_rows(r) for r in rows])
    assert torch.equal(found, fold_tensors(parts))


@pytest.mark.parametrize("size", [64, 8192, TILE // 2, TILE, TILE + 64])
def test_a_frame_of_many_sections(size: int) -> None:
    data = noise(size * 11)
    pieces = [memoryview(data)[i * size : (i + 1) * size] for i in range(11)]
    apart = [fold(piece) for piece in pieces]
    together = fold_digests(fold_tensors([views.over(p, "uint8", (size,)) for p in pieces]))
    assert together == apart
    assert len(set(apart)) == 11


def test_one_call_for_many_sections() -> None:
    parts = [as_tensor(noise(size, size)) for size in SIZES]
    found = fold_digests(fold_tensors(parts))
    assert found == [fold(memoryview(bytearray(p.numpy()))) for p in parts]
    assert fold_tensors([]).shape == (0, 2)


def test_memory_of_any_alignment() -> None:
    data = noise(TILE + 64)
    for shift in (1, 2, 3):
        moved = memoryview(bytearray(shift) + data)[shift:]
        assert fold(moved) == fold(memoryview(data))
        assert fold(moved.toreadonly()) == fold(memoryview(data))


@pytest.mark.parametrize("size", [1, 63, 65, 100])
def test_other_lengths_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        fold(memoryview(bytes(size)))


def test_other_tensors_are_refused() -> None:
    for wrong in (torch.zeros(2, 64).byte(), torch.zeros(64), torch.zeros(256).byte()[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            fold_tensors([wrong])


@hypothesis.given(st.integers(0, 2 * TILE // 4 - 1), st.integers(1, 2**32 - 1))
def test_a_change_of_one_word_is_always_seen(word: int, change: int) -> None:
    data = noise(2 * TILE)
    before = fold(memoryview(data))
    words = np.frombuffer(data, "<u4")
    words[word] ^= np.uint32(change)
    after = fold(memoryview(data))
    # in each lane, not only in both together
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


def test_top_bits_swaps_and_lengths_are_seen() -> None:
    data = noise(4 * TILE)
    seen = {fold(memoryview(data))}
    words = np.frombuffer(data, "<u4")
    rng = np.random.default_rng(1)
    for _ in range(200):  # the weakest case: sign bits of several words
        at = rng.choice(len(words), 2, replace=False)
        words[at] ^= np.uint32(1 << 31)
        seen.add(fold(memoryview(data)))
        words[at] = words[at[::-1]]  # and two words that changed places
        seen.add(fold(memoryview(data)))
    tiles = np.frombuffer(data, np.uint8).reshape(4, -1)
    tiles[[0, 3]] = tiles[[3, 0]]  # tiles that changed places
    seen.add(fold(memoryview(data)))
    assert len(seen) == 402
    zeros = {fold(memoryview(bytes(size))) for size in range(0, 64 * 50, 64)}
    assert len(zeros) == 50
    assert fold(memoryview(bytes(64))) != bytes(16)


def test_it_does_not_depend_on_threads_or_inference_mode() -> None:
    data = noise(8 * TILE)
    expected = fold(memoryview(data))
    with torch.inference_mode():
        assert fold(memoryview(data)) == expected
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert fold(memoryview(data)) == expected
    finally:
        torch.set_num_threads(before)
