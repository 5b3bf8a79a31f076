"""``planes`` with exponents in lanes: what it writes, reads, refuses, and when it leaves them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.codecs.test_rans import use_vectors
from tierkv.errors import CodecError
from tierkv.testing.codecs import sample
from tierkv_codecs import (
    centering,
    kernels,
    planes,
    rans,
    rans_format,
    rans_ir,
    rans_loops,
    rans_reading,
    rans_tables,
    widths,
)
from tierkv_codecs.planes import Planes

GOLDEN = Path(__file__).parents[1] / "data" / "planes_lanes_v1.json"
CODEC = Planes()

DECODE = """
import base64, hashlib, json, sys
from tierkv_codecs.planes import Planes
for row in json.load(open(sys.argv[1])):
    out = bytearray(row["nbytes"])
    Planes().decode(memoryview(base64.b64decode(row["encoded"])), memoryview(out))
    print(hashlib.sha256(out).hexdigest())
"""


def pack(data: Any) -> bytes:
    out = memoryview(bytearray(len(data) + 64))
    nbytes = CODEC.encode(memoryview(data), out)
    assert nbytes is not None
    return bytes(out[:nbytes])


def unpack(data: bytes, size: int) -> bytes:
    out = bytearray(size)
    CODEC.decode(memoryview(data), memoryview(out))
    return bytes(out)


def outcome(data: bytes, size: int) -> bytes | None:
    try:
        return unpack(data, size)
    except CodecError:
        return None


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def kv(dtype: str = "bfloat16", tokens: int = 64, dim: int = 64, seed: int = 0) -> torch.Tensor:
    """Channels of different size, as real keys have."""
    scale = sample("float32", (4, 1, dim), seed + 1).mul(0.7).exp()
    return (sample("float32", (4, tokens, dim), seed) * scale).to(getattr(torch, dtype))


def coded_in_lanes(packed: bytes, size: int) -> list[bool]:
    """Of each part of an encoding."""
    _, _, sizes, at = planes._header(memoryview(packed), size)
    found = []
    for due, length in sizes:
        found.append(length > 0 and packed[at] == rans_format.FORMAT)
        at += length or due
    return found


@pytest.fixture(params=["vectors", "loops", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write lanes, whatever the processor; read them in each of the ways that are there."""
    if request.param == "vectors" and not rans_ir.able():
        pytest.skip("no processor for it, or no llvmlite")
    if request.param == "loops" and not kernels.available():
        pytest.skip("numba is not installed")
    use_vectors(request.param == "vectors", monkeypatch)
    monkeypatch.setattr(rans_reading, "quick", lambda: True)
    monkeypatch.setattr(planes, "_MIN_LANES", 4096)
    if request.param == "numpy":
        for module in (planes, centering, rans, rans_reading, rans_tables):
            monkeypatch.setattr(module, "kernel", lambda *_: None)
    return str(request.param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [32, 40, 64, 80, 96])
def test_f027_floats_come_back_from_lanes(way: str, dtype: str, dim: int) -> None:
    data = raw(kv(dtype, dim=dim))
    packed = pack(data)
    lanes = coded_in_lanes(packed, len(data))
    assert lanes[packed[0] % 64 - 1], way
    assert sum(lanes) == 1, "the most significant plane and no other"
    assert unpack(packed, len(data)) == data
    for tail in (1, 3, 130):
        part = data[:-tail]
        assert unpack(pack(part), len(part)) == part


def test_f027_every_pattern_of_sixteen_bits_in_lanes(way: str) -> None:
    patterns = np.random.default_rng(2).permutation(1 << 16).astype(np.uint16)
    usual = np.frombuffer(raw(kv(tokens=1024)), np.uint16)
    data = bytes(np.concatenate([usual, patterns]))
    packed = pack(data)
    assert coded_in_lanes(packed, len(data))[1], way
    assert unpack(packed, len(data)) == data


def test_bytes_are_coded_in_lanes(way: str) -> None:
    data = raw(sample("float32", (1 << 15,), 3).mul(9).to(torch.int8))
    packed = pack(data)
    assert packed[0] == 1
    assert coded_in_lanes(packed, len(data)) == [True], way
    assert unpack(packed, len(data)) == data


def test_f034_what_either_way_wrote_both_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = raw(kv(seed=5))
    found = []
    for quick in (True, False):
        monkeypatch.setattr(rans_reading, "quick", lambda quick=quick: quick)
        found.append(pack(data))
        assert any(coded_in_lanes(found[-1], len(data))) is quick
    assert unpack(found[0], len(data)) == unpack(found[1], len(data)) == data
    assert len(found[0]) < len(found[1]), "lanes lose less to whole bits than a prefix code"


def test_small_planes_are_left_to_zstd(way: str) -> None:
    data = raw(kv())[:8190]
    assert not any(coded_in_lanes(pack(data), len(data))), way


def test_f035_damage_has_one_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    monkeypatch.setattr(rans_reading, "quick", lambda: True)
    data = raw(kv(seed=9))
    good = pack(data)
    assert good[0] == 2 | 0x40
    cases = [good[:at] for at in rng.integers(0, len(good), 30).tolist()]
    start = 3 + 4 * 3 + len(data) // 2
    for at in [*range(20), *rng.integers(start, len(good), 200).tolist()]:
        case = bytearray(good)
        case[at] ^= 1 << int(rng.integers(0, 8))
        cases.append(bytes(case))
    found = []
    for way in ("vectors", "loops", "numpy"):
        if (way == "vectors" and not rans_ir.able()) or (
            way == "loops" and not kernels.available()
        ):
            continue
        with monkeypatch.context() as patch:
            use_vectors(way == "vectors", patch)
            if way == "numpy":
                for module in (planes, centering, rans, rans_reading, rans_tables):
                    patch.setattr(module, "kernel", lambda *_: None)
            found.append([outcome(case, len(data)) for case in cases])
    assert all(other == found[0] for other in found[1:])
    assert found[0][:30] == [None] * 30


def test_a_part_of_unknown_format_is_refused() -> None:
    data = raw(sample("float32", (1 << 13,), 3).mul(9).to(torch.int8))
    packed = bytearray(pack(data))
    for first in (0, 2, 0x29, 255):
        packed[5] = first
        with pytest.raises(CodecError, match="planes"):
            unpack(bytes(packed), len(data))


def test_columns_of_one_size_are_not_taken_for_words() -> None:
    """A sample that meets the same channels in every row sees order where there is none."""
    tensor = kv(tokens=256, seed=2)
    tensor[:, :, [0, 17, 34, 51]] = 1.0
    for heads in (3, 4):
        data = np.frombuffer(raw(tensor[:heads]), np.uint8)
        assert widths.choose(data)[0] == 2


def test_rows_that_come_again_are_left_to_zstd(way: str) -> None:
    rows = sample("float32", (50, 64), 4).bfloat16()
    index = torch.randint(0, 50, (4, 256), generator=torch.Generator().manual_seed(1))
    data = raw(rows[index])
    assert widths.choose(np.frombuffer(data, np.uint8)) == (8, [True] * 8)
    packed = pack(data)
    assert not any(coded_in_lanes(packed, len(data))), way
    assert len(packed) < 0.6 * len(data)
    assert unpack(packed, len(data)) == data
    alike = raw(sample("float32", (4, 256, 64), 4).bfloat16())
    assert widths.choose(np.frombuffer(alike, np.uint8))[0] == 2


@pytest.mark.skipif(not kernels.available(), reason="numba is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_widths_are_found_the_same_by_loops(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.frombuffer(raw(kv(dtype, tokens=70)), np.uint8)
    words = data.view("<u8")
    found = []
    for find in (kernels.kernel, lambda *_: None, lambda name: getattr(rans_loops, name)):
        monkeypatch.setattr(widths, "kernel", find)
        step = (words.size // 512 - 1) | 1
        found.append(
            (widths.choose(data), widths._plane_bits(words, step), widths.entropy(data[:4096]))
        )
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == data.size // (4 * 70 * 64)


def test_threads_decode_side_by_side() -> None:
    kinds = [kv(seed=seed, dim=dim) for seed, dim in enumerate((64, 80, 96, 128))]
    plain = [raw(tensor) for tensor in kinds]
    packed = [pack(data) for data in plain]

    def often(index: int) -> bool:
        return all(unpack(packed[index], len(plain[index])) == plain[index] for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(often, range(4)))


def golden() -> dict[str, bytes]:
    """What the golden encodings hold, from integers alone."""
    index = np.arange(1 << 16, dtype=np.uint32)
    mixed = index * np.uint32(2654435761)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(factor)
    ones = sum((mixed >> np.uint32(8 + bit)) & 1 for bit in range(8))
    exponents = ones + 110
    words = (exponents << 7 | mixed >> 20 & 127 | (mixed & 2) << 14).astype("<u2")
    rows = (words + ((index % 80 * 37 % 9) << 7).astype("<u2"))[: 80 * 70]
    rare = np.where(mixed % 499 == 0, mixed >> 20, 7 + (mixed % 37 == 0)).astype(np.uint8)
    return {
        "words in rows": rows.tobytes() + b"x",
        "words": words[:5000].tobytes(),
        "bytes in two streams": rare[:40_001].tobytes(),
    }


@pytest.mark.parametrize("fast", ["0", "1"], ids=["numpy", "whatever is installed"])
def test_f034_a_fresh_process_decodes_lanes(fast: str) -> None:
    import hashlib

    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(GOLDEN)],
        env=os.environ | {"PYTHONPATH": path, "TIERKV_FAST": fast},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    due = [hashlib.sha256(data).hexdigest() for data in golden().values()]
    assert done.stdout.split() == due


def test_golden_lanes_are_still_written(way: str) -> None:
    rows = json.loads(GOLDEN.read_text())
    kinds = []
    for row, (name, data) in zip(rows, golden().items(), strict=True):
        stored = base64.b64decode(row["encoded"])
        assert row["name"] == name
        kinds.append((stored[0], coded_in_lanes(stored, len(data)).index(True)))
        # parts that zstd coded may change with its version
        assert coded_in_lanes(pack(data), len(data)) == coded_in_lanes(stored, len(data)), way
        plain, again = (lanes_of(encoded, len(data)) for encoded in (stored, pack(data)))
        assert plain == again
    assert kinds == [(2 | 0x40, 1), (2, 1), (1, 0)]


def lanes_of(packed: bytes, size: int) -> bytes:
    """The part that is coded in lanes."""
    _, _, sizes, at = planes._header(memoryview(packed), size)
    for due, length in sizes:
        if length and packed[at] == rans_format.FORMAT:
            return packed[at : at + length]
        at += length or due
    raise AssertionError("no part is")
