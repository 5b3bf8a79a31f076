"""vLLM's offload keys as blocks of tierkv: a key is a one-block chain whose tokens spell it.

vLLM's OffloadingConnector names a chunk by an opaque key: a hash of all tokens before its end,
the salt and the adapter, and the number of its KV cache group (32 + 4 bytes by default). The hash
is a chain already, so that nothing is gained by rebuilding the prefix order behind it: which
chunks a prompt needs, and in which order, is vLLM's business. So each key becomes *one* block
directly under the space's root. Its sixteen "token ids" are the key itself, which keeps every
promise of the engine as it is: the block's key is a SHA-256 over space, tenant and these tokens,
and the frame on disk repeats it, so that a stray chunk is a miss and never other bytes. Model,
weights, dtype and layout, of which vLLM's hash knows nothing, are in the space.

What this costs: eviction in the engine's tiers sees leaves only, and cannot take the tail of a
prompt before its head by itself; recency does that, since vLLM touches heads last.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from tierkv.blocks import KeyChain, PartId, part_id
from tierkv.errors import LayoutError
from tierkv.layout import Group, GroupKind, Layer, Layout, TensorSpec

if TYPE_CHECKING:
    from tierkv.layout import Space

__all__ = ["ROW_TENSOR", "ROW_TOKENS", "KeyMap", "row_layout", "spell"]

ROW_TOKENS: Final = 16
"""Tokens of a block, and 32-bit words of a spelled key."""

ROW_TENSOR: Final = "row"
"""Name of the one tensor of a block."""

_SPELLED: Final = 4 * (ROW_TOKENS - 1)  # bytes of a key that fit beside its length
_KNOWN: Final = 1 << 14  # keys whose part is remembered: those of the requests that wait now
_WORDS: Final = struct.Struct(f"<{ROW_TOKENS}I")


def spell(key: bytes) -> tuple[int, ...]:
    """Sixteen token ids that stand for a key: its length, then its bytes.

    >>> spell(b"abcd")[:3]
    (4, 1684234849, 0)
    >>> spell(b"abc") == spell(b"abc" + bytes(1))
    False

    A key of more than 60 bytes is spelled by its SHA-256.
    """
    body = key if len(key) <= _SPELLED else hashlib.sha256(key).digest()
    return _WORDS.unpack(len(key).to_bytes(4, "little") + body.ljust(_SPELLED, b"\0"))


def row_layout(row_bytes: int, packing: str) -> Layout:
    """Layout of one chunk as opaque bytes.

    Args:
        row_bytes: Bytes of a row of vLLM's CPU tier; vLLM makes them whole memory pages.
        packing: What the bytes are, as far as vLLM tells.

    Raises:
        LayoutError: if a row cannot be divided among the tokens of a block.
    """
    if row_bytes <= 0 or row_bytes % ROW_TOKENS:
        raise LayoutError(
            f"rows of {row_bytes} bytes: a row of vLLM's CPU tier has a multiple of {ROW_TOKENS} "
            "bytes (it is made of memory pages)"
        )
    row = TensorSpec(ROW_TENSOR, "uint8", (1, row_bytes // ROW_TOKENS), packing)
    return Layout((Group(GroupKind.FULL, (Layer(0, (row,)),)),))


class KeyMap:
    """Finds the block and the part of each offload key. Pure; the same in every process.

    Args:
        space: Whose keys; its blocks have :data:`ROW_TOKENS` tokens.
        tenant: Under whose root they are.
    """

    def __init__(self, space: Space, tenant: str = "") -> None:
        if space.block_tokens != ROW_TOKENS:
            raise LayoutError(f"a block has {ROW_TOKENS} tokens, not {space.block_tokens}")
        self.space = space
        self._root = space.root(tenant)
        self.part = lru_cache(_KNOWN)(self._part)

    def _part(self, key: bytes) -> PartId:
        chain = KeyChain(self._root, ROW_TOKENS)
        chain.follow(spell(key))
        return part_id(chain.keys[0], 0)
