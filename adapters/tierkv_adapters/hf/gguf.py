"""Reader of GGUF v3 files: metadata and dequantised tensors, in one pass.

Transformers can read GGUF itself, but reads the token arrays several times (minutes where this
takes seconds). Quantised formats are decoded by the ``gguf`` package of the llama.cpp project.
"""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierkv.errors import IntegrityError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

__all__ = ["GGUFFile", "TensorInfo"]

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """Where one tensor lies.

    Attributes:
        name: GGUF name, e.g. ``"blk.0.attn_q.weight"``.
        shape: Shape in row-major order (GGUF writes it reversed).
        kind: Number of the GGML type.
        offset: First byte, from the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """A parsed file.

    Attributes:
        meta: Metadata by key.
        tensors: Table of tensors, in file order.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        """Parse the header.

        Args:
            data: The whole file.

        Raises:
            IntegrityError: if this is not a complete GGUF v3 file.
        """
        self._data = memoryview(data)
        self._at = 0
        self.meta: dict[str, Any] = {}
        self.tensors: list[TensorInfo] = []
        try:
            self._parse()
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise IntegrityError(
                f"not a complete GGUF file (at byte {self._at}): {error}"
            ) from error

    def _parse(self) -> None:
        magic, version, tensors, entries = self._unpack("4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise IntegrityError(f"not a GGUF v3 file: magic {magic!r}, version {version}")
        for _ in range(entries):
            key = self._string()
            (kind,) = self._unpack("I")
            self.meta[key] = self._value(kind)
        for _ in range(tensors):
            name = self._string()
            (dimensions,) = self._unpack("I")
            shape = self._unpack(f"{dimensions}Q")
            kind, offset = self._unpack("IQ")
            self.tensors.append(TensorInfo(name, tuple(reversed(shape)), kind, offset))
        align = int(self.meta.get("general.alignment", 32))
        if align < 1:
            raise IntegrityError(f"GGUF alignment {align} is impossible")
        self._base = -(-self._at // align) * align

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _room(self, count: int) -> None:
        # every item takes at least one byte: no list is made from a length that cannot be true
        if count > len(self._data) - self._at:
            raise IntegrityError(f"GGUF length {count} at byte {self._at} passes the file's end")

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._room(length)
        text = bytes(self._data[self._at : self._at + length]).decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("IQ")
            self._room(count)
            if item == _STRING:
                return [self._string() for _ in range(count)]
            return list(self._unpack(f"{count}{_SCALARS[item]}"))
        return self._unpack(_SCALARS[kind])[0]

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yield (name, float32 array) of every tensor, in file order.

        Raises:
            MissingDependencyError: without the ``gguf`` package.
            IntegrityError: if a tensor passes the end of the file.
        """
        try:
            from gguf import GGMLQuantizationType, dequantize
            from gguf.constants import GGML_QUANT_SIZES
        except ImportError as error:
            raise MissingDependencyError(
                "reading GGUF weights needs gguf: pip install -c constraints.txt -e '.[demo]'"
            ) from error
        for info in self.tensors:
            kind = GGMLQuantizationType(info.kind)
            block, size = GGML_QUANT_SIZES[kind]
            nbytes = prod(info.shape) // block * size
            start = self._base + info.offset
            if start + nbytes > len(self._data):
                raise IntegrityError(f"GGUF tensor {info.name!r} passes the end of the file")
            raw = np.frombuffer(self._data, np.uint8, nbytes, start)
            if kind == GGMLQuantizationType.F32:
                values = raw.view(np.float32)
            else:
                values = dequantize(raw.reshape(*info.shape[:-1], -1), kind)
            yield info.name, np.array(values, np.float32).reshape(info.shape)
