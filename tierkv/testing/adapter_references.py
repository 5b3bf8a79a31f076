"""An engine without a model that keeps its KV in files: what adapters are held to, in small.

The KV of a token is a hash of the KV before it, and answers come from the KV alone: a block that
is another's, or damaged, changes them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tierkv.testing.adapters import Answer, Ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["BLOCK", "FileEngine"]

BLOCK = 4
"""Tokens of a block."""
_SUM = 8


class FileEngine:
    """Computes, stores whole blocks with a checksum, and reuses what it finds whole."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Serve requests, one after the other."""
        return [self.serve(ask) for ask in asks]

    def expect(self, ask: Ask) -> None:
        """There is nothing to prepare."""

    def give_up(self, ask: Ask, steps: int) -> None:
        """Compute a block a step, and store none of them."""
        self.compute(ask, ask.tokens[: BLOCK * steps], [])

    def settle(self) -> None:
        """All is stored when it is computed."""

    def close(self) -> None:
        """There is nothing to shut down."""

    def serve(self, ask: Ask) -> Answer:
        """Load, compute the rest, generate, store."""
        found = self.load(ask, self.limit(ask))
        reused = len(found)
        states = self.compute(ask, ask.tokens, found)
        made: list[int] = []
        while len(made) < ask.max_tokens:
            made.append(1 + hashlib.sha256(states[-1]).digest()[0] % 255)
            states = self.compute(ask, (*ask.tokens, *made), states)
        self.store(ask, (*ask.tokens, *made), states)
        return Answer(tuple(made), reused)

    def limit(self, ask: Ask) -> int:
        """Blocks that may be loaded: a token is left to compute."""
        return (len(ask.tokens) - 1) // BLOCK

    def compute(self, ask: Ask, tokens: Sequence[int], before: list[bytes]) -> list[bytes]:
        """KV of all tokens, that of the first ones being there."""
        states = list(before)
        for at in range(len(states), len(tokens)):
            last = states[-1] if states else repr(ask.adapter).encode()
            media = ask.media if 4 <= at < 8 else b""
            states.append(hashlib.sha256(last + bytes([tokens[at]]) + media).digest())
        return states

    def key(self, ask: Ask, tokens: Sequence[int]) -> str:
        """Name of the block that ends with these tokens."""
        media = ask.media if len(tokens) > 4 else b""
        text = repr((self.salt(ask), self.adapter(ask), self.media(media), tuple(tokens)))
        return hashlib.sha256(text.encode()).hexdigest()

    def salt(self, ask: Ask) -> object:
        """What of the salt is in keys."""
        return ask.salt

    def adapter(self, ask: Ask) -> object:
        """What of the adapter is in keys."""
        return ask.adapter

    def media(self, content: bytes) -> object:
        """What of the media is in keys."""
        return content

    def load(self, ask: Ask, limit: int) -> list[bytes]:
        """KV of the leading blocks that are there and whole."""
        states: list[bytes] = []
        for block in range(limit):
            path = self.root / self.key(ask, ask.tokens[: (block + 1) * BLOCK])
            data = path.read_bytes() if path.exists() else b""
            if not self.whole(data):
                break
            states += [data[at : at + 32] for at in range(_SUM, len(data), 32)]
        return states

    def whole(self, data: bytes) -> bool:
        """Whether a block is what was stored."""
        return len(data) > _SUM and hashlib.sha256(data[_SUM:]).digest()[:_SUM] == data[:_SUM]

    def store(self, ask: Ask, tokens: Sequence[int], states: list[bytes]) -> None:
        """Keep all whole blocks."""
        for stop in range(BLOCK, len(tokens) + 1, BLOCK):
            data = b"".join(states[stop - BLOCK : stop])
            path = self.root / self.key(ask, tokens[:stop])
            path.write_bytes(hashlib.sha256(data).digest()[:_SUM] + data)
