"""Identities and keys: what a block of KV is the KV *of*.

A key is the full 32-byte SHA-256 over an injective, length-prefixed encoding of everything
that the stored numbers depend on: model, weights, adapters, layout, dtype, shard, context
policy and block size (the *space*), the tenant (from block 0), and every token id up to the end
of the block, chained block by block. Two different inputs never encode to the same bytes, and
nothing here depends on the process, the host or the hash seed.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, NewType

from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "KEY_BYTES",
    "PART_BYTES",
    "AdapterId",
    "BlockKey",
    "Identity",
    "KeyChain",
    "Media",
    "PartId",
    "as_token_ids",
    "chain_root",
    "encode_fields",
    "part_id",
    "space_fingerprint",
    "split_part",
    "tail_key",
]

BlockKey = NewType("BlockKey", bytes)
"""Key of one block: 32 bytes, SHA-256."""

PartId = NewType("PartId", bytes)
"""Name of one part, the unit that is stored, moved and evicted: block key + group number."""

KEY_BYTES = 32
PART_BYTES = KEY_BYTES + 2
FORMAT_VERSION = 1
MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True, order=True)
class AdapterId:
    """A LoRA-like adapter that was active while the KV was computed.

    Attributes:
        name: Name of the adapter.
        version: Version or digest; reloading other weights under one name must change it.
        scale: Scale with which it was applied.
    """

    name: str
    version: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        _texts("adapter", name=self.name, version=self.version)
        if not _all_of((int, float), (self.scale,)):
            raise LayoutError(f"adapter {self.name!r}: scale is a number, not {self.scale!r}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What computed the KV, apart from its layout and block size.

    Attributes:
        model: Model id.
        weights: Digest or revision of the weights; a stable name with new weights must differ.
        adapters: Active adapters, in the order in which they apply.
        shard: (rank, world size) of the tensor-parallel shard this KV belongs to.
        context_policy: How context is cut, e.g. ``"full"`` or ``"sliding-document:4096"``.
        extra: Further named facts that change the numbers (RoPE scaling, quantised compute, ...).
    """

    model: str
    weights: str
    adapters: tuple[AdapterId, ...] = ()
    shard: tuple[int, int] = (0, 1)
    context_policy: str = "full"
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "weights", "context_policy"):
            _texts("identity", **{name: getattr(self, name)})
        if not _all_of(AdapterId, self.adapters):
            raise LayoutError(
                f"identity: adapters is a tuple of AdapterId, not {self.adapters!r:.80}"
            )
        if not _all_of(int, self.shard, 2) or not 0 <= self.shard[0] < self.shard[1]:
            raise LayoutError(
                "identity: shard is (rank, world size) with 0 <= rank < world size, not "
                f"{self.shard!r:.80}"
            )
        if not _all_of(tuple, self.extra) or not all(_all_of(str, x, 2) for x in self.extra):
            raise LayoutError(
                "identity: extra is a tuple of (name, value) pairs of text, e.g. "
                f"(('rope', 'linear:2'),), not {self.extra!r:.80}"
            )


def _texts(what: str, **values: object) -> None:
    for name, value in values.items():
        if not (isinstance(value, str) and value):
            raise LayoutError(f"{what}: {name} is a text that is not empty, not {value!r:.80}")


def _all_of(kind: type | tuple[type, ...], values: object, length: int | None = None) -> bool:
    """Whether this is a tuple of that kind and length; True is no number here."""
    return (
        isinstance(values, tuple)
        and length in (None, len(values))
        and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
    )


Field = bytes | str | int | float | None | tuple["Field", ...]


def encode_fields(*fields: Field) -> bytes:
    """Encode values injectively: a type tag, a length, the bytes; tuples nest.

    >>> encode_fields("ab", "c") == encode_fields("a", "bc")
    False
    >>> encode_fields("", None) == encode_fields(None, "")
    False
    >>> encode_fields(1) == encode_fields(1.0)
    False

    Raises:
        LayoutError: if a value is of another kind: a mapping or a set has no order to encode.
    """
    out = bytearray()
    for value in fields:
        if value is None:
            tag, body = b"n", b""
        elif isinstance(value, bytes):
            tag, body = b"b", value
        elif isinstance(value, str):
            tag, body = b"s", value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int):
            tag, body = b"i", str(int(value)).encode()
        elif isinstance(value, float):
            tag, body = b"f", struct.pack("<d", value)
        elif isinstance(value, tuple | list):
            tag, body = b"t", encode_fields(*value)
        else:
            raise LayoutError(f"cannot encode a {type(value).__name__} into a key: {value!r:.80}")
        out += tag
        out += len(body).to_bytes(8, "little")
        out += body
    return bytes(out)


def space_fingerprint(identity: Identity, layout_fingerprint: bytes, block_tokens: int) -> bytes:
    """Return the 32-byte name of a space: the complete root of its keys."""
    fields = encode_fields(
        "tierkv.space",
        FORMAT_VERSION,
        identity.model,
        identity.weights,
        tuple((a.name, a.version, float(a.scale)) for a in identity.adapters),
        identity.shard,
        identity.context_policy,
        identity.extra,
        layout_fingerprint,
        block_tokens,
    )
    return hashlib.sha256(fields).digest()


def chain_root(space: bytes, tenant: str, salt: bytes = b"") -> BlockKey:
    """Return the parent of block 0: it holds the space, the tenant and the request's salt."""
    return BlockKey(hashlib.sha256(encode_fields("tierkv.root", space, tenant, salt)).digest())


def part_id(key: BlockKey, group: int) -> PartId:
    """Name the part of block ``key`` that belongs to layer group ``group``."""
    return PartId(key + group.to_bytes(2, "little"))


def split_part(part: PartId) -> tuple[BlockKey, int]:
    """Undo :func:`part_id`."""
    return BlockKey(part[:KEY_BYTES]), int.from_bytes(part[KEY_BYTES:], "little")


@dataclass(frozen=True, slots=True)
class Media:
    """Content behind placeholder tokens, such as an image.

    Attributes:
        position: Index of the first placeholder token.
        digest: Digest of the content; it enters the key of the block that holds ``position``.
    """

    position: int
    digest: bytes

    def __post_init__(self) -> None:
        try:
            position = index(self.position)
        except TypeError:
            position = -1
        if position < 0:
            raise LayoutError(f"media stand at a token index, not at {self.position!r:.80}")
        object.__setattr__(self, "position", position)  # a plain one, whatever numpy gave
        if not isinstance(self.digest, bytes):
            raise LayoutError(f"the digest of media is bytes, not {self.digest!r:.80}")


def _in_order(media: Sequence[Media]) -> tuple[Media, ...]:
    given: object = media
    if not isinstance(given, Sequence) or not all(isinstance(each, Media) for each in given):
        raise LayoutError(f"media are a sequence of tierkv.Media, not {media!r:.80}")
    return tuple(sorted(set(media), key=lambda m: (m.position, m.digest)))


_BLOCK_TAG = encode_fields("tierkv.block")


def _block_key(parent: bytes, tokens: bytes, media: bytes) -> BlockKey:
    # tag and parent have fixed sizes and the two variable fields carry their lengths: injective
    head = _BLOCK_TAG + parent + struct.pack("<QQ", len(tokens), len(media))
    return BlockKey(hashlib.sha256(head + tokens + media).digest())


def tail_key(parent: BlockKey, owner: str, tokens: bytes, media: bytes = b"") -> BlockKey:
    """Key of the private partial block that session ``owner`` keeps behind ``parent``.

    ``media`` is what :meth:`KeyChain.media_in` says of it.
    """
    fields = encode_fields("tierkv.tail", parent, owner, tokens, *([media] if media else []))
    return BlockKey(hashlib.sha256(fields).digest())


def as_token_ids(token_ids: object) -> Sequence[int]:
    """Take token ids as people hold them: a list or other sequence, or a vector of integers.

    Args:
        token_ids: A sequence of integers, a numpy array or a tensor (which are copied out of).

    Raises:
        LayoutError: if it has no order (a set, a generator), more than one axis, or holds no
            integers; text and bytes are no token ids.
    """
    if isinstance(token_ids, list | tuple | array | range):
        return token_ids
    if isinstance(token_ids, Sequence):
        if not isinstance(token_ids, str | bytes | bytearray | memoryview):
            return list(token_ids)  # not every sequence (a deque) can be sliced
    elif hasattr(token_ids, "tolist") and hasattr(token_ids, "shape"):
        vector: Any = token_ids
        if len(vector.shape) != 1 or "int" not in str(vector.dtype):
            raise LayoutError(
                "token ids are one vector of integers, e.g. input_ids[0]; this one has shape "
                f"{tuple(vector.shape)} and dtype {vector.dtype}"
            )
        try:
            ids: Sequence[int] = vector.tolist()
        except (RuntimeError, NotImplementedError) as error:  # without elements, or a sparse one
            raise LayoutError(f"these token ids cannot be read: {error!s:.200}") from error
        return ids
    raise LayoutError(
        f"token ids are a sequence of integers, e.g. a list, not {type(token_ids).__name__}"
    )


def _pack_tokens(token_ids: Iterable[int]) -> array[int]:
    """Pack token ids as unsigned 32-bit integers.

    Raises:
        LayoutError: if a token id is negative or does not fit 32 bits.
    """
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise LayoutError(
            f"token ids must be integers from 0 to {MAX_TOKEN_ID}: {error}"
        ) from error


class KeyChain:
    """Key chain of one token sequence: hashes each block once, however often it grows.

    A chain costs about 2 us a block; long ones belong in a worker thread, not on the loop.
    """

    __slots__ = ("_media", "block_tokens", "keys", "root", "tokens")

    def __init__(self, root: BlockKey, block_tokens: int) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.tokens: array[int] = array("I")
        self.keys: list[BlockKey] = []
        self._media: tuple[Media, ...] = ()

    def __repr__(self) -> str:
        return f"<KeyChain {len(self.tokens)} tokens, {len(self.keys)} blocks>"

    def common_tokens(self, token_ids: Sequence[int]) -> int:
        """Count how many leading tokens of ``token_ids`` this chain already holds."""
        mine, token_ids = self.tokens, as_token_ids(token_ids)
        limit = min(len(mine), len(token_ids))
        other = _pack_tokens(token_ids[:limit])
        if mine[:limit] == other:
            return limit
        low, high = 0, limit  # invariant: the first `low` agree, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            if mine[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def follow(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> int:
        """Make this the chain of ``token_ids``: keep the shared prefix, hash only the rest.

        Returns:
            How many leading tokens, with the media in them, were shared with the chain as it was.

        Raises:
            LayoutError: if these are no token ids, or one does not fit 32 bits; the chain is then
                unchanged.
        """
        token_ids = as_token_ids(token_ids)
        known = shared = self.common_tokens(token_ids)
        fresh = _pack_tokens(token_ids[shared:])
        media = _in_order(media)
        if media != self._media:
            first = min(
                (m.position for m in set(media) ^ set(self._media)), default=len(self.tokens)
            )
            known = min(shared, first)
            self._media = media
        del self.tokens[shared:]
        self.tokens.extend(fresh)
        del self.keys[known // self.block_tokens :]
        self._hash_new()
        return known

    def _hash_new(self) -> None:
        size, first = self.block_tokens, len(self.keys)
        count = len(self.tokens) // size
        if first == count:
            return
        parent = self.keys[-1] if self.keys else self.root
        raw = self.tokens[first * size : count * size].tobytes()
        width = self.tokens.itemsize * size
        where = {m.position // size for m in self._media}
        # as :func:`_block_key` for a block without media; this runs once a block of every prompt
        head, lengths = _BLOCK_TAG, struct.pack("<QQ", width, 0)
        sha256, append = hashlib.sha256, self.keys.append
        for block, at in zip(range(first, count), range(0, len(raw), width), strict=True):
            if block in where:
                media = self.media_in(block * size, (block + 1) * size)
                parent = _block_key(parent, raw[at : at + width], media)
            else:
                parent = BlockKey(sha256(head + parent + lengths + raw[at : at + width]).digest())
            append(parent)

    def media_in(self, start: int, stop: int) -> bytes:
        """What the key of the tokens from ``start`` to ``stop`` says of the media among them."""
        inside = ((m.position - start, m.digest) for m in self._media)
        return encode_fields(*(each for each in inside if 0 <= each[0] < stop - start))

    def fork(self) -> KeyChain:
        """Return an independent copy."""
        twin = KeyChain(self.root, self.block_tokens)
        twin.tokens = self.tokens[:]
        twin.keys = self.keys[:]
        twin._media = self._media
        return twin
