"""Stand-ins for ``KvCacheLayout`` and its parts, over pages in this process's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tierkv.testing.trtllm.content import DTYPE

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.testing.trtllm.modes import Mode

__all__ = ["BufferRef", "GroupLayout", "KvLayout", "Region", "describe", "flat_pool"]


@dataclass(frozen=True)
class BufferRef:
    """``KvCacheBufferRef``: K or V of one layer."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class Region:
    """``KvCacheRegion``: bytes of page ``i`` are at ``base + stride * i``, ``size`` of them."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[BufferRef, ...]
    pool: Tensor = field(repr=False, compare=False)
    """uint8 ``[num_slots, stride]`` whose columns from ``offset`` on it is; not upstream's."""
    offset: int = 0

    def address_of(self, slot_id: int) -> int:
        """Where a page is.

        Raises:
            IndexError: There is no such page; -1 is none.
        """
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(f"page {slot_id} of {self.num_slots}")
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A view ``[num_slots, size // itemsize]``; page -1 is the last one."""
        return self.pool[:, self.offset : self.offset + self.size].view(dtype)

    def slot_tensor(self, slot_id: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """One page of it.

        Raises:
            IndexError: There is no such page; -1 is none.
        """
        self.address_of(slot_id)
        return self.as_tensor(dtype)[slot_id]


@dataclass(frozen=True)
class GroupLayout:
    """``KvCacheLayerGroupLayout``: the layers that share page numbers."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[Region, ...]
    replicated_regions: tuple[Region, ...] = ()

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all of its regions."""
        return sum(region.size for region in self.regions)


@dataclass(frozen=True)
class KvLayout:
    """``KvCacheLayout``: what a worker gets instead of one tensor."""

    tokens_per_block: int
    groups: tuple[GroupLayout, ...]
    gpu_pool_mapping_bytes: int | None = None
    dtype: torch.dtype = DTYPE

    def group(self, layer_group_id: int) -> GroupLayout:
        """The group of this number.

        Raises:
            KeyError: There is none.
        """
        for group in self.groups:
            if group.layer_group_id == layer_group_id:
                return group
        raise KeyError(f"no layer group {layer_group_id}")

    def group_of_layer(self, layer_id: int) -> GroupLayout:
        """The group that a layer is in.

        Raises:
            KeyError: It is in none.
        """
        for group in self.groups:
            if layer_id in group.layer_ids:
                return group
        raise KeyError(f"layer {layer_id} is in no group")

    def as_single_pool_tensor(self) -> Tensor | None:
        """The pages as ``[pages, layers, kv, elements]``, or None if one tensor cannot be that."""
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        group = self.groups[0]
        pages = group.regions[0].as_tensor(self.dtype)
        return pages.view(len(pages), len(group.layer_ids), 2, -1)


def flat_pool(pages: Tensor) -> Tensor:
    """The first API's pool ``[pages, layers, kv, elements]`` over ``[pages, layers, kv, ...]``."""
    return pages.view(*pages.shape[:3], -1).view(DTYPE)


def describe(mode: Mode, pages: list[Tensor]) -> KvLayout:
    """The layout over one rank's pages, ``[pages, layers, kv, ...]`` uint8 per group.

    A single group is one region; where there are several, each is cut into two, whose stride is
    larger than their size.
    """
    groups = []
    for number, (window, pool) in enumerate(zip(mode.windows, pages, strict=True)):
        layers = mode.layers_of(number)
        refs = tuple(BufferRef(layer, role) for layer in layers for role in ("key", "value"))
        rows = pool.view(len(pool), -1)
        each = rows.shape[1] // len(refs)
        cuts = (0, len(refs)) if len(mode.windows) == 1 else (0, len(refs) // 2, len(refs))
        regions = tuple(
            Region(
                base=rows.data_ptr() + a * each,
                size=(b - a) * each,
                stride=rows.shape[1],
                num_slots=len(rows),
                buffers=refs[a:b],
                pool=rows,
                offset=a * each,
            )
            for a, b in pairwise(cuts)
        )
        groups.append(GroupLayout(number, layers, window, regions))
    return KvLayout(mode.tokens_per_block, tuple(groups))
