"""What kernels in device memory have to do; run on a GPU, or in Triton's interpreter on a CPU.

As a program (``few`` or ``some``) it runs in the interpreter, which has to be chosen before Triton
is imported; it is slow, so that tensors are small.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TIERKV_FAST"] = "0"  # the twin is torch's

import torch

from tierkv.testing.codecs import same_bits
from tierkv_codecs import accelerated
from tierkv_codecs.fp8 import Fp8
from tierkv_codecs.grouped import Int2, Int3, Int4, Int6
from tierkv_codecs.int8 import Int8
from tierkv_codecs.rot import Rot2, Rot3, Rot4
from tierkv_codecs.triton import coding, settling
from tierkv_codecs.triton.language import jit, tl
from tierkv_codecs.triton.rotated import order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierkv.abc import TensorBytesCodec

__all__ = ["CODECS", "Case", "check_batch", "check_codec", "check_refusals", "tough"]

CODECS: tuple[TensorBytesCodec, ...] = (
    Int8(),
    Fp8(),
    Int6(),
    Int4(),
    Int3(),
    Int2(),
    Rot4(),
    Rot3(),
    Rot2(),
)
DIMS = (1, 63, 80, 96, 112, 256)
DTYPES = ("bfloat16", "float16", "float32")


class Case(NamedTuple):
    """One kind of tensor."""

    shape: tuple[int, ...]
    dtype: str
    tensor: str
    layout: str = "dense"


def tough(case: Case, seed: int = 0) -> torch.Tensor:
    """Numbers with what is hard to round: zeros of both signs, constants, outliers, denormals."""
    source = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, case.dtype)
    found = torch.randn(case.shape, generator=source)
    flat = found.view(-1, case.shape[-1])
    flat[:, -1] += 90.0  # an outlier channel
    rows = len(flat)
    if rows > 4:
        flat[1], flat[2], flat[3] = 0.0, 0.7, -0.0
        flat[4] *= 1e-7 if case.dtype == "float16" else 1e-39
    if rows > 5 and case.dtype != "float16":
        flat[5] *= 1e-22  # squares are denormal
    if rows > 6:
        flat[6] *= 600.0 if case.dtype == "float16" else 2.0**100
    if len(case.shape) == 3:
        found[0, :, 0] = -0.0 if seed % 2 else 3.25
        if case.shape[2] > 2:  # a channel of the smallest numbers there are
            found[0, :, 1] = torch.arange(case.shape[1]) % (3 + 14 * (seed % 2)) * 2.0**-149
    return found.to(dtype)


def lay_out(values: torch.Tensor, layout: str, device: str) -> torch.Tensor:
    """The same numbers in device memory, as a caller's view may have them."""
    there = values.to(device)
    if layout == "dense":
        return there.clone()
    if layout == "NHD":  # pages of a serving engine: tokens, heads, dim
        return there.transpose(0, 1).contiguous().transpose(0, 1)
    room = torch.full([2 * n + 3 for n in there.shape], 5.0, dtype=there.dtype, device=device)
    part = room[tuple(slice(1, 1 + 2 * n, 2) for n in there.shape)]
    part.copy_(there)
    return part


def right(codec: TensorBytesCodec, values: torch.Tensor, case: Case) -> bytearray:
    """What the codec writes in host memory."""
    out = bytearray(codec.encoded_bytes(case.shape, case.dtype, case.tensor))
    codec.encode(values, case.tensor, memoryview(out))
    return out


def check(codec: TensorBytesCodec, case: Case, device: str, sections: int = 1) -> None:
    """Encode and decode a batch, and compare with the codec in host memory, bit for bit."""
    values = [tough(case, seed) for seed in range(sections)]
    sources = [lay_out(v, case.layout, device) for v in values]
    assert all(coding.takes(codec, source) for source in sources), case
    room = coding.room(codec, case.shape, case.dtype, case.tensor, sources[0].device, sections)
    room.fill_(0xAA)
    refused = coding.encode(codec, sources, case.tensor, room)
    assert refused == [False] * sections, (codec, case)
    due = [right(codec, v, case) for v in values]
    for number, wanted in enumerate(due):
        found = bytes(room[number, : len(wanted)].cpu().numpy())
        assert found == bytes(wanted), f"{codec.name} {case}: other bytes in section {number}"
        assert bool((room[number, len(wanted) :] == 0xAA).all()), "it writes beyond its end"
    targets = [lay_out(torch.ones_like(v), case.layout, device) for v in values]
    coding.decode(codec, room, [memoryview(d) for d in due], case.tensor, targets)
    for target, wanted in zip(targets, due, strict=True):
        back = torch.empty(case.shape, dtype=target.dtype)
        codec.decode(memoryview(wanted), case.tensor, back)
        assert same_bits(target.cpu(), back), f"{codec.name} {case}: other numbers"


def cases(how: str) -> Iterator[Case]:
    """Shapes, dtypes and layouts: few, some, or all, for kernels that are fast once compiled."""
    yield Case((1, 66, 16), "float32", "k")
    yield Case((2, 7, 1), "bfloat16", "v")
    yield Case((1, 3, 300), "bfloat16", "v")
    yield Case((1, 10, 112), "float16", "v", "strided")
    if how == "few":
        return
    yield Case((9, 40), "float16", "k")
    yield Case((70,), "bfloat16", "v")
    for number, dim in enumerate(DIMS):
        layout = ("dense", "NHD", "strided")[number // 2 % 3]
        yield Case((2, 7, dim), DTYPES[number % 3], "kv"[number % 2], layout)
    if how == "some":
        return
    for tensor, layout in product("kv", ("dense", "NHD")):
        yield Case((8, 64, 128), "bfloat16", tensor, layout)
    yield Case((2, 65, 129), "bfloat16", "k", "strided")
    yield Case((1, 33, 320), "float32", "v")
    yield Case((1, 65, 576), "bfloat16", "v")
    yield Case((1, 700, 64), "float16", "k")


def check_codec(codec: TensorBytesCodec, device: str, how: str = "all") -> None:
    """Every kind of tensor: the bytes and numbers of the codec in host memory."""
    for case in cases(how):
        if coding.takes(codec, torch.empty(case.shape)):
            check(codec, case, device)


def check_batch(codec: TensorBytesCodec, device: str) -> None:
    """Many sections, wherever they are."""
    for tensor in "kv":
        check(codec, Case((2, 6, 32), "bfloat16", tensor, "NHD"), device, sections=3)


def check_refusals(codec: TensorBytesCodec, device: str) -> None:
    """NaN, infinities and numbers too large are refused, section by section; nothing else is."""
    for dtype, worst in (("bfloat16", 2.0**127), ("float16", float("inf")), ("float32", 2.0**127)):
        for tensor in "kv":
            case = Case((1, 6, 20), dtype, tensor)
            sources = [tough(case, seed).to(device) for seed in range(4)]
            sources[0][0, 5, 19] = float("nan")
            sources[2][0, 0, 0] = -worst
            room = coding.room(codec, case.shape, dtype, tensor, sources[0].device, 4)
            refused = coding.encode(codec, sources, tensor, room)
            assert refused == [True, False, True, False], (codec.name, case)
            for number in (1, 3):
                wanted = bytes(right(codec, sources[number].cpu(), case))
                assert bytes(room[number, : len(wanted)].cpu().numpy()) == wanted


def check_order() -> None:
    """Sums of halves add the same pairs as the torch path does, for any length."""
    for dim in range(1, 150):
        lanes = order(dim)
        sums: list[object] = [n if n < dim else None for n in lanes]
        assert sorted(n for n in lanes if n < dim) == list(range(dim))
        while len(sums) > 1:
            half = len(sums) // 2
            pairs = zip(sums[:half], sums[half:], strict=True)
            sums = [a if b is None else (a, b) for a, b in pairs]
        right_: list[object] = list(range(dim))
        while len(right_) > 1:
            left = (len(right_) + 1) // 2
            upper = [*right_[left:], None][: left + 1]
            upper += [None] * (left - len(upper))
            right_ = [
                a if b is None else (a, b) for a, b in zip(right_[:left], upper, strict=False)
            ]
        assert sums == right_, dim


def _flushing(value: tl.tensor, by: tl.tensor) -> tl.tensor:
    """Division as older Tritons compile it: denormal numbers are 0."""
    tiny = 1.1754943508222875e-38
    found = tl.math.div_rn(tl.where(tl.abs(value) < tiny, 0.0, value), by)
    return tl.where(tl.abs(found) < tiny, 0.0, found)


def check_denormals() -> None:
    """Steps are the same where a division gives no denormal numbers."""
    named = vars(settling)
    plain = named["quotient"]
    named["quotient"] = jit(_flushing)
    try:
        for codec in (Int8(), Int4(), Fp8()):
            check(codec, Case((1, 20, 16), "float32", "k"), "cpu", sections=2)
    finally:
        named["quotient"] = plain


def check_sample(codec: TensorBytesCodec) -> None:
    """The sample that decides whether kernels are used says that they are right."""
    for tensor in "kv":
        assert accelerated._tried(coding, codec, torch.empty(0, dtype=torch.bfloat16), tensor)


def check_benchmark() -> None:
    """The benchmark's rows that have to be 0 are."""
    from benchmarks.gpu_codecs import CODECS as MEASURED
    from benchmarks.gpu_codecs import Batch, seen

    found = list(seen("cpu", repeats=2, batch=Batch("cpu", 2, (2, 7, 16))))
    assert [row.value for row in found if row.exact] == [0] * (2 * len(MEASURED))
    assert all(row.value > 0 for row in found if not row.exact)


def runs(how: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """What to run in the interpreter, where a row of steps takes a sixth of a second."""
    yield "order", check_order
    yield "denormals", check_denormals
    if how == "some":
        yield "benchmark", check_benchmark
    for codec in CODECS:
        cheap = codec.name in ("int8", "fp8")
        if cheap or how == "some" or codec.name in ("int4", "int3", "rot4", "rot3"):
            much = "some" if cheap else how
            yield codec.name, partial(check_codec, codec, "cpu", much)
        if cheap or how == "some":
            yield f"{codec.name}, sample", partial(check_sample, codec)
        if cheap or how == "some" or codec.name == "int4":
            yield f"{codec.name}, a batch", partial(check_batch, codec, "cpu")
        if cheap or how == "some" or codec.name == "rot4":
            yield f"{codec.name}, refusals", partial(check_refusals, codec, "cpu")


def main(how: str) -> int:
    """Run in the interpreter; 1 if something is wrong."""
    warnings.simplefilter("ignore")  # numpy's, about what a GPU does silently
    failed = 0
    for name, run in runs(how):
        try:
            run()
        except Exception:  # noqa: BLE001 - told, all of them
            failed += 1
            print(f"--- {name}", file=sys.stderr)
            traceback.print_exc(limit=-2)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
