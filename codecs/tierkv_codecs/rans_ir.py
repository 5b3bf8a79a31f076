"""LLVM IR that the vector loops of :mod:`tierkv_codecs.rans` share.

One step is 64 symbols of one stream. The 32 words of even lanes and the 32 of odd lanes are two
registers of states; their low bytes, woven together, index tables of 256 bytes that stay in
registers (four registers and two two-register permutations a table), and what comes out stands in
the order of the symbols. Bytes that refill states lie one after the other in the order of lanes,
so that one expansion (decoding) or compression (encoding) under a mask deals them out (Giesen,
arXiv 1402.3392, has the arrangement with fewer lanes). Two streams are in flight at once: the
permutations of one fill the time that the other waits for its refill.
"""

from __future__ import annotations

import functools
from typing import Final

from tierkv import jit

__all__ = [
    "COMPRESS64",
    "DECLARED",
    "EXPAND64",
    "PERMUTE",
    "STORE64",
    "able",
    "every",
    "lanes",
    "lookup",
    "table",
    "weave",
]

_NEEDED: Final = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2"})
PERMUTE: Final = "@llvm.x86.avx512.vpermi2var.qi.512"
EXPAND64: Final = "@llvm.x86.avx512.mask.expand.v64i8"
COMPRESS64: Final = "@llvm.x86.avx512.mask.compress.v64i8"
STORE64: Final = "@llvm.masked.store.v64i8.p0"

_BYTES: Final = "<" + ", ".join(["i32 16711935"] * 16) + ">"  # the lower bytes of words

DECLARED: Final = f"""
declare <64 x i8> {PERMUTE}(<64 x i8>, <64 x i8>, <64 x i8>)
declare <64 x i8> {EXPAND64}(<64 x i8>, <64 x i8>, <64 x i1>)
declare <64 x i8> {COMPRESS64}(<64 x i8>, <64 x i8>, <64 x i1>)
declare void {STORE64}(<64 x i8>, ptr, i32, <64 x i1>)
declare <32 x i16> @llvm.fshr.v32i16(<32 x i16>, <32 x i16>, <32 x i16>)
declare <16 x i32> @llvm.x86.avx512.pternlog.d.512(<16 x i32>, <16 x i32>, <16 x i32>, i32)
declare i64 @llvm.ctpop.i64(i64)
"""
"""What the loops call."""


@functools.cache
def able() -> bool:
    """Whether this processor has what the loops are made of, and llvmlite is there."""
    host = jit.host()
    return host is not None and host.features >= _NEEDED


def every(value: int, lanes: int) -> str:
    """A vector of 32 words or 64 bytes of one value."""
    kind = "i16" if lanes == 32 else "i8"
    return "<" + ", ".join([f"{kind} {value}"] * lanes) + ">"


def lanes(first: int) -> str:
    """Every second of 64 lanes."""
    return "<" + ", ".join(f"i32 {lane}" for lane in range(first, 64, 2)) + ">"


def table(name: str, at: int) -> str:
    """A table's four registers, loaded."""
    return "\n".join(
        f"%{name}.at{i} = getelementptr i8, ptr %tables, i64 {at + 64 * i}\n"
        f"%{name}.{i} = load <64 x i8>, ptr %{name}.at{i}, align 1"
        for i in range(4)
    )


def lookup(result: str, table: str, index: str, upper: str) -> str:
    """``table[index]``; ``upper`` is the mask of indices from 128 on."""
    return "\n".join(
        f"{result}.{half} = call <64 x i8> {PERMUTE}(<64 x i8> %{table}.{low}, "
        f"<64 x i8> {index}, <64 x i8> %{table}.{low + 1})"
        for half, low in (("lower", 0), ("upper", 2))
    ) + (
        f"\n{result} = select <64 x i1> {upper}, <64 x i8> {result}.upper, <64 x i8> {result}.lower"
    )


def weave(result: str, low: str, high: str) -> str:
    """The lower bytes of one register's words beside the upper bytes of another's.

    Said as one operation on bits, or LLVM would make a permutation of it, which waits longer.
    """
    return f"""
{result}.low = bitcast <32 x i16> {low} to <16 x i32>
{result}.high = bitcast <32 x i16> {high} to <16 x i32>
{result}.both = call <16 x i32> @llvm.x86.avx512.pternlog.d.512(<16 x i32> {_BYTES},
    <16 x i32> {result}.low, <16 x i32> {result}.high, i32 202)
{result} = bitcast <16 x i32> {result}.both to <64 x i8>"""
