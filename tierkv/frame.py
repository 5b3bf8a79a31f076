"""The frame: one part as bytes, the same on every tier.

::

    0            magic, header checksum, version, lengths          (fixed prefix)
                 identity: part, space, root, parent, generation, tokens, expiry
                 tenant and fidelity
                 section table: names, one row per section, dimensions
                 one checksum per section; room for one AEAD tag and key id per section
    payload      sections, layer by layer, each at a multiple of 64 bytes
    (multiple
    of 4 KiB)

Numbers are little-endian. The header checksum covers every byte of the header after itself,
unused room included, and a section's checksum covers its padding: each byte of a frame is under
exactly one checksum. Sections follow each other without gaps, so that a table either describes
the whole frame or is refused. The size of the header depends only on the group, never on the
codec chain or the values, so that a layer can be read by range before the header was seen.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from tierkv.blocks import KEY_BYTES, BlockKey, PartId
from tierkv.errors import ConfigError, IntegrityError
from tierkv.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from tierkv.layout import Group

__all__ = [
    "ALIGN",
    "MAX_CHAINS",
    "MAX_CHAIN_BYTES",
    "MAX_FIDELITY_BYTES",
    "MAX_TENANT_BYTES",
    "PAGE",
    "Header",
    "Section",
    "checksum",
    "decode_header",
    "encode_header",
    "header_bytes",
    "padded_bytes",
    "page_round",
    "refuse",
]

PAGE = 4096
"""Payloads start at a multiple of this (the O_DIRECT unit)."""
ALIGN = 64
"""Sections start at a multiple of this (a cache line)."""
MAX_TENANT_BYTES = 256
MAX_FIDELITY_BYTES = 64
MAX_CHAIN_BYTES = 64
"""Longest name of one codec chain; a header has room for :data:`MAX_CHAINS` different ones."""
MAX_CHAINS = 16

_MAGIC = b"TIERKV\r\n"  # the line end shows a transfer that rewrote text
_VERSION = 1
_DIGEST_BYTES = 16
_CHECKED_FROM = len(_MAGIC) + _DIGEST_BYTES
_SEAL_BYTES = 20  # AEAD tag (16) and key id (4); zero: not encrypted

# version, flags, header length, frame length, generation, tokens, block tokens, expiry,
# part, space, root, parent, tenant bytes, fidelity bytes, names, name bytes, sections, dimensions
_START = struct.Struct("<8s16sHHI")  # of it
_PREFIX = struct.Struct("<8s16sHHIQQIId34s32s32s32sHHHHII")
_ROW = struct.Struct("<iHHHHQQQ")  # layer, tensor, dtype, chain, rank, offset, stored, raw
_HAS_PARENT, _HAS_EXPIRY, _STATE, _FOLDED = 1, 2, 4, 8  # flags

_Shape = tuple[int, ...]

_SEEN_SECTIONS = 1 << 16


class Section(NamedTuple):
    """One tensor of one layer inside a frame.

    Attributes:
        layer: Number of the layer in the model.
        tensor: Name of the tensor in the layer.
        dtype: torch's name of the dtype of the decoded tensor.
        shape: Shape of the decoded tensor.
        chain: Codec chain that was really used, e.g. ``"raw"``, ``"int8+zstd"``.
        offset: First byte, from the start of the frame; a multiple of :data:`ALIGN`.
        nbytes: Stored length, without padding; never more than ``raw_bytes``.
        raw_bytes: Length of the decoded tensor.
    """

    layer: int
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    chain: str
    offset: int
    nbytes: int
    raw_bytes: int

    @property
    def end(self) -> int:
        """End of the section in the frame, padding included."""
        return self.offset + padded_bytes(self.nbytes)


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says about itself.

    Attributes:
        part: Which part it is.
        space: Fingerprint of the space.
        root: Root of the key chain (space, tenant and salt).
        parent: Key of the block before; None for block 0.
        generation: Number of this publication.
        fidelity: ``"exact"``, or ``"derived:<how>"`` if the KV was computed on lossy ancestors.
        tokens: Valid tokens.
        block_tokens: Tokens of a full block.
        tenant: Tenant that stored it.
        expires: Wall-clock time at which it expires, or None.
        frame_bytes: Length of the whole frame.
        payload_offset: Length of the header.
        sections: In stored order, layer by layer.
        digests: One checksum a section, over its stored bytes and their padding.
        per_token: Whether the tensors have a token axis; False for recurrent states.
        folded: Whether the sections' digests are :func:`tierkv.device.fold`, which a device can
            compute itself (frames of device tiers), instead of :func:`checksum`.
    """

    part: PartId
    space: bytes
    root: BlockKey
    parent: BlockKey | None
    generation: int
    fidelity: str
    tokens: int
    block_tokens: int
    tenant: str
    expires: float | None
    frame_bytes: int
    payload_offset: int
    sections: tuple[Section, ...]
    digests: tuple[bytes, ...]
    per_token: bool = True
    folded: bool = False


class _Seen:
    """Headers that passed every check lately, by the checksum of their bytes.

    A frame in RAM is read again and again. Whether its header's bytes have the checksum that they
    say is found out every time; what they mean is the same every time.
    """

    def __init__(self, limit: int) -> None:
        self.headers: dict[bytes, Header] = {}
        self._limit = self._room = limit

    def keep(self, digest: bytes, header: Header) -> None:
        """Remember one. A bound on the sections of all of them bounds the memory."""
        self._room -= len(header.sections) + 1
        if self._room < 0:
            self.headers = {}
            self._room = self._limit
        self.headers[digest] = header


_seen = _Seen(_SEEN_SECTIONS)


def page_round(nbytes: int) -> int:
    """Round up to whole pages of 4 KiB."""
    return (nbytes + PAGE - 1) & -PAGE


def padded_bytes(nbytes: int) -> int:
    """Round up to the alignment of sections."""
    return (nbytes + ALIGN - 1) & -ALIGN


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 16-byte xxh3_128 digest of a buffer."""
    return bytes(xxhash.xxh3_128_digest(data))


def header_bytes(group: Group) -> int:
    """Room for the header of a part of ``group``: a multiple of 4 KiB, whatever the chain."""
    tensors = [t for layer in group.layers for t in layer.tensors]
    texts = MAX_TENANT_BYTES + MAX_FIDELITY_BYTES + min(len(tensors), MAX_CHAINS) * MAX_CHAIN_BYTES
    names = {t.name for t in tensors} | {t.dtype for t in tensors}
    texts += sum(len(name.encode()) for name in names) + 2 * (len(names) + MAX_CHAINS)
    dims = sum(len(group.stored_shape(t, 0)) for t in tensors)
    rows = len(tensors) * (_ROW.size + _DIGEST_BYTES + _SEAL_BYTES)
    return page_round(_PREFIX.size + texts + rows + dims * 8)


def _text(value: str, limit: int, what: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > limit:
        raise ConfigError(f"{what} takes {len(data)} bytes in a frame; at most {limit} are allowed")
    return data


_Table = tuple[int, bytes, bytes, int]
# Frames of one group that are not compressed share it: found by identity, a hash reads it all.
_tables: dict[int, tuple[tuple[Section, ...], _Table]] = {}


def _table_bytes(entries: tuple[Section, ...]) -> _Table:
    known = _tables.get(id(entries))
    if known is None or known[0] is not entries:
        if len(_tables) >= 64:
            _tables.clear()
        known = _tables[id(entries)] = entries, _make_table(entries)
    return known[1]


def _make_table(entries: tuple[Section, ...]) -> _Table:
    names: dict[str, int] = {}
    rows = bytearray()
    dims: list[int] = []
    for layer, tensor, dtype, shape, chain, *lengths in entries:
        numbers = [names.setdefault(name, len(names)) for name in (tensor, dtype, chain)]
        rows += _ROW.pack(layer, *numbers, len(shape), *lengths)
        dims += shape
    pool = bytearray()
    for name in names:
        data = name.encode()
        pool += len(data).to_bytes(2, "little") + data
    return len(names), bytes(pool), bytes(rows + struct.pack(f"<{len(dims)}Q", *dims)), len(dims)


def encode_header(header: Header, out: memoryview) -> None:
    """Write ``header`` into the first ``header.payload_offset`` bytes of ``out``.

    Raises:
        ConfigError: if a name is too long for the room that :func:`header_bytes` keeps, or the
            checksums are not those of the sections.
    """
    tenant = _text(header.tenant, MAX_TENANT_BYTES, f"tenant {header.tenant[:40]!r}")
    fidelity = _text(header.fidelity, MAX_FIDELITY_BYTES, f"fidelity {header.fidelity[:40]!r}")
    n_names, pool, table, n_dims = _table_bytes(header.sections)
    flags = _HAS_PARENT * (header.parent is not None) | _HAS_EXPIRY * (header.expires is not None)
    flags |= _STATE * (not header.per_token) | _FOLDED * header.folded
    start = (_MAGIC, bytes(_DIGEST_BYTES), _VERSION, flags, header.payload_offset)
    count = (header.frame_bytes, header.generation, header.tokens, header.block_tokens)
    names = (header.part, header.space, header.root, header.parent or bytes(KEY_BYTES))
    sizes = (len(tenant), len(fidelity), n_names, len(pool), len(header.sections), n_dims)
    prefix = _PREFIX.pack(*start, *count, header.expires or 0.0, *names, *sizes)
    digests = b"".join(header.digests)
    if len(digests) != len(header.sections) * _DIGEST_BYTES:
        raise ConfigError(f"{len(header.sections)} sections need as many checksums of 16 bytes")
    body = b"".join((prefix, tenant, fidelity, pool, table, digests))
    if len(body) + _SEAL_BYTES * len(header.sections) > header.payload_offset:
        raise ConfigError(f"a header of {len(body)} bytes does not fit {header.payload_offset}")
    out[: header.payload_offset] = body.ljust(header.payload_offset, b"\0")
    out[len(_MAGIC) : _CHECKED_FROM] = checksum(out[_CHECKED_FROM : header.payload_offset])


def refuse(what: str) -> IntegrityError:
    """The error for bytes that are not the frame they should be."""
    return IntegrityError(f"frame refused: {what}; treat the part as missing")


def _decode_text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise refuse(f"{what} is not text") from error


def _names(pool: bytes, count: int) -> list[str]:
    names, at = [], 0
    for _ in range(count):
        length = int.from_bytes(pool[at : at + 2], "little")
        if at + 2 + length > len(pool):
            raise refuse("a name passes the end of the name table")
        names.append(_decode_text(pool[at + 2 : at + 2 + length], "a name"))
        at += 2 + length
    if at != len(pool):
        raise refuse("the name table has bytes to spare")
    return names


def _check_row(row: Section, expected_offset: int) -> None:
    layer, tensor, dtype, shape, chain, offset, nbytes, raw = row
    where = f"section {tensor!r} of layer {layer}"
    if dtype not in DTYPE_BYTES:
        raise refuse(f"{where} has unknown dtype {dtype!r}")
    if raw != prod(shape) * DTYPE_BYTES[dtype]:
        raise refuse(f"{where} claims {raw} raw bytes for shape {shape} of {dtype}")
    if nbytes > raw or (chain == "raw" and nbytes != raw):
        raise refuse(f"{where} stores {nbytes} bytes for {raw} raw ones (chain {chain!r})")
    if offset != expected_offset:
        raise refuse(f"{where} is at {offset}, not at {expected_offset}")


@lru_cache(maxsize=64)
def _rows(
    table: bytes, n_names: int, pool_bytes: int, n_rows: int, start: int, end: int
) -> tuple[Section, ...]:
    # Raw frames of one group share this table. An exception is never remembered.
    names = _names(table[:pool_bytes], n_names)
    dims_at = pool_bytes + n_rows * _ROW.size
    dims = struct.unpack(f"<{(len(table) - dims_at) // 8}Q", table[dims_at:])
    rows: list[Section] = []
    used, offset = 0, start
    entries = _ROW.iter_unpack(table[pool_bytes:dims_at])
    for layer, tensor, dtype, chain, rank, at, nbytes, raw in entries:
        if max(tensor, dtype, chain) >= n_names or used + rank > len(dims):
            raise refuse(f"a section of layer {layer} points outside the tables")
        shape = dims[used : used + rank]
        row = Section(layer, names[tensor], names[dtype], shape, names[chain], at, nbytes, raw)
        _check_row(row, offset)
        rows.append(row)
        used += rank
        offset += padded_bytes(nbytes)
    if used != len(dims) or offset != end:
        raise refuse(f"its sections end at {offset}, the frame at {end}")
    return tuple(rows)


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Read and check a header; nothing is allocated by a length that was not checked.

    Args:
        data: The header, or more of the frame.

    Raises:
        IntegrityError: if anything at all is wrong with it.
    """
    view = (
        data if isinstance(data, memoryview) and data.format == "B" else memoryview(data).cast("B")
    )
    if len(view) < _PREFIX.size:
        raise refuse(f"{len(view)} bytes are too short for a header")
    magic, digest, version, _, payload = _START.unpack_from(view)
    if magic != _MAGIC:
        raise refuse("it does not start with the magic bytes")
    if version != _VERSION:
        raise refuse(f"format version {version} is not {_VERSION}")
    if payload % PAGE or not _PREFIX.size <= payload <= len(view):
        raise refuse(f"header length {payload} does not fit the {len(view)} bytes given")
    if xxhash.xxh3_128_digest(view[_CHECKED_FROM:payload]) != digest:
        raise refuse("the header checksum does not match")
    header = _seen.headers.get(digest)
    if header is None or header.payload_offset != payload:
        header = _decode_body(view, _PREFIX.unpack_from(view))
        _seen.keep(digest, header)
    return header


def _decode_body(view: memoryview, values: tuple[Any, ...]) -> Header:
    """What a header means whose bytes have the checksum that they say."""
    _, _, _, flags, payload, frame_bytes, generation, tokens, block = values[:9]
    expires, part, space, root, parent, n_tenant, n_fidelity = values[9:16]
    n_names, n_pool, n_rows, n_dims = values[16:]
    if flags & ~(_HAS_PARENT | _HAS_EXPIRY | _STATE | _FOLDED) or not isfinite(expires):
        raise refuse(f"unknown flags {flags:#x} or bad expiry {expires}")
    if tokens > block or frame_bytes < payload:
        raise refuse(f"{tokens} of {block} tokens in {frame_bytes} bytes are impossible")
    at = _PREFIX.size + n_tenant + n_fidelity
    table_end = at + n_pool + n_rows * _ROW.size + n_dims * 8
    used = table_end + n_rows * (_DIGEST_BYTES + _SEAL_BYTES)
    if used > payload or bytes(view[used - n_rows * _SEAL_BYTES : payload]) != bytes(
        payload - used + n_rows * _SEAL_BYTES
    ):
        raise refuse("its tables pass the end of the header, or it is encrypted")
    rows = _rows(bytes(view[at:table_end]), n_names, n_pool, n_rows, payload, frame_bytes)
    fidelity = _decode_text(bytes(view[at - n_fidelity : at]), "fidelity")
    if fidelity != "exact" and not fidelity.startswith("derived:"):
        raise refuse(f"fidelity {fidelity!r} is neither exact nor derived")
    digests = bytes(view[table_end : table_end + n_rows * _DIGEST_BYTES])
    return Header(
        part=PartId(part),
        space=space,
        root=BlockKey(root),
        parent=BlockKey(parent) if flags & _HAS_PARENT else None,
        generation=generation,
        fidelity=fidelity,
        tokens=tokens,
        block_tokens=block,
        tenant=_decode_text(bytes(view[_PREFIX.size : at - n_fidelity]), "tenant"),
        expires=expires if flags & _HAS_EXPIRY else None,
        frame_bytes=frame_bytes,
        payload_offset=payload,
        per_token=not flags & _STATE,
        folded=bool(flags & _FOLDED),
        sections=rows,
        digests=tuple(
            [digests[i : i + _DIGEST_BYTES] for i in range(0, len(digests), _DIGEST_BYTES)]
        ),
    )
