"""Frames on a socket between two processes of one user: lengths, a JSON header, raw bytes.

A frame is ``<I I`` (lengths of header and body, little-endian), a JSON object, and the body, whose
meaning the header tells. Both lengths are checked before anything is read or allocated for them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from array import array
from typing import TYPE_CHECKING, Any, Final

from tierkv.blocks import Media
from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tierkv.blocks import PartId

__all__ = [
    "HEAD",
    "MOST_BODY",
    "MOST_HEADER",
    "WIRE",
    "FrameReader",
    "WireError",
    "decode_header",
    "encode",
    "pack_changes",
    "pack_media",
    "pack_tokens",
    "peer_is_me",
    "sizes",
    "unpack_changes",
    "unpack_media",
    "unpack_tokens",
]

WIRE: Final = 1
"""Version of what is said; both ends must have the same."""
HEAD: Final = struct.Struct("<II")
MOST_HEADER: Final = 1 << 20
MOST_BODY: Final = 32 << 20
"""Bytes; eight million token ids, or a million parts."""
_CHANGE: Final = 35  # a part's name, and one bit a tier: an engine has 8 at most
_PEER: Final = struct.Struct("3i")  # pid, uid, gid


class WireError(TierKVError):
    """Bytes on a socket that are no frame of ours; the connection is of no further use."""


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame.

    Raises:
        ConfigError: if it is longer than the other end would take.
    """
    head = json.dumps(header, separators=(",", ":")).encode()
    if len(head) > MOST_HEADER or len(body) > MOST_BODY:
        raise ConfigError(
            f"a message of {len(head)} + {len(body)} bytes is too long for an engine in another "
            f"process (at most {MOST_HEADER} + {MOST_BODY}): shorten names, or the prompt"
        )
    return HEAD.pack(len(head), len(body)) + head + body


def sizes(head: bytes) -> tuple[int, int]:
    """Lengths of the header and the body that follow these eight bytes.

    Raises:
        WireError: if they are out of bounds.
    """
    header, body = HEAD.unpack(head)
    if not 0 < header <= MOST_HEADER or body > MOST_BODY:
        raise WireError(f"a frame of {header} + {body} bytes is out of bounds")
    return header, body


def decode_header(data: bytes) -> dict[str, Any]:
    """The JSON object of a frame.

    Raises:
        WireError: if it is none.
    """
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise WireError(f"a frame's header is no JSON: {type(error).__name__}") from error
    if not isinstance(header, dict):
        raise WireError(f"a frame's header is a JSON object, not a {type(header).__name__}")
    return header


class FrameReader:
    """Cuts bytes as they come off a socket into frames; keeps what is not complete yet."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take bytes in; yields (header, body) of every frame that is complete now.

        Raises:
            WireError: at the first bytes that are no frame.
        """
        self._data += data
        at = 0
        try:
            while len(self._data) - at >= HEAD.size:
                header, body = sizes(bytes(self._data[at : at + HEAD.size]))
                start = at + HEAD.size
                end = start + header + body
                if len(self._data) < end:
                    break
                rest = bytes(self._data[start:end])
                at = end
                yield decode_header(rest[:header]), rest[header:]
        finally:
            del self._data[:at]


def peer_is_me(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, as the kernel tells it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(raw)
    return bool(uid == os.geteuid())


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian 32-bit integers.

    Raises:
        ConfigError: if one is negative, too large or no integer.
    """
    try:
        return _little(array("I", token_ids)).tobytes()
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers of 32 bits: {error}") from error


def pack_media(media: Iterable[Media]) -> list[list[int | str]]:
    """Media of a prompt, as they stand in a header."""
    return [[each.position, each.digest.hex()] for each in media]


def unpack_media(value: object) -> tuple[Media, ...]:
    """Undo :func:`pack_media`; nothing means that there are none.

    Raises:
        ConfigError: if these are none.
        LayoutError: if one of them stands nowhere.
    """
    try:
        pairs = [(at, bytes.fromhex(digest)) for at, digest in value or ()]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConfigError("a request's 'media' are pairs of position and digest") from None
    return tuple(Media(at, digest) for at, digest in pairs)


def unpack_tokens(body: bytes) -> array[int]:
    """Undo :func:`pack_tokens`.

    Raises:
        ConfigError: if these are not whole integers.
    """
    if len(body) % 4:
        raise ConfigError(f"{len(body)} bytes are no array of 32-bit token ids")
    return _little(array("I", body))


def _little(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def pack_changes(changes: Sequence[tuple[PartId, int]]) -> bytes:
    """Parts and tier bits, 35 bytes each."""
    return b"".join([part + tiers.to_bytes(1, "little") for part, tiers in changes])


def unpack_changes(body: bytes) -> list[tuple[PartId, int]]:
    """Undo :func:`pack_changes`.

    Raises:
        WireError: if these are not whole entries.
    """
    if len(body) % _CHANGE:
        raise WireError(f"{len(body)} bytes are no list of parts")
    last = _CHANGE - 1
    return [
        (body[at : at + last], body[at + last])  # type: ignore[misc]
        for at in range(0, len(body), _CHANGE)
    ]
