"""TensorRT-LLM's pools of KV as page groups: the flat pool, and layouts of layer groups.

Pages are opaque: the runtime tells how many bytes a page has, not how its kernels order them.

* The flat pool is one tensor ``[blocks, layers, kv, ...]``. All layers of a block lie side by side,
  so a block is one copy; the whole pool is taken as one layer.
* A ``KvCacheLayout`` names, per layer group, regions of memory that repeat once per page; page
  numbers count per group. Each region is taken as one layer, so the layer numbers here count
  regions. Regions that are equal on all ranks (``replicated_regions``) are kept by every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tierkv.errors import LayoutError
from tierkv.layout import GroupKind
from tierkv_adapters.serving.pages import PagedLayer, PageGroup, opaque

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["flat_groups", "layout_groups"]

_PER_TOKEN_ROLES: Final = ("key", "value", "scale", "index")


def flat_groups(
    pool: torch.Tensor, tokens_per_block: int, window: int | None = None
) -> tuple[PageGroup, ...]:
    """The one group of the flat pool.

    Args:
        pool: ``[blocks, layers, kv, elements]``, as ``register_kv_caches`` gets it.
        tokens_per_block: Tokens of a block (``kv_cache_config.tokens_per_block``).
        window: Attention window of all layers, or None.

    Raises:
        LayoutError: if the pool has another form, or its blocks do not divide into tokens.
    """
    if pool.dim() < 3:
        raise LayoutError(
            f"need the pool [blocks, layers, kv, ...], got shape {tuple(pool.shape)}: this version "
            "of TensorRT-LLM hands its KV to connectors in a form that tierkv does not know"
        )
    shape = "x".join(map(str, pool.shape[1:]))
    dtype = str(pool.dtype).removeprefix("torch.")
    packing = f"trtllm:flat:{dtype}:{shape}:{tokens_per_block}"
    layer = PagedLayer(0, {"page": opaque(pool, tokens_per_block)}, packing)
    return (_group(window, tokens_per_block, (layer,)),)


def layout_groups(layout: Any) -> tuple[PageGroup, ...]:
    """The groups of a ``KvCacheLayout``, in the order of their ids.

    Raises:
        LayoutError: if ids have gaps, a group has no regions, a page does not divide into tokens,
            or a buffer holds something else than KV per token (a recurrent state).
    """
    tokens = int(layout.tokens_per_block)
    groups = sorted(layout.groups, key=lambda group: int(group.layer_group_id))
    ids = [int(group.layer_group_id) for group in groups]
    if ids != list(range(len(ids))) or not ids:
        # lists of pages are indexed by group id: a gap would shift all that follow
        raise LayoutError(f"layer groups must be numbered from 0 without gaps, not {ids}")
    out: list[PageGroup] = []
    number = 0
    for group in groups:
        regions = (*group.regions, *getattr(group, "replicated_regions", ()))
        if not regions:
            raise LayoutError(f"layer group {group.layer_group_id} has no memory regions")
        layers = tuple(_region(r, number + i, tokens) for i, r in enumerate(regions))
        number += len(layers)
        window = None if group.window_size is None else int(group.window_size)
        out.append(_group(window, tokens, layers))
    return tuple(out)


def _group(window: int | None, tokens: int, layers: Sequence[PagedLayer]) -> PageGroup:
    kind = GroupKind.FULL if window is None else GroupKind.SLIDING
    return PageGroup(kind, window, tokens, tuple(layers))


def _region(region: Any, number: int, tokens: int) -> PagedLayer:
    names = []
    for buffer in region.buffers:
        role = str(buffer.role)
        if not any(known in role.lower() for known in _PER_TOKEN_ROLES):
            raise LayoutError(
                f"layer {buffer.layer_id} keeps {role!r}, which is no KV of tokens: tierkv cannot "
                "tell which prefix it belongs to; run this model without the connector"
            )
        expansion = int(getattr(buffer, "expansion", 1))
        if expansion != 1:
            raise LayoutError(
                f"layer {buffer.layer_id}, {role!r}: pages of {expansion} times as many tokens as "
                "those of other layers are not supported; set one tokens_per_block for all"
            )
        names.append(f"{buffer.layer_id}.{role}")
    memory: torch.Tensor = region.as_tensor(dtype=torch.uint8)
    packing = f"trtllm:region:{tokens}:{'+'.join(names)}"
    return PagedLayer(number, {"page": opaque(memory, tokens)}, packing)
