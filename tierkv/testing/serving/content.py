"""KV that can be checked: each token's is a hash of the whole prefix it was computed from."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tierkv.testing.serving.objects import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tierkv.testing.serving.objects import Mode, Prompt

__all__ = ["POISON", "Memory", "Truth"]

POISON = np.uint64(0xDDDDDDDDDDDDDDDD)
_VOCABULARY = 1000


def _hash(*parts: object) -> int:
    text = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Truth:
    """What a request's tokens and KV are, from its prompt on: decoding is deterministic.

    Attributes:
        tokens: All token ids computed so far, also those that the scheduler has not heard of.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.tokens = list(prompt.tokens)
        self._media = {f.mm_position.offset: f.identifier for f in prompt.media}
        lora = (prompt.lora.lora_name, prompt.lora.version) if prompt.lora else None
        self._chain = [_hash("root", prompt.salt, lora, prompt.pooling, prompt.embeds)]

    def token(self, at: int) -> int:
        """Token id at a position; decoded as needed."""
        while len(self.tokens) <= at:
            self.tokens.append(self.state(len(self.tokens) - 1) % _VOCABULARY)
        return self.tokens[at]

    def state(self, at: int) -> int:
        """Hash of everything up to and with the token at a position."""
        while len(self._chain) <= at + 1:
            place = len(self._chain) - 1
            self._chain.append(_hash(self._chain[-1], self.token(place), self._media.get(place)))
        return self._chain[at + 1]

    def cells(self, start: int, stop: int) -> NDArray[np.uint64]:
        """States of tokens ``[start, stop)``."""
        if stop > start:
            self.state(stop - 1)
        return np.array(self._chain[start + 1 : stop + 1], dtype=np.uint64)


class Memory:
    """The pages of one rank: per group ``uint64 [pages, page tokens]``, a cell for each token."""

    def __init__(self, mode: Mode, rank: int) -> None:
        self._groups = mode.groups
        self._rank = rank
        self.pools = [
            np.full((mode.pages, group.page_tokens), POISON, dtype=np.uint64)
            for group in mode.groups
        ]
        self._masks = [np.uint64(_hash("mask", rank, number)) for number in range(len(self.pools))]

    def poison(self, fresh: Sequence[Sequence[int]]) -> None:
        """Pages changed hands: what they held is gone."""
        for pool, pages in zip(self.pools, fresh, strict=True):
            pool[list(pages)] = POISON

    def write(
        self, tables: Sequence[Sequence[int]], start: int, cells: NDArray[np.uint64], wrong: int = 0
    ) -> None:
        """A forward pass computes tokens from ``start`` on, the last ``wrong`` of them in vain."""
        stop = start + len(cells)
        for number, group in enumerate(self._groups):
            size, pool, mask = group.page_tokens, self.pools[number], self._masks[number]
            values = cells ^ mask
            if wrong:
                values[-wrong:] ^= np.uint64(0x5555)
            for at in range(start, stop):
                pool[tables[number][at // size], at % size] = values[at - start]

    def check(
        self, what: str, tables: Sequence[Sequence[int]], upto: int, truth: Truth, reads_from: int
    ) -> None:
        """A forward pass reads the KV of tokens before ``upto``; ``reads_from``: its first query.

        Raises:
            Violation: if any of it is not what its prefix says.
        """
        expected = truth.cells(0, upto)
        for number, group in enumerate(self._groups):
            size = group.page_tokens
            first = 0 if group.window is None else max(0, reads_from - group.window + 1)
            if upto <= first:
                continue
            pages = np.array(tables[number][: -(-upto // size)])
            held = self.pools[number][pages].reshape(-1)[first:upto]
            bad = np.flatnonzero(held != (expected[first:upto] ^ self._masks[number]))
            if len(bad):
                at = first + int(bad[0])
                kind = "poison" if held[bad[0]] == POISON else "other bytes"
                raise Violation(
                    "wrong-kv",
                    f"{what} reads {kind} at token {at} of {upto} (rank {self._rank}, group "
                    f"{number}, page {int(pages[at // size])}, {len(bad)} tokens in all)",
                )
