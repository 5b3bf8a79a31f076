"""Numbers inside kernels: read, rounded and written as the codecs' torch paths do, to the bit.

What makes the bits equal: division and square root are the correctly rounded ones (Triton's ``/``
is not); products and sums are never fused (kernels are launched with ``enable_fp_fusion=False``);
rounding to the nearest code adds and takes away ``2 ** 23``; bfloat16 and e4m3 are rounded in
integers. Up to some release after 3.5, Triton's exact division and square root take denormal
numbers for 0, and give none: callers see to it that this changes nothing. Functions here are
compiled into the kernels that call them.
"""

from __future__ import annotations

from tierkv_codecs.triton.language import jit, tl

__all__ = [
    "beginning",
    "bytes_in",
    "bytes_out",
    "e4m3",
    "from_e4m3",
    "nearest",
    "number",
    "positive_zero",
    "quotient",
    "reciprocal",
    "square_root",
    "take",
]


def _number(bits: tl.tensor, BF16: tl.constexpr) -> tl.tensor:
    """Loaded elements as float32; bfloat16 comes as int16."""
    if BF16:
        bits = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float32)


def _beginning(
    base: tl.tensor, table: tl.tensor, section: tl.tensor, ALIGN: tl.constexpr
) -> tl.tensor:
    """Where a section begins; ``ALIGN`` elements divide what the table says: loads are wider."""
    return base + tl.multiple_of(tl.load(table + section), ALIGN)


def _rounded(value: tl.tensor, BF16: tl.constexpr, F16: tl.constexpr) -> tl.tensor:
    """Rounded once to the tensor's dtype, ties to even; bfloat16 as int16."""
    if BF16:
        bits = value.to(tl.int32, bitcast=True)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif F16:
        found = value.to(tl.float16)
    else:
        found = value
    return found


def _positive_zero(value: tl.tensor) -> tl.tensor:
    """The same number; a zero loses its sign, which minima and maxima take from anywhere."""
    return tl.where(value == 0, 0.0, value)


def _quotient(value: tl.tensor, by: tl.tensor) -> tl.tensor:
    return tl.math.div_rn(value, by)


def _reciprocal(value: tl.tensor) -> tl.tensor:
    """``1 / value``, and 0 for 0; of normal numbers up to ``2 ** 126``."""
    none = value == 0
    one = tl.full(value.shape, 1.0, tl.float32)
    return tl.where(none, 0.0, tl.math.div_rn(one, tl.where(none, one, value)))


def _root(value: tl.tensor) -> tl.tensor:
    """The square root, of denormal numbers as well."""
    small = value < 5.421010862427522e-20  # 2 ** -64
    found = tl.math.sqrt_rn(tl.where(small, value * 1.8446744073709552e19, value))
    return tl.where(small, found * 2.3283064365386963e-10, found)  # 2 ** -32


def _nearest(value: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The nearest integer from 0 to ``top`` (below ``2 ** 22``), ties to even; int32."""
    inside = tl.minimum(tl.maximum(value, 0.0), top)
    return ((inside + 8388608.0) - 8388608.0).to(tl.int32)


def _e4m3(value: tl.tensor) -> tl.tensor:
    """Bits of the nearest e4m3 number of magnitudes up to 448, ties to even; int32."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # below 2 ** -6 numbers are 2 ** -9 apart, as float32 numbers are beside 2 ** 14
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    return tl.where(size < (121 << 23), small, large) | ((bits >> 24) & 0x80)


def _from_e4m3(code: tl.tensor) -> tl.tensor:
    """The number that an e4m3 code (int32, no NaN) stands for."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


def _bytes_out(
    at: tl.tensor,
    value: tl.tensor,
    inside: tl.tensor,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
) -> None:
    """Write numbers of the tensor's dtype, exact already, to addresses of any alignment."""
    if BF16:
        bits = value.to(tl.int32, bitcast=True) >> 16
    elif F16:
        bits = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = value.to(tl.int32, bitcast=True)
    for i in tl.static_range(ITEM):
        tl.store(at + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=inside)


def _bytes_in(
    at: tl.tensor, inside: tl.tensor, ITEM: tl.constexpr, BF16: tl.constexpr, F16: tl.constexpr
) -> tl.tensor:
    """Undo :func:`_bytes_out`: float32."""
    bits = tl.load(at, mask=inside, other=0).to(tl.int32)
    for i in tl.static_range(1, ITEM):
        bits |= tl.load(at + i, mask=inside, other=0).to(tl.int32) << (8 * i)
    if BF16:
        found = (bits << 16).to(tl.float32, bitcast=True)
    elif F16:
        found = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        found = bits.to(tl.float32, bitcast=True)
    return found


beginning = jit(_beginning)
number = jit(_number)
take = jit(_rounded)
positive_zero = jit(_positive_zero)
quotient = jit(_quotient)
reciprocal = jit(_reciprocal)
square_root = jit(_root)
nearest = jit(_nearest)
e4m3 = jit(_e4m3)
from_e4m3 = jit(_from_e4m3)
bytes_out = jit(_bytes_out)
bytes_in = jit(_bytes_in)
