"""Names of files, and the record at the end of each.

A file holds one frame and, behind it, a record: what the tier has to know about the part when it
opens the directory again. Names are hashes and numbers only::

    1f/3a/<hash of the part>-<generation>-<random>

so that every publication has a file of its own: it is never changed, and no older generation,
whichever process writes it, can replace a newer one.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from tierkv_backends.records import MAX_TENANT, Fields, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId

__all__ = [
    "MAX_RECORD",
    "MIN_RECORD",
    "RECORD_ROOM",
    "Name",
    "Naming",
    "decode",
    "encode",
    "record_bytes",
]

_MAGIC: Final = b"tierkv-f"
_SEAL: Final = 16

# magic, generation, frame bytes, expires, part, parent, root, flags, tenant length
_BODY: Final = struct.Struct("<8sQQd34s32s32sHH2x")
MIN_RECORD: Final = _BODY.size + _SEAL
"""Length of a record without a tenant."""
MAX_RECORD: Final = MIN_RECORD + MAX_TENANT
RECORD_ROOM: Final = 256
"""Length of a record that :meth:`FileBackend.charge` reckons with: a tenant of 100 bytes."""

_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,16})-([0-9a-f]{12})")


def encode(stored: StoredPart, salt: int) -> bytes:
    """The record of a part: its tenant, its other fields, a checksum over both.

    Raises:
        ValueError: if a key has the wrong length, or the tenant's name is too long.
    """
    fields = pack(stored)
    body = fields.tenant + _BODY.pack(
        _MAGIC,
        stored.generation,
        stored.nbytes,
        fields.expires,
        stored.part,
        fields.parent,
        stored.root,
        fields.flags,
        len(fields.tenant),
    )
    return body + xxhash.xxh3_128_digest(body, salt)


def record_bytes(tail: bytes) -> int:
    """Length that the record at the end of ``tail`` claims, 0 if there is none."""
    if len(tail) < MIN_RECORD or tail[-MIN_RECORD:][: len(_MAGIC)] != _MAGIC:
        return 0
    return MIN_RECORD + int(_BODY.unpack_from(tail, len(tail) - MIN_RECORD)[-1])


def decode(record: bytes, salt: int) -> StoredPart | None:
    """The part that a whole record describes; None if it is damaged or of another root."""
    if xxhash.xxh3_128_digest(record[:-_SEAL], salt) != record[-_SEAL:]:
        return None
    at = len(record) - MIN_RECORD
    _, generation, nbytes, expires, part, parent, root, flags, _ = _BODY.unpack_from(record, at)
    return unpack(part, generation, root, nbytes, Fields(flags, expires, parent, record[:at]))


class Name(NamedTuple):
    """A file's name, taken apart."""

    digest: str
    generation: int
    nonce: bytes


class Naming:
    """Where a root puts which part.

    Args:
        salt: The root's random number; without it nobody can tell parts from file names.
        bits: Each of the two levels of directories has ``2**bits`` of them.
    """

    def __init__(self, salt: int, bits: int) -> None:
        self._key = salt.to_bytes(8, "little")
        self._mask = 2**bits - 1

    def digest(self, part: PartId) -> str:
        """Hash of a part, in hexadecimal."""
        return hashlib.blake2b(part, digest_size=16, key=self._key).hexdigest()

    def directory(self, digest: str) -> str:
        """Directory of a part, relative to the root."""
        upper, lower = int(digest[:2], 16), int(digest[2:4], 16)
        return f"{upper & self._mask:02x}/{lower & self._mask:02x}"

    def path(self, part: PartId, generation: int, nonce: bytes) -> str:
        """File of one publication, relative to the root."""
        digest = self.digest(part)
        return f"{self.directory(digest)}/{digest}-{generation:x}-{nonce.hex()}"

    def upper(self) -> Iterator[str]:
        """Names of all directories of a level."""
        return (f"{number:02x}" for number in range(self._mask + 1))

    @staticmethod
    def nonce() -> bytes:
        """A number that no other publication has."""
        return os.urandom(6)

    @staticmethod
    def parse(name: str) -> Name | None:
        """A file's name taken apart; None if it is not a publication's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        digest, generation, nonce = found.groups()
        return Name(digest, int(generation, 16), bytes.fromhex(nonce))
