"""KV as published models have it, and engines whose blocks change their codec chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import tierkv
from tests import kit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engine.rig import Rig
    from tierkv.session import Session

BLOCK = kit.BLOCK
LAYOUT = tierkv.Layout.uniform(layers=2, heads=4, dim=64, dtype="bfloat16")
SPACE = tierkv.Space(tierkv.Identity("m", "rev1"), LAYOUT, block_tokens=BLOCK)
AFTER_50 = tierkv.CompressionPolicy("int8", after_steps=50)
KINDS = ("host", "device")


def realistic(layout: tierkv.Layout, tokens: int, seed: int) -> kit.Memory:
    """KV whose K has channels, and whose V has tokens, that are much larger than others."""
    memory = kit.Memory(layout, tokens, seed=seed)
    source = torch.Generator().manual_seed(seed)
    for layer in memory.layers.values():
        for name, tensor in layer.items():
            heads, count, dim = tensor.shape
            shape = (heads, 1, dim) if name == "k" else (heads, count, 1)
            scale = (0.7 * torch.randn(shape, generator=source)).exp()
            tensor.copy_(tensor.float() * scale)
    return memory


def chains(session: Session, ids: Sequence[int] | None = None) -> list[str | None]:
    """Chain of each full block of a session, as ``explain`` tells it."""
    return [block.chain for block in session.explain(ids) if block.end_token % BLOCK == 0]


def near(mine: kit.Memory, theirs: kit.Memory, tokens: int, bound: float) -> bool:
    """Whether the first tokens differ by no more than ``bound`` of each head's largest value."""
    for layer, tensors in mine.layers.items() if tokens else ():
        for name, tensor in tensors.items():
            a = tensor[:, :tokens].float()
            b = theirs.layers[layer][name][:, :tokens].float()
            if ((a - b).abs() > bound * a.abs().amax()).any():
                return False
    return True


def charges(rig: Rig, tier: int = 0) -> list[int]:
    """Bytes of each copy in a tier."""
    return [nbytes for _, _, nbytes in rig.engine.core.decisions.parts(tier)]


async def idle(rig: Rig) -> None:
    """Wait until nothing is converted or copied any more; what is in use stays as it is."""
    recoder = rig.engine.runtime.behind.recoder
    recoder.kick()
    await recoder.settled([])
    await rig.settle()
