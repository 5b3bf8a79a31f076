"""The entropy coder of byte planes: three ways, one format, no harm from hostile bytes."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierkv.errors import CodecError
from tierkv_codecs import (
    centering,
    kernels,
    rans,
    rans_encoder,
    rans_format,
    rans_ir,
    rans_loops,
    rans_reading,
    rans_tables,
    rans_trials,
)

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = ("vectors", "loops", "plain Python", "numpy")
SIZES = (1, 63, 64, 65, 4096, 9000, 32_767, 32_768, 40_001)
LARGE = 300_000  # two pieces of two streams


def use_vectors(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the vectors' loops be there, or not."""
    for module, name, real in (
        (rans, "encoder", rans_encoder.encoder),
        (rans_reading, "encoder", rans_encoder.encoder),
        (rans_reading, "decoder", rans_trials.decoder),
    ):
        monkeypatch.setattr(module, name, real if wanted else lambda *key: None)


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the ways; skips where it is not there."""
    if way == "vectors" and not rans_ir.able():
        pytest.skip("no processor for it, or no llvmlite")
    if way == "loops" and not kernels.available():
        pytest.skip("numba is not installed")
    finders: dict[str, Callable[..., Any]] = {
        "vectors": kernels.kernel,
        "loops": kernels.kernel,
        "plain Python": lambda name: getattr(rans_loops, name),
        "numpy": lambda *_: None,
    }
    use_vectors(way == "vectors", monkeypatch)
    for module in (rans, rans_reading, rans_tables):
        monkeypatch.setattr(module, "kernel", finders[way])


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


def there() -> list[str]:
    """Ways that this machine has, but for the slowest."""
    found = ["vectors"] if rans_ir.able() else []
    return [*found, *(["loops"] if kernels.available() else []), "numpy"]


def planes(size: int) -> dict[str, Any]:
    """Planes of very different kinds."""
    rng = np.random.default_rng(size)
    return {
        "one value": np.full(size, 200, np.uint8),
        "exponents": np.round(rng.normal(120, 1.6, size)).astype(np.uint8),
        "around 0": np.round(rng.normal(0, 2, size)).astype(np.int8).view(np.uint8),
        "rare ones": np.where(rng.random(size) < 0.003, rng.integers(0, 256, size), 7).astype("u1"),
        "every value": rng.integers(0, 256, size).astype(np.uint8),
        "one after the other": (np.arange(size) // 3 % 256).astype(np.uint8),
    }


def encoded(plane: Any) -> Any:
    return np.concatenate(rans.encode(plane))


def decoded(data: Any, size: int) -> Any:
    out = np.empty(size, np.uint8)
    rans_reading.decode(data, 0, data.size, out)
    return out


def outcome(data: Any, size: int) -> bytes | None:
    """What comes out; None for an error."""
    try:
        return bytes(decoded(data, size))
    except CodecError:
        return None


@pytest.mark.parametrize("size", SIZES)
def test_any_bytes_come_back(size: int, way: str) -> None:
    if way == "plain Python" and size > 9000:
        pytest.skip("takes long")
    for name, plane in planes(size).items():
        assert np.array_equal(decoded(encoded(plane), size), plane), name


@pytest.mark.parametrize("size", [*SIZES, LARGE])
def test_every_way_writes_the_same_and_reads_the_others(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = there()
    for name, plane in planes(size).items():
        if size == LARGE and name not in ("exponents", "rare ones"):
            continue
        found = []
        for way in ways:
            use(way, monkeypatch)
            found.append(encoded(plane))
        assert all(np.array_equal(found[0], other) for other in found[1:]), name
        for way in ways:
            use(way, monkeypatch)
            assert np.array_equal(decoded(found[0], size), plane), (name, way)


@pytest.mark.parametrize("size", [9000, 40_000])
def test_it_takes_hardly_more_than_the_entropy(size: int) -> None:
    plane = planes(size)["exponents"]
    shares = np.bincount(plane) / size
    shares = shares[shares > 0]
    least = -(shares * np.log2(shares)).sum() * size / 8
    streams = rans_format.pieces(size)[0].streams
    # states and a table beside it
    assert encoded(plane).size < 1.01 * least + 128 * streams + 40


def test_f035_hostile_bytes_have_one_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    for size in (700, 33_000):
        good = encoded(planes(size)["rare ones" if size > 700 else "exponents"])
        cases = [rng.integers(0, 256, rng.integers(0, 600)).astype(np.uint8) for _ in range(40)]
        for case in cases[::2]:
            case[:1] = rans_format.FORMAT
        for at in [*range(60), *rng.integers(0, good.size, 60).tolist()]:
            flipped = good.copy()
            flipped[at] ^= 1 << rng.integers(0, 8)
            cases.append(flipped)
        cases += [good[:at] for at in rng.integers(0, good.size, 20).tolist()]
        for _ in range(20):  # lengths that fit, and content that does not
            noise = good.copy()
            noise[-150:] = rng.integers(0, 256, 150)
            cases.append(noise)
        found = []
        for way in there():
            use(way, monkeypatch)
            found.append([outcome(case, size) for case in cases])
        assert all(other == found[0] for other in found[1:])
        assert sum(result is None for result in found[0]) > 0.6 * len(cases)
        assert outcome(good, size) is not None


def test_f035_every_byte_of_a_header_counts(way: str) -> None:
    plane = planes(4096)["exponents"]
    good = encoded(plane)
    header = 1 + 4 + int(good[2]) + 1 + 4 * 2
    # what the symbols are called is nothing that the rest of an encoding could contradict
    names = (1, 3)
    for at in [at for at in range(header) if at not in names]:
        for bit in range(8):
            flipped = good.copy()
            flipped[at] ^= 1 << bit
            assert outcome(flipped, plane.size) is None, way


def test_f036_other_lengths_and_trailing_bytes_are_damage(way: str) -> None:
    plane = planes(4096)["exponents"]
    good = encoded(plane)
    for size in (1, 4095 - 64, 4097, 8192):
        assert outcome(good, size) is None, way
    assert outcome(np.append(good, np.uint8(0)), plane.size) is None
    assert outcome(np.concatenate([good, good[1:]]), plane.size) is None
    for end in (0, 1, 5, 30, 60, good.size - 1):
        assert outcome(good[:end], plane.size) is None


def test_what_stands_behind_is_not_read_as_content(way: str) -> None:
    plane = planes(9000)["rare ones"]
    good = encoded(plane)
    for more in (1, 40, 127, 128, 1000):
        longer = np.concatenate([good, np.full(more, 255, np.uint8)])
        out = np.empty_like(plane)
        rans_reading.decode(longer, 0, good.size, out)
        assert np.array_equal(out, plane), way
        rans_reading.decode(np.append(longer[:3], longer), 3, good.size + 3, out)
        assert np.array_equal(out, plane), way


class Fence:
    """Memory that ends where reading or writing on kills the process."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.room = mmap.mmap(-1, -(-size // page) * page + page)
        whole = np.frombuffer(self.room, np.uint8)
        end = whole.size - page
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_void_p(whole.ctypes.data + end), ctypes.c_size_t(page), 0)
        assert libc.mprotect(*arguments) == 0
        self.bytes = whole[end - size : end]


def test_f035_nothing_is_read_or_written_beyond_the_ends() -> None:
    if not rans_ir.able():
        pytest.skip("no processor for it, or no llvmlite")
    rng = np.random.default_rng(3)
    for size in (64, 4096, 9001, 33_000, 65_536):
        plane, target = Fence(size).bytes, Fence(size).bytes
        plane[:] = planes(size)["rare ones"]
        good = encoded(plane)
        data = Fence(good.size).bytes
        data[:] = good
        rans_reading.decode(data, 0, data.size, target)
        assert np.array_equal(target, plane)
        for _ in range(200):
            data[:] = good
            noise = int(rng.integers(1, good.size - 60))
            data[-noise:] = rng.integers(0, 256, noise)
            data[rng.integers(0, good.size, 4)] ^= np.uint8(1 << rng.integers(0, 8))
            data[0] = rans_format.FORMAT
            try:
                rans_reading.decode(data, 0, data.size, target)
            except CodecError:
                continue


@pytest.mark.parametrize("columns", [0, 2, 24, 63, 64, 65, 96, 576])
@pytest.mark.parametrize("size", [4096, 32_768, 33_024, 300_032])
def test_words_at_once_are_what_parts_give(size: int, columns: int) -> None:
    if not rans_ir.able():
        pytest.skip("no processor for it, or no llvmlite")
    rng = np.random.default_rng(columns)
    plane = planes(size)["rare ones"]
    data = encoded(plane)
    lower = rng.integers(0, 256, size).astype(np.uint8)
    upper, rows = plane, None
    if columns:
        means = rng.integers(0, 256, (-(-size // (64 * columns)), columns)).astype(np.uint8)
        index = np.arange(size)
        upper = plane + means[index // (64 * columns), index % columns]
        base = (means + np.uint8(24)).reshape(-1)  # what centring adds again
        rows = rans_reading.Rows(columns, centering.wrapped(columns, base, 64))
    words = upper.astype(np.uint16) << 8 | lower
    assert rans_reading.at_once(size, columns)
    for found in (np.zeros(size, np.uint16), np.zeros(2 * size + 1, np.uint8)[1:].view(np.uint16)):
        rans_reading.decode_words(data, 0, data.size, lower, found, rows)
        assert np.array_equal(found, words >> 1 | words << 15)
    data[100] ^= 4
    with pytest.raises(CodecError, match="damaged"):
        rans_reading.decode_words(data, 0, data.size, lower, found, rows)


def test_lengths_that_fill_no_block_are_not_merged_at_once() -> None:
    assert not rans_reading.at_once(4097, 0)
    assert not rans_reading.at_once(32_768 + 64, 0)
    assert not rans_reading.at_once(4096, 1)


def test_pieces_cover_a_plane_evenly() -> None:
    for size in (1, 127, 262_144, 262_145, 1_000_000):
        parts = rans_format.pieces(size)
        assert [p.start for p in parts] == np.cumsum([0, *(p.symbols for p in parts)])[:-1].tolist()
        assert sum(p.symbols for p in parts) == size
        assert max(p.symbols for p in parts) - min(p.symbols for p in parts) <= 256
        assert all(p.symbols <= p.steps * p.streams * 64 for p in parts)


def test_shares_are_in_proportion() -> None:
    counts = np.zeros(256, np.int64)
    counts[[3, 100, 101, 200]] = 1000, 600, 399, 1
    shares, escape = rans_tables.shared_out(counts)
    assert escape == 0
    assert shares[[3, 100, 101, 200, 0]].tolist() == [127, 77, 51, 0, 1]
    assert shares.sum() == 256


@pytest.mark.parametrize("kind", ["one", "even", "steep", "long tail", "all but one"])
def test_shares_add_up_by_any_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    counts: Any = {
        "one": np.eye(256, dtype=np.int64)[9] * 1000,
        "even": np.full(256, 7, np.int64),
        "steep": (2.0 ** np.arange(40, -216, -1)).astype(np.int64),
        "long tail": np.where(np.arange(256) == 60, 3000, rng.integers(3, 14, 256)),
        "all but one": np.where(np.arange(256) == 255, 0, 12),
    }[kind]
    found = []
    for way in ("plain Python", *there()):
        use(way, monkeypatch)
        shares, escape = rans_tables.shared_out(counts)
        assert shares.sum() == 256
        assert shares[escape] >= 1
        assert shares.min() >= 0
        assert shares.max() <= 255
        found.append((shares.tolist(), escape, *(t.tolist() for t in rans_tables.spread(shares))))
    assert all(other == found[0] for other in found)
    by_slot, slots = rans_tables.spread(shares)
    assert sorted(slots.tolist()) == list(range(256))
    for symbol in np.flatnonzero(shares):
        mine = np.flatnonzero(by_slot[0] == symbol)
        assert by_slot[2, mine].tolist() == list(range(len(mine))), "ranks rise with slots"
        even = (2 * np.arange(len(mine)) + 1) * 128 / len(mine)
        assert kind != "steep" or np.abs(mine - even).max() <= 8, "spread, not in one place"


@pytest.mark.parametrize("size", [5, 1030, 65_535, 65_536, 70_001, 131_072 + 4095])
def test_counting_is_the_same_by_any_way(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = planes(size)["exponents"]
    found = []
    for way in there():
        use(way, monkeypatch)
        found.append(rans_tables.counted(plane).tolist())
    assert all(other == found[0] for other in found)
    due = {5: 5, 1030: 1030, 65_535: 65_532, 65_536: 8192, 70_001: 17 * 512 + 368}
    assert sum(found[0]) == due.get(size, 33 * 512)
