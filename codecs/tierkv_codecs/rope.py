"""Rotary position embeddings taken off keys, without a word about positions or the model.

A rotary embedding (RoFormer, arXiv 2104.09864) turns each pair of channels of a key by an angle
that grows by the pair's own frequency from token to token. Within a block, turning back by the
place in the block leaves a rotation that is one for all tokens: what the model computed, but for
where the block began. The channels of keys change little from token to token before the embedding
and spin after it, so that what is turned back has a mean worth taking away (measured over blocks of
64 tokens, SmolLM2: of the energy of keys, 29 % is left beside the mean before turning, 19 % after).

The frequency of a pair is the peak of its spectrum, summed over heads, between zero and one radian
a token, which embeddings use: no base, scaling or layer kind has to be known, and a pair that does
not turn, or gains less than its frequency costs, has frequency zero. Pairs are channels ``i`` and
``i + dim / 2``, as Transformers and vLLM store them; with another pairing little is found, and
nothing is lost. Frequencies are whole 4096ths of a turn a token, and angles are taken from a wheel
of as many: decoding needs no function that differs between machines.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

__all__ = ["WHEEL", "angles", "frequencies", "pairs", "turn", "turn_back", "wheel"]

WHEEL: Final = 4096
"""Steps of a full turn; format."""
_LEAST: Final = 8  # fewer tokens show no frequency
_COST: Final = 16  # bits that a frequency takes
_APART: Final = 16  # steps between frequencies tried: between them a parabola is near enough


def pairs(dim: int) -> int:
    """Pairs of channels that may turn; none where the number of channels is odd."""
    return 0 if dim % 2 else dim // 2


def frequencies(
    pieces: Sequence[torch.Tensor], still: NDArray[np.bool_], times: float = 1.0
) -> NDArray[np.int64]:
    """Frequency of each pair of channels, in steps of the wheel a token.

    Args:
        pieces: Keys, float32 ``[heads, tokens, dim]``; each piece has a phase of its own.
        still: Pairs that must not turn, bool ``[pairs]``.
        times: How many times as many numbers as in the pieces will be turned.

    Returns:
        int64 ``[pairs]``, 0 to ``WHEEL - 1``.
    """
    import torch

    half, probes = len(still), _probes()
    energy, numbers = np.zeros(half, np.float32), 0
    held = np.zeros((len(probes), half), np.float32)  # energy of the means, for each frequency
    seen = [piece for piece in pieces if half and piece.shape[1] >= _LEAST]
    for tokens in sorted({piece.shape[1] for piece in seen}):
        keys = torch.cat([piece for piece in seen if piece.shape[1] == tokens])
        along = (_waves(tokens) @ keys).numpy()
        power, sine = along[:, : len(probes)], along[:, len(probes) :]
        power[..., :half] += sine[..., half:]  # real parts, then imaginary ones
        power[..., half:] -= sine[..., :half]
        both = np.square(power, out=power).sum(0)
        held += (both[:, :half] + both[:, half:]) / np.float32(tokens)
        squares = keys.view(-1, 2, half).square().sum((0, 1))
        energy += squares.numpy()
        numbers += keys.shape[0] * tokens
    pair = np.arange(half)
    peak = held[1:-1].argmax(0) + 1
    left, top, right = (held[peak + side, pair] for side in (-1, 0, 1))
    bend = np.minimum(left - 2 * top + right, np.float32(-1e-30))
    shift = np.clip(0.5 * (left - right) / bend, -0.5, 0.5)
    found = np.rint(probes[peak] + _APART * shift).astype(np.int64) % WHEEL
    # a pair of numbers whose energy falls by two takes one bit less
    rest = np.log2(np.maximum(energy - np.stack([held[1], top]), np.float32(1e-30)))
    worth = (rest[0] - rest[1]) * (numbers * times) > _COST
    return np.where(worth & ~still, found, 0)


@functools.cache
def _probes() -> NDArray[np.int64]:
    """Frequencies that are tried: zero is the second, the last but one is beyond one radian."""
    return np.arange(-_APART, WHEEL // 6 + 2 * _APART, _APART)


@functools.lru_cache(64)
def _waves(tokens: int) -> torch.Tensor:
    """Cosines, then sines, of the frequencies tried; float32 ``[2 * probes, tokens]``."""
    import torch

    return torch.cat([part.t() for part in angles(_probes(), tokens)])


@functools.cache
def wheel() -> NDArray[np.float32]:
    """Cosine, then sine, of every step of the wheel: ``[2, WHEEL]``."""
    turns = [2 * math.pi * step / WHEEL for step in range(WHEEL)]
    return np.array([[f(a) for a in turns] for f in (math.cos, math.sin)], np.float32)


def angles(frequency: NDArray[np.int64], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for each token and pair; float32 ``[tokens, pairs]``."""
    import torch

    steps = np.arange(tokens)[:, None] * frequency
    steps %= WHEEL
    cosines, sines = wheel()
    return torch.from_numpy(cosines.take(steps)), torch.from_numpy(sines.take(steps))


def turn_back(keys: torch.Tensor, angle: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Take the angles off; a new tensor."""
    return _turned(keys, angle[0], -angle[1])


def turn(keys: torch.Tensor, angle: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Undo :func:`turn_back`; a new tensor. Each product and sum is rounded by itself."""
    return _turned(keys, *angle)


def _turned(keys: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    import torch

    half = cosine.shape[1]
    if not half:
        return keys.clone()
    first, second = keys[..., :half], keys[..., half:]
    found = torch.empty_like(keys)
    torch.mul(first, cosine, out=found[..., :half])
    found[..., :half].sub_(second * sine)
    torch.mul(second, cosine, out=found[..., half:])
    found[..., half:].add_(first * sine)
    return found
