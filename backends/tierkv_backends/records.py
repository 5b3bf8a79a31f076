"""What all records of parts on disk have in common: the fields that are not plain numbers."""

from __future__ import annotations

from typing import Final, NamedTuple

from tierkv.abc import StoredPart
from tierkv.blocks import KEY_BYTES, PART_BYTES, BlockKey, PartId

__all__ = ["MAX_TENANT", "Fields", "pack", "unpack"]

MAX_TENANT: Final = 2**16 - 1
"""Most bytes of a tenant's name."""
_EXACT: Final = 1
_LOSSLESS: Final = 2
_HAS_PARENT: Final = 4
_HAS_EXPIRY: Final = 8


class Fields(NamedTuple):
    """A part's fields as records hold them.

    Attributes:
        flags: Which fields there are, and what is either true or not.
        expires: Wall-clock time; 0 if there is none.
        parent: Key; empty if there is none.
        tenant: UTF-8.
    """

    flags: int
    expires: float
    parent: bytes
    tenant: bytes


def pack(stored: StoredPart) -> Fields:
    """Check a part, and encode what needs it.

    Raises:
        ValueError: if a key has the wrong length, or the tenant's name is too long.
    """
    parent = stored.parent
    tenant = stored.tenant.encode("utf-8", "surrogatepass")
    keys = (stored.root,) if parent is None else (stored.root, parent)
    if len(stored.part) != PART_BYTES or any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"malformed name, root or parent of part {stored.part.hex()}")
    if len(tenant) > MAX_TENANT:
        raise ValueError(f"a tenant name of {len(tenant)} bytes is too long; shorten it")
    flags = (
        (_EXACT if stored.exact else 0)
        | (_LOSSLESS if stored.lossless else 0)
        | (_HAS_PARENT if parent is not None else 0)
        | (_HAS_EXPIRY if stored.expires is not None else 0)
    )
    return Fields(flags, stored.expires or 0.0, parent or b"", tenant)


def unpack(part: bytes, generation: int, root: bytes, nbytes: int, fields: Fields) -> StoredPart:
    """The part that :func:`pack` and its plain fields describe."""
    flags, expires, parent, tenant = fields
    return StoredPart(
        part=PartId(part),
        generation=generation,
        parent=BlockKey(parent) if flags & _HAS_PARENT else None,
        root=BlockKey(root),
        nbytes=nbytes,
        tenant=tenant.decode("utf-8", "surrogatepass"),
        exact=bool(flags & _EXACT),
        lossless=bool(flags & _LOSSLESS),
        expires=expires if flags & _HAS_EXPIRY else None,
    )
