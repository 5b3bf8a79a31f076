"""A batch of copies of any kind between host and device, against copies one by one."""

from __future__ import annotations

import mmap
import random
from typing import TYPE_CHECKING

import torch

from tierkv.abc import Move
from tierkv.device.bits import copy_move
from tierkv.views import over

if TYPE_CHECKING:
    from tierkv.abc import Device

_SIZE = 1 << 20
_SLOT = (1 << 16) + 4096


def check_any_batch(device: Device, seed: int) -> None:
    """Copy pieces of frames from or to pages of any layout; compare both sides with what it should
    be. The host memory is registered in chunks whose borders frames cross, and partly not at all.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    memory = memoryview(mmap.mmap(-1, _SIZE))
    chunks = [memory[at : at + 3 * 4096] for at in range(0, _SIZE - 3 * 4096, 3 * 4096)]
    pinned = [chunk for chunk in chunks if rng.random() < 0.7 and device.pin(chunk)]
    host = over(memory, "uint8", (_SIZE,))
    host.copy_(torch.randint(0, 256, (_SIZE,), generator=generator).to(torch.uint8))
    theirs = torch.randint(0, 256, (_SIZE,), generator=generator).to(torch.uint8)
    there = device.allocate(_SIZE)
    assert there is not None
    device.copy([Move(there, theirs)], device.loads)
    device.loads.record().synchronize()
    mine = host.clone()
    to_host = rng.random() < 0.5
    moves: list[Move] = []
    naive: list[Move] = []
    for at in range(0, _SIZE - _SLOT, _SLOT):
        pieces, slot = rng.getrandbits(32), slice(at, at + _SLOT)
        _pieces(random.Random(pieces), host[slot], there[slot], to_host, moves)
        _pieces(random.Random(pieces), mine[slot], theirs[slot], to_host, naive)
    rng.shuffle(moves)
    stream = device.stores if to_host else device.loads
    device.copy(moves, stream)
    stream.record().synchronize()
    for move in naive:
        copy_move(move)
    assert torch.equal(host, mine), seed
    back = torch.zeros_like(theirs)
    device.copy([Move(back, there)], device.stores)
    device.stores.record().synchronize()
    assert torch.equal(back, theirs), seed
    for chunk in pinned:
        device.unpin(chunk)


def _pieces(
    rng: random.Random, host: torch.Tensor, far: torch.Tensor, to_host: bool, moves: list[Move]
) -> None:
    """The pieces of one frame section and its pages."""
    kind = rng.choice([torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64])
    heads, tokens, dim = rng.choice([(4, 8, 16), (1, 32, 16), (4, 3, 8), (8, 16, 8), (8, 64, 16)])
    low, size = rng.choice([0, 64]), heads * tokens * dim
    one = host[low : low + size * kind.itemsize].view(kind).view(heads, tokens, dim)
    two = far[low : low + size * kind.itemsize].view(kind)
    if rng.random() < 0.6:
        two = two.view(tokens, heads, dim).transpose(0, 1)
    else:
        two = two.view(heads, tokens, dim)
    step = rng.choice([tokens, 1 + tokens // 2, 1 + tokens // 4])
    for first in range(0, tokens, step):
        if rng.random() < 0.8:
            a, b = (side[:, first : min(first + step, tokens)] for side in (one, two))
            moves.append(Move(a, b) if to_host else Move(b, a))
