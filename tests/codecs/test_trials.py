"""Machine code of codecs is tried first: what LLVM refuses, or makes wrong, is not used.

Whatever is planted here, a codec writes and reads what it does without any machine code.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.codecs.test_kernels import LOOPS, plain
from tierkv import jit
from tierkv.chains import parse_chain
from tierkv.jit import llvm, trials
from tierkv.testing.codecs import sample
from tierkv_codecs import (
    kernels,
    rans,
    rans_decoder,
    rans_encoder,
    rans_ir,
    rans_reading,
    rans_trials,
    rotation_code,
    rotation_trials,
    samples,
    step_code,
    step_trials,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE = (6, 96, 64)
CHAINS = {
    "loops": ["int8", "int4", "int3", "int6", "fp8", "rot4", "rot2", "planes", "int4+rans"],
    "steps": ["ecq4", "ecq2", "ecq3"],
    "rotations": ["rot4", "rot3", "rot2"],
    "lanes": ["planes", "rans", "int8+rans", "ecq4+rans"],
}
MODULES = (
    *("centering", "compiled", "fp8", "int8", "packing", "planes", "rans", "rans_reading"),
    *("rans_tables", "rotating", "widths"),
)


def put(monkeypatch: pytest.MonkeyPatch) -> dict[str, jit.Tried[Any, *tuple[Any, ...]]]:
    """Machine code that nobody has tried yet, in the place of what this process knows."""
    found: dict[str, jit.Tried[Any, *tuple[Any, ...]]] = {
        "loops": jit.Tried("loops of codecs", kernels._made, kernels._right),
        "steps": jit.Tried("steps", step_code.compiled, step_trials._right),
        "rotations": jit.Tried("rotations", rotation_trials._made, rotation_trials._right),
        "encoders": jit.Tried("lanes", rans_encoder._made, rans_encoder._right),
        "decoders": jit.Tried("lanes", rans_decoder.loop, rans_trials._right),
    }
    for module in MODULES:
        monkeypatch.setattr(f"tierkv_codecs.{module}.kernel", found["loops"])
    monkeypatch.setattr(step_trials, "loops", found["steps"])
    monkeypatch.setattr(rotation_trials, "code", found["rotations"])
    for place in (rans, rans_reading):
        monkeypatch.setattr(place, "encoder", found["encoders"])
    monkeypatch.setattr(rans_reading, "decoder", found["decoders"])
    monkeypatch.setattr(trials, "_refusals", [])
    monkeypatch.setattr(trials, "_wanted", {})
    return found


def used(code: jit.Tried[Any, *tuple[Any, ...]]) -> list[bool]:
    """Of each kind that was asked for, whether there is machine code."""
    return [found is not None for found in code._known.values()]


def there_and_back(chain: str) -> tuple[bytes, bytes]:
    """A section's encoding, and what it decodes to."""
    both = b"", b""
    for tensor in "kv":
        steps = parse_chain(chain)
        source = sample("bfloat16", SHAPE, 3) * sample("bfloat16", (6, 1, 64), 4).exp()
        data = memoryview(source.contiguous().view(torch.uint8).numpy().tobytes())
        into = torch.zeros(SHAPE, dtype=torch.bfloat16)
        bits = memoryview(into.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        packed = memoryview(bytearray(len(data) + 4096))[: len(data)]
        if steps.packer is not None:
            packed = packed[: steps.packed_bytes(SHAPE, "bfloat16", tensor)]
            steps.pack(source, tensor, packed)
            data = packed
        if steps.squeezer is not None:
            room = memoryview(bytearray(len(data) + 4096))
            size = steps.squeezer.encode(data, room)
            assert size is not None
            data, whole = room[:size], memoryview(bytearray(len(data)))
            steps.squeezer.decode(data, bits if steps.packer is None else whole)
            packed = whole
        if steps.packer is not None:
            steps.unpack(packed, tensor, into)
        both = both[0] + bytes(data), both[1] + bytes(bits)
    return both


def plainly(chain: str, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """As :func:`there_and_back`, without any machine code."""
    with monkeypatch.context() as patch:
        for code in put(patch).values():
            patch.setattr(code, "_make", lambda *key: None)
        return there_and_back(chain)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


# --------------------------------------------------------------------------- samples


def test_every_loop_has_a_sample_or_is_called_by_one() -> None:
    known = {name for module in LOOPS for name in module.__all__}
    inner = {name for called in kernels.CALLS.values() for name in called}
    assert set(samples.SAMPLES) <= known
    assert known - set(samples.SAMPLES) <= inner


def variants(name: str) -> list[tuple[int, ...]]:
    return [(2,), (3,), (4,)] if name in ("fit_rows", "nearest_levels") else [()]


class Fake:
    """A loop that is not compiled; ``spoil`` changes what comes out."""

    def __init__(self, name: str, spoil: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        self.name, self.spoil = name, spoil

    def compiled(self, *args: Any) -> Any:
        return self.spoil(self.slowly(*args), args)

    compiled.disable_compile = lambda: None  # type: ignore[attr-defined]

    def slowly(self, *args: Any) -> Any:
        with np.errstate(all="ignore"):
            return plain(self.name)(*args)


def spoiled(found: Any, args: tuple[Any, ...]) -> Any:
    """One bit in the last array that was written to; where none was, the result."""
    written = [a for a in args if isinstance(a, np.ndarray) and a.flags.writeable]
    if written and found is None:
        written[-1].reshape(-1).view(np.uint8)[-1] ^= 1
        return None
    return np.asarray(found) + 1


@pytest.mark.parametrize("name", sorted(samples.SAMPLES))
def test_a_sample_tells_a_loop_that_is_wrong_in_one_bit(name: str) -> None:
    for variant in variants(name):
        right: Any = Fake(name, lambda found, args: found)
        wrong: Any = Fake(name, spoiled)
        assert kernels._right(right, name, *variant)
        assert not kernels._right(wrong, name, *variant)


def test_arguments_that_no_sample_has_are_worked_on_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not kernels.available():
        pytest.skip("numba is not installed")
    loop = kernels._made("merge2")
    assert loop is not None
    assert kernels._right(loop, "merge2")
    low, high = (samples.mixed(2 * 99, seed).astype(np.uint8)[::2] for seed in (1, 2))
    found, due = np.zeros((2, 99), np.uint16)
    for _ in range(2):
        loop(low, high, found)
    loop(low.copy(), high.copy(), due)
    assert np.array_equal(found, due)
    assert len(warned(caplog)) == 1
    assert "merge2" in warned(caplog)[0]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: os.truncate(path, 60),
    "of something else": lambda path: path.write_text("no index"),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "no room"])
@pytest.mark.parametrize("name", ["merge2", "encoding_tables"])  # the latter calls another loop
def test_files_of_numba_that_are_of_no_use_are_done_without(
    damage: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not kernels.available():
        pytest.skip("numba is not installed")
    config = importlib.import_module("numba.core.config")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    for cached in (kernels._called, kernels._tell_of_files):
        cached.cache_clear()
    if damage == "no room":
        caching = importlib.import_module("numba.core.caching")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    else:
        assert jit.Tried("loops", kernels._made, kernels._right).settle(name) is not None
        files = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert files
        for path in files:
            DAMAGE[damage](path)
        kernels._called.cache_clear()
    assert not warned(caplog)
    loops = jit.Tried("loops", kernels._made, kernels._right)
    assert loops.settle(name) is not None
    kernels._called.cache_clear()
    assert len(warned(caplog)) == 1
    assert "NUMBA_CACHE_DIR" in warned(caplog)[0]
    assert str(tmp_path) in warned(caplog)[0]


# --------------------------------------------------------------------------- what LLVM does


@pytest.fixture
def _compiler() -> None:
    if jit.host() is None:
        pytest.skip("llvmlite is not installed")


@pytest.mark.parametrize(
    ("family", "chain"), [(family, chain) for family in CHAINS for chain in CHAINS[family]]
)
def test_what_llvm_refuses_is_told_once_and_library_calls_do_it(
    family: str, chain: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    due = plainly(chain, monkeypatch)
    code = put(monkeypatch)

    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("LLVM ERROR: cannot select")

    # as if there were a compiler for everything, where there is none
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "_jit", refuse)
    monkeypatch.setattr(jit, "functions", refuse)
    monkeypatch.setattr(jit, "function", refuse)
    monkeypatch.setattr(jit, "host", lambda: llvm.Host("any", "any", rans_ir._NEEDED))
    for module in (rans_encoder, rans_decoder):
        monkeypatch.setattr(module, "able", lambda: True)
    monkeypatch.setattr(rotation_trials, "features", lambda: frozenset({"fma"}))
    monkeypatch.setattr(step_code, "_function", step_code._function.__wrapped__)
    monkeypatch.setattr(rotation_trials, "decoder", refuse)
    for _ in range(2):
        assert there_and_back(chain) == due
    names = {"lanes": ("encoders",)}.get(family, (family,))
    verdicts = [verdict for name in names for verdict in used(code[name])]
    assert verdicts
    assert not any(verdicts)
    messages = warned(caplog)
    assert len(messages) == len({refusal.family for refusal in jit.refusals()})
    assert all("cannot select" in message for message in messages)
    assert len(set(jit.refusals())) == len(jit.refusals()), "asked once each"


WRONG = {
    "find_largest": ("icmp ugt", "icmp ult"),
    "weigh_rows": ("fadd", "fsub"),
    "encode_rows": ("fdiv", "fmul"),
    "find_moving": ("fcmp une", "fcmp oeq"),
    "weigh_keys": ("fsub", "fadd"),
    "encode_keys": ("fadd", "fsub"),
    "decode_rows": ("fmul", "fadd"),
    "find_angles": ("mul i64", "add i64"),
    "decode_channels": ("add i32", "sub i32"),
    "decode_keys": ("fsub", "fadd"),
}


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_steps_that_are_compiled_wrong_are_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    due = [plainly(chain, monkeypatch) for chain in CHAINS["steps"]]
    code = put(monkeypatch)["steps"]
    real = step_code._text

    def text(name: str, *how: Any) -> str:
        return real(name, *how).replace(*WRONG[wrong]) if name == wrong else real(name, *how)

    monkeypatch.setattr(step_code, "_text", text)
    monkeypatch.setattr(step_code, "_function", step_code._function.__wrapped__)
    assert [there_and_back(chain) for chain in CHAINS["steps"]] == due
    ways = {key[0] for key, found in code._known.items() if found is None}
    assert ways == {way for way, names in step_code.WAYS.items() if wrong in names}
    assert len(warned(caplog)) == 1


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("chain", CHAINS["rotations"])
def test_rotations_that_are_compiled_wrong_are_not_used(
    chain: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    due = plainly(chain, monkeypatch)
    code = put(monkeypatch)["rotations"]
    real = rotation_code.module
    monkeypatch.setattr(rotation_code, "module", lambda *how: real(*how).replace("fsub", "fadd"))
    monkeypatch.setattr(rotation_trials, "decoder", rotation_code.decoder.__wrapped__)
    assert there_and_back(chain) == due
    assert used(code) == [False]
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_lanes_that_are_compiled_wrong_are_not_used(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not rans_ir.able():
        pytest.skip("no processor for it, or no llvmlite")
    plane = samples.mixed(1 << 15).astype(np.uint8) % 9
    right = np.concatenate(rans.encode(plane))
    code = put(monkeypatch)
    if side == "encoder":
        real = rans_encoder._encode_text
        monkeypatch.setattr(
            rans_encoder,
            "_encode_text",
            lambda *how: real(*how).replace("add <32 x i16>", "sub <32 x i16>"),
        )
    else:
        text = rans_decoder._decode_text
        monkeypatch.setattr(
            rans_decoder,
            "_decode_text",
            lambda *how: text(*how).replace("add <32 x i16>", "sub <32 x i16>"),
        )
    assert not rans_reading.quick(), "nothing is written that only this reads slowly"
    assert np.array_equal(np.concatenate(rans.encode(plane)), right)
    out = np.empty_like(plane)
    rans_reading.decode(right, 0, right.size, out)
    assert np.array_equal(out, plane)
    assert not rans_reading.at_once(1 << 15, 0) or side == "encoder"
    assert used(code[f"{side}s"]).count(True) == 0
    assert len(warned(caplog)) == 1
    for chain in CHAINS["lanes"]:
        there_and_back(chain)


@pytest.mark.parametrize("wrong", ["to_bytes_by_row", "bytes_by_channel", "pack_field", "bounds"])
def test_loops_that_are_compiled_wrong_are_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    due = {chain: plainly(chain, monkeypatch) for chain in CHAINS["loops"]}
    every = put(monkeypatch)
    for code in every.values():
        monkeypatch.setattr(code, "_make", lambda *key: None)
    code = every["loops"]

    def make(name: str, *_: int) -> Any:
        return Fake(name, spoiled) if name == wrong else None

    monkeypatch.setattr(code, "_make", make)
    for chain, found in due.items():
        assert there_and_back(chain) == found
    assert code._known[wrong,] is None
    assert len(warned(caplog)) == 1
    assert wrong in warned(caplog)[0]


@pytest.mark.parametrize("missing", ["rotate_rows", "fit_rows", "nearest_levels"])
def test_rows_are_rotated_by_loops_only_if_every_loop_is_there(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = plainly("rot4", monkeypatch)
    code = put(monkeypatch)["loops"]

    def make(name: str, *_: int) -> Any:
        return None if name == missing else kernels._made(name)

    monkeypatch.setattr(code, "_make", make)
    assert there_and_back("rot4") == due
