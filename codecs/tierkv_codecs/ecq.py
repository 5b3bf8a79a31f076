"""``ecq4``, ``ecq3``, ``ecq2``: even steps of no fixed number of bits, for an entropy coder behind.

Method: entropy-coded scalar quantisation (Gish and Pierce, 1968). A number becomes the nearest
multiple of a step, and common multiples get short codes: at equal bits its error is a third below
that of the best code of fixed length for a normal number (Lloyd and Max: ``rot4``), and no range
has to be stored. The codes here are bytes, of ``ecq2`` half bytes; it is the bytes codec behind
that makes about 4, 3 and 2 bits of them, so that these codecs are used as ``ecq4+rans``.

- ``v`` and all but ``k``: the step of a row (one token of one head) is a share of the row's root
  mean square. Of the tokens that everything attends to, the values are small; steps by channel, or
  one for all, ruin those and with them the model.
- ``k``: pairs of channels are turned back against their rotary embedding (:mod:`.rope`), then each
  channel of at most 64 tokens is coded as differences from its mean, a multiple of the step. The
  step of a channel is the common one of the tensor times a weak power of the channel's own spread:
  between equal errors, which an entropy coder wants, and equal bits, which one table of codes does.

Encoding: the base of the steps (float32); of ``k``, the frequencies of the pairs (low bytes, then
high ones), and the means (a signed low byte, then a signed high one, of all channels; then as many
more bytes as a number of the tensor has); the exponents of the steps, a byte each; the codes. A
channel of ``k`` that is constant has the exponent -128 and, for its mean, the bytes of its value:
it comes back exactly. Constant rows do not; zeros do.

Which frequency is found, and where a step falls between two exponents, may differ between machines;
what bytes decode to does not. With the extra ``fast``, bfloat16 goes through machine code
(:mod:`tierkv_codecs.step_loops`), else through torch (:mod:`tierkv_codecs.step_floats`,
:mod:`tierkv_codecs.step_reading`), to the same bits. Passes over memory are then: encoding ``k``,
four over the source and products of a few groups of tokens with 46 waves, of others three; decoding
one. In torch, eight and five encoding, and two, of ``k`` six, decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from tierkv.abc import TensorBytesCodec
from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over
from tierkv_codecs import rope, step_loops, step_reading
from tierkv_codecs.affine import FLOATS, Groups, dtype_name, due_bytes
from tierkv_codecs.packing import pack, packed_bytes
from tierkv_codecs.step_sizes import NIBBLE, STILL
from tierkv_codecs.stepping import Keys, Rows, keys_of, rows_of

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["Ecq2", "Ecq3", "Ecq4", "Stepped"]

_BASE_BYTES: Final = 4
_KEY, _VALUE = 0.22, 0.34  # steps of four bits, in units of the spread


class Stepped(TensorBytesCodec):
    """What the codecs of this family share."""

    __slots__ = ()

    lossless: ClassVar[bool] = False
    needs_coding: ClassVar[bool] = True
    bits: ClassVar[int]
    top: ClassVar[int] = 127
    """Largest code. If it is 7, two codes make a byte: one symbol of two numbers wastes less, where
    the commonest number deserves less than a whole bit."""

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """bfloat16, float16 and float32."""
        return tensor.dtype in FLOATS and len(tensor.shape) > 0

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Before the bytes codec: codes, and what a channel of ``k``, or a row, has beside."""
        if prod(shape) == 0:
            return 0
        rows = prod(shape[:-1])
        codes = packed_bytes(rows, shape[-1], 4) if self.top == NIBBLE else prod(shape)
        if not _per_channel(shape, tensor):
            return _BASE_BYTES + rows + codes
        channels = Groups.of(shape, "k").number
        return _BASE_BYTES + 2 * rope.pairs(shape[2]) + channels * (1 + _mean_bytes(dtype)) + codes

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Round to the nearest multiple of the step.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        if source.numel() == 0:
            return
        import torch

        shape = tuple(source.shape)
        count = source.numel()
        nibbles = self.top == NIBBLE
        start = len(out) - count  # codes of a byte come last
        room = torch.empty(shape, dtype=torch.int8) if nibbles else over(out[start:], "int8", shape)
        coded = self._coded(source, tensor, room)
        np.frombuffer(out, np.float32, 1)[:] = coded.base
        at = _BASE_BYTES
        if isinstance(coded, Keys):
            frequency = coded.frequency
            both = np.frombuffer(out, np.uint8, 2 * frequency.size, at).reshape(2, -1)
            both[0], both[1] = frequency & 255, frequency >> 8
            at += both.size
            size = _mean_bytes(dtype_name(source))
            planes = np.frombuffer(out, np.uint8, size * coded.mean.size, at)
            _write_means(coded, source, planes.reshape(size, *coded.mean.shape))
            at += planes.size
        np.frombuffer(out, np.int8, coded.exponent.size, at)[:] = coded.exponent.reshape(-1)
        if nibbles:
            at += coded.exponent.size
            pack(room.add_(NIBBLE).view(torch.uint8).view(-1, shape[-1]), 4, out[at:])

    def _coded(self, source: torch.Tensor, tensor: str, room: torch.Tensor) -> Keys | Rows:
        scale = 2.0 ** (4 - self.bits)
        if _per_channel(tuple(source.shape), tensor):
            return keys_of(self.name, source, _KEY * scale, self.top, room)
        rows = room.view(-1, source.shape[-1])
        return rows_of(self.name, source, _VALUE * scale, self.top, rows)

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Multiply by the steps, and turn ``k``; rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        shape, dtype = tuple(into.shape), dtype_name(into)
        due = due_bytes(self, data, shape, dtype, tensor)
        if due == 0:
            return
        base = float(np.frombuffer(data, np.float32, 1)[0])
        if not 0 < base < math.inf:
            raise CodecError(f"{self.name}: {base} is no step")
        if _per_channel(shape, tensor):
            self._decode_keys(data, base, into)
            return
        if step_loops.decode_rows(data[_BASE_BYTES:], base, self.top == NIBBLE, into):
            return
        step_reading.scale_rows(data[_BASE_BYTES:], base, self.top == NIBBLE, into)

    def _decode_keys(self, data: memoryview, base: float, into: torch.Tensor) -> None:
        shape, dtype = tuple(into.shape), dtype_name(into)
        groups = Groups.of(shape, "k")
        half, at = rope.pairs(shape[2]), _BASE_BYTES
        both = np.frombuffer(data, np.uint8, 2 * half, at).astype(np.int64)
        frequency = both[half:] * 256 + both[:half]
        if half and int(frequency.max()) >= rope.WHEEL:
            raise CodecError(f"{self.name}: a frequency is not below {rope.WHEEL}")
        at += 2 * half
        number, extra = groups.number, (_mean_bytes(dtype) - 2) * groups.number
        first, means = at, (data[at:], data[at + number :])
        at += 2 * number + extra
        exponents, codes = data[at:], data[at + number :]
        parts, nibbles = (*means, exponents, codes), self.top == NIBBLE
        if not step_loops.decode_keys(parts, base, frequency, groups, nibbles, into):
            step_reading.turn_keys(parts, base, frequency, groups, nibbles, into)
        if (np.frombuffer(exponents, np.int8, number) == STILL).any():
            planes = over(data[first:], "uint8", (_mean_bytes(dtype), *groups.shape))
            still, values = over(exponents, "int8", groups.shape) == STILL, _values(planes, into)
            for i, target in enumerate(groups.cut(into)):
                place = slice(i, i + 1)
                target.copy_(target.where(~still[:, place], values[:, place]))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Half a step, of both channels of a pair where it turns; and the rounding.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        if source.numel() == 0:
            return torch.zeros((1,) * source.dim(), dtype=torch.float64)
        coded = self._coded(source, tensor, torch.empty(source.shape, dtype=torch.int8))
        kept, work = torch.finfo(source.dtype), torch.finfo(torch.float32)
        size, half = source.double().abs(), torch.from_numpy(coded.step).double() / 2
        if not isinstance(coded, Keys):
            half = half.view(*source.shape[:-1], 1)
        else:
            groups = Groups.of(tuple(source.shape), "k")
            half = half.repeat_interleave(groups.size, 1)[:, : source.shape[1]]
            count = len(coded.frequency)
            if count:
                both = (half[..., :count].square() + half[..., count:].square()).sqrt_()
                turns = torch.from_numpy(coded.frequency != 0).repeat(2)
                half = both.repeat(1, 1, 2).where(turns, half)
                size = (size[..., :count] + size[..., count:]).repeat(1, 1, 2).where(turns, size)
        largest = size + half
        error = half + (16 * work.eps + kept.eps / 2) * largest
        return torch.where(half == 0, 0.0, error + kept.smallest_normal * kept.eps)


def _per_channel(shape: tuple[int, ...], tensor: str) -> bool:
    return tensor == "k" and len(shape) == 3


def _mean_bytes(dtype: str) -> int:
    return max(2, DTYPE_BYTES[dtype])


def _write_means(keys: Keys, source: torch.Tensor, planes: Any) -> None:
    """Means, or values of constant channels, to uint8 ``[bytes, heads, places, dim]``."""
    import torch

    mean = keys.mean.astype(np.int16)
    low = mean.astype(np.int8)  # wraps; so that the high byte of all small means is zero
    planes[0] = low.view(np.uint8)
    np.right_shift(mean - low, 8, out=planes[1].view(np.int8), casting="unsafe")
    planes[2:] = 0
    still = keys.exponent == STILL
    if still.any():
        groups = Groups.of(tuple(source.shape), "k")
        first = torch.cat([piece[:, :1] for piece in groups.cut(source)], 1)
        size = source.dtype.itemsize
        bits = first.flatten().view(torch.uint8).view(*first.shape, size).movedim(-1, 0).numpy()
        planes[:size][:, still] = bits[:, still]


def _values(planes: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Values of constant channels (others: anything), ``[heads, places, dim]``."""
    bits = planes[: into.dtype.itemsize].movedim(0, -1).flatten()
    return bits.view(into.dtype).view(planes.shape[1:])


@dataclass(frozen=True, slots=True)
class Ecq4(Stepped):
    """About four bits behind an entropy coder."""

    name: ClassVar[str] = "ecq4"
    bits: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class Ecq3(Stepped):
    """About three bits behind an entropy coder."""

    name: ClassVar[str] = "ecq3"
    bits: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Ecq2(Stepped):
    """A little over two bits behind an entropy coder; four and a little without one."""

    name: ClassVar[str] = "ecq2"
    bits: ClassVar[int] = 2
    top: ClassVar[int] = NIBBLE
