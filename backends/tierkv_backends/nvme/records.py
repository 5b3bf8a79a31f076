"""Metadata records: what the journal and the checkpoint are made of.

A record is a whole number of 32-byte units and carries its own checksum, seeded with the random
salt of its root. So a torn or damaged record is recognised, the next good one is found again at a
unit boundary, and neither another root's journal nor bytes inside a record can pass for one.

An encoded put record is also the in-memory index entry of its part: one bytes object, invisible
to the garbage collector, and a checkpoint is the concatenation of all of them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import xxhash

from tierkv.blocks import PART_BYTES, PartId
from tierkv.errors import BackendError
from tierkv.extents import Extent
from tierkv_backends.records import Fields, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import StoredPart

__all__ = [
    "DELETE_BYTES",
    "UNIT",
    "encode_delete",
    "encode_put",
    "extents_of",
    "first_page_of",
    "generation_of",
    "is_put",
    "nbytes_of",
    "part_of",
    "scan",
    "sequence_of",
    "stored_of",
]

UNIT: Final = 32
_MAGIC: Final = 0x4B54
_PUT: Final = 1
_DELETE: Final = 2
_MAX_UNITS: Final = 2**16 - 1

# checksum, magic, kind, flags, units, extents, sequence, generation, part, tenant length
_HEAD: Final = struct.Struct("<QHBBHHQQ34sH4x")
# frame bytes, expires, parent, root
_BODY: Final = struct.Struct("<Qd32s32s")
_EXTENT: Final = struct.Struct("<QI")
_EXTENTS_AT: Final = _HEAD.size + _BODY.size
_ZERO_UNIT: Final = bytes(UNIT)

DELETE_BYTES: Final = -(-_HEAD.size // UNIT) * UNIT
"""Length of a delete record."""


def encode_put(stored: StoredPart, extents: Sequence[Extent], sequence: int, salt: int) -> bytes:
    """Encode "``stored`` lies in ``extents``".

    Raises:
        BackendError: if a key has the wrong length, or tenant and extents do not fit a record.
    """
    try:
        fields = pack(stored)
    except ValueError as error:
        raise BackendError("nvme", str(error)) from error
    tenant = fields.tenant
    length = _EXTENTS_AT + len(extents) * _EXTENT.size + len(tenant)
    units = -(-length // UNIT)
    if units > _MAX_UNITS:
        sizes = f"{len(extents)} extents, a tenant name of {len(tenant)} bytes"
        raise BackendError("nvme", f"metadata of one part is too long ({sizes}); shorten the name")
    record = bytearray(units * UNIT)
    _HEAD.pack_into(
        record,
        0,
        0,
        _MAGIC,
        _PUT,
        fields.flags,
        units,
        len(extents),
        sequence,
        stored.generation,
        stored.part,
        len(tenant),
    )
    _BODY.pack_into(record, _HEAD.size, stored.nbytes, fields.expires, fields.parent, stored.root)
    at = _EXTENTS_AT
    for extent in extents:
        _EXTENT.pack_into(record, at, extent.start, extent.pages)
        at += _EXTENT.size
    record[at : at + len(tenant)] = tenant
    return _sealed(record, salt)


def encode_delete(part: PartId, generation: int, sequence: int, salt: int) -> bytes:
    """Encode "``part`` is not here any more"."""
    record = bytearray(DELETE_BYTES)
    units = DELETE_BYTES // UNIT
    _HEAD.pack_into(record, 0, 0, _MAGIC, _DELETE, 0, units, 0, sequence, generation, part, 0)
    return _sealed(record, salt)


def scan(data: bytes, salt: int) -> tuple[list[bytes], int, int]:
    """Find every intact record.

    Returns:
        The records in order, the offset behind the last of them, and the number of units that
        hold neither a record nor zeros (torn, damaged or foreign).
    """
    records: list[bytes] = []
    damaged = 0
    at = end = 0
    limit = len(data) - UNIT
    unpack = _HEAD.unpack_from
    while at <= limit:
        if at + _HEAD.size <= len(data):
            checksum, magic, kind, _, units, extents, _, _, _, tenant = unpack(data, at)
            length = units * UNIT
            if magic == _MAGIC and _plausible(kind, length, extents, tenant):
                record = data[at : at + length]
                if len(record) == length and xxhash.xxh3_64_intdigest(record[8:], salt) == checksum:
                    records.append(record)
                    at += length
                    end = at
                    continue
        if data[at : at + UNIT] != _ZERO_UNIT:
            damaged += 1
        at += UNIT
    return records, end, damaged


def is_put(record: bytes) -> bool:
    """Whether the record is a put (else a delete)."""
    return record[10] == _PUT


def sequence_of(record: bytes) -> int:
    """Position of the record in the order of all records of its root."""
    return int.from_bytes(record[16:24], "little")


def generation_of(record: bytes) -> int:
    """Generation of the part that the record is about."""
    return int.from_bytes(record[24:32], "little")


def part_of(record: bytes) -> PartId:
    """The part that the record is about."""
    return PartId(record[32 : 32 + PART_BYTES])


def nbytes_of(record: bytes) -> int:
    """Length of the frame of a put record."""
    return int.from_bytes(record[_HEAD.size : _HEAD.size + 8], "little")


def first_page_of(record: bytes) -> int:
    """First page of the frame of a put record; names it among all frames that hold pages."""
    return int.from_bytes(record[_EXTENTS_AT : _EXTENTS_AT + 8], "little")


def extents_of(record: bytes) -> list[Extent]:
    """Where the frame of a put record lies, in frame order."""
    count = int.from_bytes(record[14:16], "little")
    stop = _EXTENTS_AT + count * _EXTENT.size
    return [Extent(*pair) for pair in _EXTENT.iter_unpack(record[_EXTENTS_AT:stop])]


def stored_of(record: bytes) -> StoredPart:
    """Everything else that a put record says."""
    _, _, _, flags, _, extents, _, generation, part, tenant_bytes = _HEAD.unpack_from(record)
    nbytes, expires, parent, root = _BODY.unpack_from(record, _HEAD.size)
    at = _EXTENTS_AT + extents * _EXTENT.size
    tenant = record[at : at + tenant_bytes]
    return unpack(part, generation, root, nbytes, Fields(flags, expires, parent, tenant))


def _plausible(kind: int, length: int, extents: int, tenant: int) -> bool:
    # lengths are checked against each other before anything is cut out by them
    if kind == _DELETE:
        return length == DELETE_BYTES
    return kind == _PUT and length >= _EXTENTS_AT + extents * _EXTENT.size + tenant


def _sealed(record: bytearray, salt: int) -> bytes:
    struct.pack_into("<Q", record, 0, xxhash.xxh3_64_intdigest(record[8:], salt))
    return bytes(record)
