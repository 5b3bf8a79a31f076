"""Encode and decode sections in device memory: many of one kind at once, or one.

A batch is tensors of one shape, dtype and strides, wherever they are on one device; their
encodings are the rows of one array in its memory. A launch works on the whole batch, for a launch
takes longer than the arithmetic of a section (256 KiB).

Passes over device memory: encode reads each source twice (extremes or scale, then codes) and writes
the packed codes, beside a few numbers a group; decode reads the packed codes and writes each target
once. With codes of two fields (6 and 3 bits), encoding reads the source a third time. Rotated rows
are rotated twice, in registers, and never stored.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from tierkv_codecs.affine import ROW_BYTES, Groups, grouped_as
from tierkv_codecs.packing import fields
from tierkv_codecs.triton import groups as kernels
from tierkv_codecs.triton import rotated, settling
from tierkv_codecs.triton.batch import Sections, launch, over_groups, power
from tierkv_codecs.triton.steps import read_rows, round_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import TensorBytesCodec

__all__ = ["PITCH", "decode", "encode", "room", "takes"]

PITCH: Final = 16
"""Encodings of a batch begin at multiples of this many bytes."""

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_GROUPED: Final = ("int2", "int3", "int4", "int6")
_ROTATED: Final = ("rot2", "rot3", "rot4")
_WHOLE: Final = 1 << 62
_LONGEST: Final = 8192  # numbers of a group that one program looks at
_TILE: Final = 2048  # numbers of a program
_MOST: Final = 32_768  # sections of a launch: its second axis takes 65,535 programs
_BYTE: Final = 8


def takes(codec: TensorBytesCodec, tensor: torch.Tensor) -> bool:
    """Whether there are kernels for such a codec and tensor."""
    longest = rotated.LONGEST if codec.name in _ROTATED else _LONGEST
    named = codec.name in ("int8", "fp8", *_GROUPED, *_ROTATED)
    shaped = 1 <= tensor.dim() <= 3 and 0 < tensor.numel() < 1 << 31 and tensor.shape[-1] <= longest
    return named and shaped and tensor.dtype in _DTYPES


def encode(
    codec: TensorBytesCodec, sources: Sequence[torch.Tensor], tensor: str, out: torch.Tensor
) -> list[bool]:
    """Encode tensors that :func:`takes` accepts.

    Runs on torch's current stream. Those with a row of steps are waited for half-way (two numbers
    of each section come to the host and its row goes back), all others at the end.

    Args:
        codec: A codec of this package.
        sources: At least one; of equal shape, dtype and strides, on one device.
        tensor: Name of the tensor in its layer.
        out: uint8 ``[len(sources), pitch]`` on that device, contiguous; ``pitch`` is a multiple of
            :data:`PITCH` and at least the length of an encoding.

    Returns:
        Which of them have values that the codec refuses; their bytes mean nothing.
    """
    found: list[bool] = []
    with _on(out):
        for at in range(0, len(sources), _MOST):
            part = Sections.of(sources[at : at + _MOST])
            found += _encode(codec, part, tuple(sources[0].shape), tensor, out[at : at + _MOST])
    return found


def decode(
    codec: TensorBytesCodec,
    data: torch.Tensor,
    heads: Sequence[memoryview],
    tensor: str,
    targets: Sequence[torch.Tensor],
) -> None:
    """Undo :func:`encode`. Runs on torch's current stream and waits for nothing.

    Args:
        codec: A codec of this package.
        data: As ``out`` of :func:`encode`.
        heads: The first bytes of each encoding, in host memory: at least 8.
        tensor: Name of the tensor in its layer.
        targets: As ``sources`` of :func:`encode`.

    Raises:
        CodecError: if a description of steps is none.
    """
    with _on(data):
        for at in range(0, len(targets), _MOST):
            part = Sections.of(targets[at : at + _MOST])
            shape, cut = tuple(targets[0].shape), slice(at, at + _MOST)
            _decode(codec, data[cut], heads[cut], part, shape, tensor)


def room(
    codec: TensorBytesCodec,
    shape: tuple[int, ...],
    dtype: str,
    tensor: str,
    device: torch.device,
    sections: int = 1,
) -> torch.Tensor:
    """Fresh memory for the encodings of a batch: ``out`` of :func:`encode`."""
    pitch = -(-codec.encoded_bytes(shape, dtype, tensor) // PITCH) * PITCH
    return torch.empty((sections, pitch), dtype=torch.uint8, device=device)


def _on(tensor: torch.Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _tile(dim: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = min(power(dim), 128)
    return _TILE // columns, columns


class _Cut(NamedTuple):
    """How the sections of a batch are cut into groups."""

    groups: Groups
    by_channel: bool

    @classmethod
    def of(cls, codec: TensorBytesCodec, shape: tuple[int, ...], tensor: str) -> _Cut:
        most = getattr(codec, "group", _WHOLE)
        found = Groups.of(shape, grouped_as(getattr(codec, "grouping", ""), tensor), most)
        return cls(found, found.axis != len(shape) - 1)

    @property
    def number(self) -> int:
        return self.groups.number


def _is_rotated(codec: TensorBytesCodec, shape: tuple[int, ...], tensor: str) -> bool:
    by_channel = grouped_as(getattr(codec, "grouping", ""), tensor) == "k" and len(shape) == 3
    return codec.name in _ROTATED and not by_channel


def _bits(codec: TensorBytesCodec) -> int:
    bits: int = getattr(codec, "bits", _BYTE)
    return bits


def _limit(codec: TensorBytesCodec, s: Sections) -> float:
    """Largest magnitude that is taken."""
    if s.f16:
        return 65504.0
    if codec.name != "int8":
        return 2.0**120
    return float(torch.finfo(torch.bfloat16 if s.bf16 else torch.float32).max) / 4


# --------------------------------------------------------------------------- encode


def _encode(
    codec: TensorBytesCodec,
    s: Sections,
    shape: tuple[int, ...],
    tensor: str,
    out: torch.Tensor,
) -> list[bool]:
    refused = torch.zeros(s.number, dtype=torch.int32, device=out.device)
    limit = _limit(codec, s)
    if _is_rotated(codec, shape, tensor):
        return rotated.encode(s, _bits(codec), limit, refused, out)
    cut = _Cut.of(codec, shape, tensor)
    low, high = s.empty(cut.number), s.empty(cut.number)
    _extremes(s, cut, low, high, refused, limit)
    if codec.name in ("int8", "fp8"):
        settle = settling.ranges if codec.name == "int8" else settling.magnitudes
        ends = (cut.number, out.stride(0))
        over_groups(settle, s, cut.number, low, high, out, *ends, **s.stored)
        _codes(codec, s, cut, low, high, out)
        return [bool(flag) for flag in refused.tolist()]
    top = float((1 << _bits(codec)) - 1)
    over_groups(settling.widths, s, cut.number, low, high, cut.number, top)
    wrong = round_steps(s, high, low, out, refused, up=True)
    _codes(codec, s, cut, low, high, out)
    return wrong


def _extremes(
    s: Sections,
    cut: _Cut,
    low: torch.Tensor,
    high: torch.Tensor,
    refused: torch.Tensor,
    limit: float,
) -> None:
    size, places = cut.groups.size, cut.groups.places
    into: tuple[Any, ...] = (s.base, s.table, low, high, refused, limit)
    if cut.by_channel:
        columns = min(power(s.dim), 64)
        programs = s.heads * places * -(-s.dim // columns)
        numbers = (s.tokens, s.dim, size, places, *s.steps)
        tokens = min(power(size), 32)
        how = {**s.reading, "TOKENS": tokens, "PIECES": -(-size // tokens), "DIM": columns}
        launch(kernels.extremes_by_channel, programs, s, *into, *numbers, **how)
        return
    wide, long = power(places), power(size)
    rows = max(1, _TILE // (wide * long))
    into = (*into, s.rows, s.tokens, s.dim, size, places, *s.steps)
    how = {**s.reading, "ROWS": rows, "PLACES": wide, "SIZE": long}
    launch(kernels.extremes_by_row, -(-s.rows // rows), s, *into, **how)


def _areas(codec: TensorBytesCodec, rows: int) -> list[tuple[int, int, int]]:
    """Fields of the codes: width, lowest bit, rows of bytes. Whole bytes are one field."""
    bits = _bits(codec)
    return [(8, 0, rows)] if bits == _BYTE else list(fields(rows, bits))


def _before(codec: TensorBytesCodec, s: Sections, cut: _Cut) -> int:
    """Bytes of an encoding that are in front of the codes."""
    item = s.base.element_size()
    if codec.name in ("int8", "fp8"):
        return cut.number * item * (2 if codec.name == "int8" else 1)
    return ROW_BYTES + cut.number * (1 + item)


def _codes(
    codec: TensorBytesCodec,
    s: Sections,
    cut: _Cut,
    low: torch.Tensor,
    inverse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    rows, columns = _tile(s.dim)
    groups = (cut.groups.size, cut.groups.places, cut.number)
    at, top = _before(codec, s, cut), float((1 << _bits(codec)) - 1)
    for width, shift, step in _areas(codec, s.rows):
        launch(
            kernels.codes,
            -(-step // rows) * -(-s.dim // columns),
            s,
            *(s.base, s.table, low, inverse, out.view(-1)[at:], s.rows, s.tokens, s.dim),
            *(*groups, *s.steps, step, out.stride(0), top),
            BY_CHANNEL=cut.by_channel,
            FLOAT8=codec.name == "fp8",
            **s.reading,
            WIDTH=width,
            SHIFT=shift,
            ROWS=rows,
            DIM=columns,
        )
        at += step * s.dim


# --------------------------------------------------------------------------- decode


def _decode(
    codec: TensorBytesCodec,
    data: torch.Tensor,
    heads: Sequence[memoryview],
    s: Sections,
    shape: tuple[int, ...],
    tensor: str,
) -> None:
    if _is_rotated(codec, shape, tensor):
        rotated.decode(s, codec.name, _bits(codec), data, heads)
        return
    cut = _Cut.of(codec, shape, tensor)
    low, scale = s.empty(cut.number), s.empty(cut.number)
    ends = (cut.number, data.stride(0))
    if codec.name == "int8":
        over_groups(settling.ranges_in, s, cut.number, data, low, scale, *ends, **s.stored)
    elif codec.name == "fp8":
        over_groups(settling.magnitudes_in, s, cut.number, data, scale, *ends, **s.stored)
    else:
        of = (data.view(-1)[ROW_BYTES:], low, scale, read_rows(s, codec.name, heads), *ends)
        over_groups(settling.steps_in, s, cut.number, *of, MINIMA=True, **s.stored)
    (width, _, step), *more = _areas(codec, s.rows)
    width_2, _, step_2 = more[0] if more else (0, 0, 1)
    rows, columns = _tile(s.dim)
    launch(
        kernels.values,
        -(-s.rows // rows) * -(-s.dim // columns),
        s,
        *(s.base, s.table, data.view(-1)[_before(codec, s, cut) :], low, scale),
        *(s.rows, s.tokens, s.dim, cut.groups.size, cut.groups.places, cut.number, *s.steps),
        *(step, step_2, data.stride(0)),
        BY_CHANNEL=cut.by_channel,
        FLOAT8=codec.name == "fp8",
        WIDTH=width,
        WIDTH_2=width_2,
        ROWS=rows,
        DIM=columns,
        **s.writing,
    )
