"""XXH3 with 128 bits, as LLVM IR that other loops over memory call as they go.

The checksum of sections (Yann Collet's XXH3_128bits, default secret, seed 0), for inputs longer
than 240 bytes that are whole stripes of 64: what padded sections are. Its state is eight 64-bit
lanes: one register of AVX-512, two of AVX2, four of SSE2 or NEON, as LLVM splits them.

A block of 1 KiB is sixteen stripes, each mixed with the secret eight bytes further on, and then
the lanes are scrambled. The last block may be shorter; its last stripe takes a place of its own in
the secret, and is never followed by a scramble. So whoever calls needs no position inside a block:
``@xxh3_block`` takes a whole one that is not the last, ``@xxh3_last`` the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BLOCK", "LEAST", "STRIPE", "TEXT", "block", "loop"]

STRIPE: Final = 64
BLOCK: Final = 16 * STRIPE
"""Bytes between two scrambles."""
LEAST: Final = 256
"""Shorter inputs are summed in other ways, which are not here."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_START: Final = (
    _PRIME32[2],
    *_PRIME64[:4],
    _PRIME32[1],
    _PRIME64[4],
    _PRIME32[0],
)
_LAST_STRIPE: Final = 192 - 64 - 7
_SCRAMBLE: Final = 192 - 64
_MERGES: Final = (11, 192 - 64 - 11)
_LANES: Final = "<8 x i64>"


def _all(number: int) -> str:
    """A vector of eight equal lanes."""
    return "<" + ", ".join([f"i64 {number}"] * 8) + ">"


def loop(name: str, low: str, high: str, body: str) -> str:
    """``for name in range(low, high)``; the function has a ``%name.at = alloca i64``."""
    return f"""
  store i64 {low}, ptr %{name}.at
  br label %{name}.head
{name}.head:
  %{name} = load i64, ptr %{name}.at
  %{name}.go = icmp slt i64 %{name}, {high}
  br i1 %{name}.go, label %{name}.body, label %{name}.end
{name}.body:
{body}
  %{name}.next = add i64 %{name}, 1
  store i64 %{name}.next, ptr %{name}.at
  br label %{name}.head
{name}.end:"""


def _stripe(tag: str, data: str, key: str, lanes: str, sums: str) -> str:
    """Mix one stripe: ``%lanes.tag`` has the products added, ``%sums.tag`` the data itself."""
    return f"""
  %data.{tag} = load {_LANES}, ptr {data}, align 1
  %key.{tag} = load {_LANES}, ptr {key}, align 1
  %mixed.{tag} = xor {_LANES} %data.{tag}, %key.{tag}
  %low.{tag} = and {_LANES} %mixed.{tag}, {_all(0xFFFFFFFF)}
  %high.{tag} = lshr {_LANES} %mixed.{tag}, {_all(32)}
  %product.{tag} = mul {_LANES} %low.{tag}, %high.{tag}
  %lanes.{tag} = add {_LANES} {lanes}, %product.{tag}
  %sums.{tag} = add {_LANES} {sums}, %data.{tag}"""


def _swapped(tag: str, lanes: str, sums: str) -> str:
    """Add to each lane the data of its neighbour: ``%both.tag``."""
    return f"""
  %swapped.{tag} = shufflevector {_LANES} {sums}, {_LANES} poison,
    <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %both.{tag} = add {_LANES} {lanes}, %swapped.{tag}"""


def _secret(at: int) -> str:
    return f"getelementptr (i8, ptr @xxh3_secret, i64 {at})"


def block(name: str, more: str = "", each: Callable[[int], str] | None = None) -> str:
    """``@name(data, state)``: take a whole block that is not the last.

    Args:
        name: The function's name.
        more: Further arguments, each with a comma before it.
        each: What is done beside each of the sixteen stripes.
    """
    text = f"  %lanes.s = load {_LANES}, ptr %state, align 64"
    lanes, sums = "%lanes.s", _all(0)
    for number in range(16):
        text += f"\n  %at.{number} = getelementptr i8, ptr %data, i64 {STRIPE * number}"
        text += _stripe(str(number), f"%at.{number}", _secret(8 * number), lanes, sums)
        text += each(number) if each is not None else ""
        lanes, sums = f"%lanes.{number}", f"%sums.{number}"
    return f"""
define internal void @{name}(ptr %data, ptr %state{more}) noinline {{
{text}
{_swapped("b", lanes, sums)}
  %shifted = lshr {_LANES} %both.b, {_all(47)}
  %folded = xor {_LANES} %both.b, %shifted
  %key.b = load {_LANES}, ptr {_secret(_SCRAMBLE)}, align 1
  %keyed = xor {_LANES} %folded, %key.b
  %scrambled = mul {_LANES} %keyed, {_all(_PRIME32[0])}
  store {_LANES} %scrambled, ptr %state, align 64
  ret void
}}
"""


def _merge(tag: str, secret: int, start: str) -> str:
    """Fold the lanes into one number: ``%hash.tag``."""
    text, total = "", start
    for pair in range(4):
        for half in range(2):
            name = f"{tag}{pair}{half}"
            text += f"""
  %lane.{name} = extractelement {_LANES} %lanes, i32 {2 * pair + half}
  %key.{name} = load i64, ptr {_secret(secret + 16 * pair + 8 * half)}, align 1
  %keyed.{name} = xor i64 %lane.{name}, %key.{name}
  %wide.{name} = zext i64 %keyed.{name} to i128"""
        name = f"{tag}{pair}"
        text += f"""
  %product.{name} = mul i128 %wide.{name}0, %wide.{name}1
  %low.{name} = trunc i128 %product.{name} to i64
  %upper.{name} = lshr i128 %product.{name}, 64
  %high.{name} = trunc i128 %upper.{name} to i64
  %fold.{name} = xor i64 %low.{name}, %high.{name}
  %sum.{name} = add i64 {total}, %fold.{name}"""
        total = f"%sum.{name}"
    return f"""{text}
  %once.{tag} = lshr i64 {total}, 37
  %mixed.{tag} = xor i64 {total}, %once.{tag}
  %spread.{tag} = mul i64 %mixed.{tag}, {0x165667919E3779F9}
  %twice.{tag} = lshr i64 %spread.{tag}, 32
  %hash.{tag} = xor i64 %spread.{tag}, %twice.{tag}"""


def _last() -> str:
    each = f"""
  %skip = mul i64 %n, {STRIPE}
  %at = getelementptr i8, ptr %data, i64 %skip
  %turn = mul i64 %n, 8
  %secret = getelementptr i8, ptr @xxh3_secret, i64 %turn
  %lanes.s = load {_LANES}, ptr %lanes.at
  %sums.s = load {_LANES}, ptr %sums.at
{_stripe("n", "%at", "%secret", "%lanes.s", "%sums.s")}
  store {_LANES} %lanes.n, ptr %lanes.at
  store {_LANES} %sums.n, ptr %sums.at"""
    return f"""
define internal void @xxh3_last(ptr %data, i64 %stripes, i64 %length, ptr %state, ptr %out)
    noinline {{
  %n.at = alloca i64
  %lanes.at = alloca {_LANES}, align 64
  %sums.at = alloca {_LANES}, align 64
  %lanes.i = load {_LANES}, ptr %state, align 64
  store {_LANES} %lanes.i, ptr %lanes.at
  store {_LANES} {_all(0)}, ptr %sums.at
  %before = sub i64 %stripes, 1
{loop("n", "0", "%before", each)}
  %far = mul i64 %before, {STRIPE}
  %end = getelementptr i8, ptr %data, i64 %far
  %lanes.e = load {_LANES}, ptr %lanes.at
  %sums.e = load {_LANES}, ptr %sums.at
{_stripe("e2", "%end", _secret(_LAST_STRIPE), "%lanes.e", "%sums.e")}
{_swapped("e", "%lanes.e2", "%sums.e2")}
  %lanes = bitcast {_LANES} %both.e to {_LANES}
  %length.a = mul i64 %length, {_PRIME64[0]}
  %length.p = mul i64 %length, {_PRIME64[1]}
  %length.b = xor i64 %length.p, -1
{_merge("a", _MERGES[0], "%length.a")}
{_merge("b", _MERGES[1], "%length.b")}
  %big.a = call i64 @llvm.bswap.i64(i64 %hash.a)
  %big.b = call i64 @llvm.bswap.i64(i64 %hash.b)
  %low.out = getelementptr i8, ptr %out, i64 8
  store i64 %big.b, ptr %out, align 8
  store i64 %big.a, ptr %low.out, align 8
  ret void
}}
"""


TEXT: Final = f"""
@xxh3_secret = internal constant [192 x i8] [{", ".join(f"i8 {byte}" for byte in _SECRET)}]
@xxh3_start = internal constant {_LANES} <{", ".join(f"i64 {lane}" for lane in _START)}>, align 64
declare i64 @llvm.bswap.i64(i64)

define internal void @xxh3_begin(ptr %state) {{
  %lanes = load {_LANES}, ptr @xxh3_start, align 64
  store {_LANES} %lanes, ptr %state, align 64
  ret void
}}
{block("xxh3_block")}
{_last()}
"""
"""``@xxh3_begin``, ``@xxh3_block`` and ``@xxh3_last`` for a state of 64 bytes, 64-aligned."""
