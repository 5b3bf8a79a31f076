"""Machine code for a chain, compiled ahead of its first use."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tierkv import jit
from tierkv.chains import RAW, parse_chains
from tierkv.frame import Section
from tierkv.layout import DTYPE_BYTES
from tierkv.pipeline.planning import make_plan
from tierkv.pipeline.storing import store_section
from tierkv.sections import INTEGERS, decode_section

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tierkv.layout import Layout, Space
    from tierkv.pipeline.planning import Step

__all__ = ["cold", "warm"]

_log = logging.getLogger(__name__)
_MOST: Final = 1024
_warmed: dict[tuple[Layout, int, str], None] = {}  # in the order in which they came


def cold(space: Space, chain: str) -> bool:
    """Whether :func:`warm` was not through with blocks like these in this process."""
    return chain != RAW and (space.layout, space.block_tokens, chain) not in _warmed


def warm(space: Space, chain: str, stopped: Callable[[], bool] = bool) -> None:
    """Compile and try what the blocks of a space need to go through a chain and back.

    One section of each kind is encoded and decoded, by library calls where there is nothing else
    yet; what the codecs ask for on the way is compiled afterwards, piece by piece. What they then
    ask for is next, until there is nothing new. For a worker thread: it takes up to some seconds.

    Args:
        space: Whose blocks.
        chain: How they are stored.
        stopped: Asked between the pieces, a few tenths of a second each.
    """
    try:
        while not stopped():
            _rehearse(space, chain, stopped)
            if not jit.catch_up(stopped):
                break
    except Exception as error:  # noqa: BLE001 - other chains are rehearsed, whatever a codec says
        _log.warning("codec chain %s: no plan: %s: %s", chain, type(error).__name__, error)
    if not stopped():
        _warmed[space.layout, space.block_tokens, chain] = None
        if len(_warmed) > _MOST:
            del _warmed[next(iter(_warmed))]


def _rehearse(space: Space, chain: str, stopped: Callable[[], bool]) -> None:
    import torch

    chains, seen = parse_chains(chain), set()
    with jit.later(), torch.inference_mode():
        for group in range(len(space.layout.groups)):
            for step in make_plan(space, chains, group, space.block_tokens).steps:
                kind = (step.tensor, step.dtype, step.shape, step.chain.name)
                if step.chain.name == RAW or kind in seen or not step.raw_bytes or stopped():
                    continue
                seen.add(kind)
                _there_and_back(step, _sample(step))


def _sample(step: Step) -> torch.Tensor:
    """Numbers of a normal distribution; of other dtypes bits of such, small ones."""
    import torch

    noise = torch.Generator().manual_seed(1)
    numbers = torch.randn(step.shape, generator=noise)
    kind: torch.dtype = getattr(torch, step.dtype)
    if kind.is_floating_point or kind.is_complex:
        return numbers.to(kind)
    if kind == torch.bool:
        return numbers > 0
    whole: torch.dtype = getattr(torch, INTEGERS[DTYPE_BYTES[step.dtype]])
    return numbers.mul_(9).abs_().to(whole).view(kind)


def _there_and_back(step: Step, source: torch.Tensor) -> None:
    room, back = (memoryview(bytearray(step.raw_bytes)) for _ in range(2))
    try:
        stored = store_section(step, [(0, source)], room)
        if stored.chain != RAW:
            section = Section(*step[:4], stored.chain, 0, stored.nbytes, step.raw_bytes)
            decode_section(section, room[: stored.nbytes], back)
    except Exception as error:  # noqa: BLE001 - of a codec of whoever: stores and loads go on
        _log.warning(
            "codec chain %s fails on a sample of %s (%s %s): %s: %s",
            *(step.chain.name, step.tensor, step.dtype, step.shape, type(error).__name__, error),
        )
