"""Whether a device has room for tiers beside what vLLM takes of it, and tiers have for blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tierkv.errors import AttachError, ConfigError
from tierkv.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.config import EngineConfig

__all__ = ["check_blocks", "check_room", "cuda_memory"]

_log = logging.getLogger(__name__)

_SHARE = 0.92  # what vLLM takes if it is told nothing


def cuda_memory(device: str) -> tuple[int, int] | None:
    """Free and total bytes of a CUDA device; None if it is none, or there is no CUDA."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return int(free), int(total)


def check_room(
    config: EngineConfig,
    share: Any,
    *,
    taken: bool,
    memory: Callable[[str], tuple[int, int] | None] = cuda_memory,
) -> None:
    """Refuse device tiers for which vLLM would leave no room.

    vLLM takes a share of each device and knows nothing of what others need there: the tiers come
    out of what it leaves.

    Args:
        config: The engine of each rank.
        share: ``gpu_memory_utilization``; None: vLLM's default.
        taken: Whether the tiers have their memory already.
        memory: Tells free and total bytes of a device, or None where it does not matter.

    Raises:
        AttachError: with what is needed, and what is free.
    """
    wanted: dict[str, int] = {}
    for tier in config.tiers:
        if tier.kind == "device":
            place = tier.device or "cuda:0"
            wanted[place] = wanted.get(place, 0) + tier.capacity_bytes
    part = _SHARE if share is None else float(share)
    for place, tiers in wanted.items():
        told = memory(place)
        if told is None:
            continue
        free, total = told
        vllm, extra = int(part * total), 0 if taken else tiers
        if vllm + extra > free:
            fits = max(0.0, (free - extra) / total)
            raise AttachError(
                f"{place}: vLLM takes {format_bytes(vllm)} (gpu_memory_utilization={part:g}) and "
                f"the device tier {format_bytes(extra)} beside it, and {format_bytes(free)} of "
                f"{format_bytes(total)} are free: set gpu_memory_utilization to at most "
                f"{int(fits * 100) / 100:g}, or a smaller capacity"
            )


def check_blocks(config: EngineConfig, block_tokens: int, block_bytes: int) -> None:
    """Refuse tiers of which none could ever hold a block; warn of one that cannot.

    A tier with a codec is not judged: how much of a block it keeps is not known beforehand.

    Args:
        config: The engine of a rank.
        block_tokens: Tokens of a block.
        block_bytes: Bytes of a block, all groups of layers together.

    Raises:
        ConfigError: with both sizes.
    """
    small = [
        tier
        for tier in config.tiers
        if tier.codec is None and config.compression is None and tier.capacity_bytes < block_bytes
    ]
    if not small:
        return
    block = f"a block ({block_tokens} tokens, {format_bytes(block_bytes)})"
    told = ", ".join(f"{tier.name!r} has {format_bytes(tier.capacity_bytes)}" for tier in small)
    if len(small) == len(config.tiers):
        raise ConfigError(
            f"no tier can hold {block}: {told}; raise the capacity to many times that",
            setting="tiers",
        )
    _log.warning("what cannot hold %s stays empty: %s; raise its capacity", block, told)
