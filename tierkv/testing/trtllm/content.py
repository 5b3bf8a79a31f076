"""What the KV of a request is: a hash of everything before, so that a wrong load cannot pass."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierkv.testing.trtllm.requests import Prompt

__all__ = ["DTYPE", "HEADS", "KV", "ROW_BYTES", "WIDTH", "Sequence"]

HEADS, WIDTH, KV = 2, 8, 2
"""Heads, bytes of one head and token (four elements), K and V."""
ROW_BYTES = KV * HEADS * WIDTH
"""Bytes of one token and layer."""
DTYPE = torch.bfloat16
"""What the flat pool's elements are; the bits are random, NaN included."""
_VOCABULARY = 32_000


class Sequence:
    """The tokens of one request and the KV of each.

    The KV of a token depends on all tokens up to it, on the layer and the rank, and also on salt,
    LoRA adapter and media. (That of a real model does not depend on the salt; here it does, so
    that a block reused across salts has the wrong KV.)
    """

    def __init__(self, prompt: Prompt, ranks: int, layers: int) -> None:
        self._layers = layers
        self._media = prompt.media_by_position()
        self._digests = [hashlib.sha256(repr((prompt.salt, prompt.lora)).encode()).digest()]
        room = len(prompt.tokens) + prompt.max_tokens + 1
        shape = (room, layers, KV, HEADS, WIDTH)
        self.rows = [torch.zeros(shape, dtype=torch.uint8) for _ in range(ranks)]
        """Per rank, ``[tokens, layers, kv, heads, bytes]``: what the pages must hold."""
        self.tokens: list[int] = []
        self.extend(prompt.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, and compute their KV."""
        for token in tokens:
            at = len(self.tokens)
            media = self._media.get(at, b"")
            text = self._digests[-1] + token.to_bytes(8, "little") + media
            digest = hashlib.sha256(text).digest()
            for rank, rows in enumerate(self.rows):
                name = digest + rank.to_bytes(2, "little")
                made = bytearray(hashlib.shake_128(name).digest(self._layers * ROW_BYTES))
                rows[at] = torch.frombuffer(made, dtype=torch.uint8).view(rows.shape[1:])
            self._digests.append(digest)
            self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        del self.tokens[length:]
        del self._digests[length + 1 :]

    def sample(self) -> int:
        """The token that the model gives next: always the same one after the same prefix."""
        return 1 + int.from_bytes(self._digests[-1][:4], "little") % _VOCABULARY
