"""A model whose KV depends on the KV before it, and callers that keep it in tiers.

What a lossy copy changed goes on in everything that is computed behind it, as with a real model.
So it shows whether KV that is given out as exact was really computed from exact KV alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from tests import kit

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tierkv.layout import Layout

__all__ = ["Brain", "documents", "truth"]


class Brain:
    """The memory of one conversation, as a model would fill it.

    Attributes:
        memory: The caller's tensors.
        ids: Tokens whose KV is in them.
    """

    def __init__(self, layout: Layout, room: int) -> None:
        self.memory = kit.Memory(layout, room)
        self.ids: list[int] = []

    def _tensors(self) -> list[torch.Tensor]:
        return [t for layer in self.memory.layers.values() for t in layer.values()]

    def _row(self, at: int) -> bytes:
        return b"".join(
            t[:, at].contiguous().view(torch.uint8).numpy().tobytes() for t in self._tensors()
        )

    def compute(self, ids: Sequence[int], start: int) -> None:
        """Compute the KV of ``ids[start:]`` from the KV that is there before them."""
        seen = hashlib.blake2b(digest_size=6)
        for at in range(len(ids)):
            if at >= start:
                token = ids[at].to_bytes(4, "little")
                seed = int.from_bytes(hashlib.blake2b(seen.digest() + token).digest()[:6], "little")
                generator = torch.Generator().manual_seed(seed)
                for tensor in self._tensors():
                    value = torch.randn(tensor[:, at].shape, generator=generator)
                    tensor[:, at].copy_(value)
            seen.update(self._row(at))
        self.ids = list(ids)

    def twin(self) -> Brain:
        """A copy, for a branch of the conversation."""
        other = Brain(self.memory.layout, self.memory.length)
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            theirs.copy_(mine)
        other.ids = list(self.ids)
        return other


def documents(count: int, blocks: int) -> list[list[int]]:
    """Prompts of which each shares some blocks with the one before it."""
    found = [kit.tokens(blocks, seed=1)]
    for number in range(1, count):
        shared = number % blocks * kit.BLOCK
        found.append(found[-1][:shared] + kit.tokens(blocks, seed=number + 1)[shared:])
    return found


def truth(layout: Layout, ids: Sequence[int]) -> kit.Memory:
    """The KV of a prompt that is computed at once, without any store."""
    brain = Brain(layout, len(ids))
    brain.compute(ids, 0)
    return brain.memory


def cut(dice: random.Random, ids: Sequence[int]) -> list[int]:
    """A prompt that is a part of a document, from its beginning on."""
    return list(ids[: dice.randrange(kit.BLOCK, len(ids) + 1)])
