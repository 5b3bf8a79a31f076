"""The page pools of a serving engine, and views of the pages of one request.

A serving engine keeps the KV of all requests in pools of pages. Layers whose requests hold the same
list of pages form a *page group*: full attention is one, each window size another, recurrent
states a third. A view of a request is made anew for every copy and costs little: what is known of
the pools is kept by :class:`PagePools`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Literal

import torch

from tierkv.abc import MemoryMap
from tierkv.errors import LayoutError
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, TensorSpec
from tierkv.views.sharing import refuse_shared
from tierkv_adapters.serving.page_views import PagesView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

__all__ = ["PageGroup", "PagePools", "PagedLayer", "block_tokens_for", "opaque"]

_REMEMBERED = 32


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """One layer's part of the pools.

    Attributes:
        index: Number of the layer in the model; unique over all groups.
        tensors: By name. Per token: ``[pages, heads, page tokens, dim]``, views of the pool with
            any strides; pages that nobody looks into: uint8 ``[pages, 1, page tokens, bytes per
            token]``, one tensor ``"page"`` (see :func:`opaque`). A recurrent state: ``[pages,
            ...]``.
        packing: Names an inner order of the bytes that the axes do not tell, e.g.
            ``"vllm:CPU_ATTN:LBHNC"``. Pages of different packing never share blocks, nor do those
            of one packing with another number of tokens.
    """

    index: int
    tensors: Mapping[str, torch.Tensor]
    packing: str = ""


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Layers of which each request holds the same pages.

    Attributes:
        kind: What a prefix needs of them.
        window: Sliding window in tokens, or None.
        page_tokens: Tokens of a page. Of a state: tokens from one snapshot to the next.
        layers: The layers.
    """

    kind: GroupKind
    window: int | None
    page_tokens: int
    layers: tuple[PagedLayer, ...]

    @property
    def per_token(self) -> bool:
        """Whether its pages have a token axis."""
        return self.kind is not GroupKind.STATE

    @property
    def drops(self) -> bool:
        """Whether requests give pages of it back while they run: what left a window, old states."""
        return self.kind in (GroupKind.SLIDING, GroupKind.STATE)


def opaque(pool: torch.Tensor, page_tokens: int | None = None) -> torch.Tensor:
    """The bytes of each page, without a copy, for pages whose inner order is nobody's business.

    Args:
        pool: ``[pages, ...]``, any dtype. Each page is one stretch of memory, whatever the order
            of its axes; pages may have anything between them.
        page_tokens: Tokens of a page; None for recurrent states.

    Returns:
        uint8 ``[pages, 1, page_tokens, bytes per token]``, or ``[pages, bytes]`` for states.

    Raises:
        LayoutError: if a page is not one stretch of memory, or its bytes do not divide evenly.
    """
    if pool.dim() < 2:
        raise LayoutError(f"need a pool [pages, ...], not shape {tuple(pool.shape)}")
    strides = pool.stride()
    order = sorted(range(1, pool.dim()), key=lambda axis: (-strides[axis], axis))
    inner = pool.permute(0, *order)
    due = 1
    for size, step in zip(reversed(inner.shape[1:]), reversed(inner.stride()[1:]), strict=True):
        if size > 1 and step != due:
            raise LayoutError(
                f"a page of shape {tuple(pool.shape[1:])} with strides {pool.stride()[1:]} is not "
                "one stretch of memory; give its parts (K, V) as tensors of their own"
            )
        due *= size
    count, nbytes, step = pool.shape[0], due * pool.element_size(), pool.stride(0)
    flat = inner.as_strided((count, due), (step, 1)).view(torch.uint8)
    if page_tokens is None:
        return flat
    if page_tokens < 1 or nbytes % page_tokens:
        raise LayoutError(f"a page of {nbytes} bytes cannot be divided into {page_tokens} tokens")
    each = nbytes // page_tokens
    return flat.as_strided((count, 1, page_tokens, each), (flat.stride(0), nbytes, each, 1))


def block_tokens_for(groups: Sequence[PageGroup], wanted: int) -> int:
    """Tokens of a block: ``wanted``, rounded up to whole pages of every group.

    >>> block_tokens_for([PageGroup(GroupKind.FULL, None, 48, ())], 64)
    96

    Raises:
        LayoutError: if ``wanted`` or the tokens of a page are no positive numbers.
    """
    sizes = [wanted, *(group.page_tokens for group in groups)]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise LayoutError(f"tokens of blocks and pages are positive numbers, not {sizes}")
    step = lcm(*[group.page_tokens for group in groups])
    return (wanted + step - 1) // step * step


class PagePools:
    """All page groups of one rank.

    Args:
        groups: The groups, in the order in which every list of pages names them.
        numbered: ``"together"``: a page number is one owner's, whatever the group, as where groups
            share one pool and what is given to one takes it from all; ``"apart"``: each group has
            pages 0, 1, ... of its own.

    Raises:
        LayoutError: naming the first tensor that cannot be used: it has other axes than its group
            needs, other pages or tokens than the rest, is on another device, or shares memory with
            another one of its group. (Groups may share memory: they hold different pages of it.)
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        *,
        numbered: Literal["together", "apart"] = "together",
    ) -> None:
        if not groups:
            raise LayoutError("a rank needs at least one group of pages")
        self.groups = tuple(groups)
        self._apart = numbered == "apart"
        self.pages: list[int] = []
        """How many pages each group's pools have."""
        self._group_of: dict[int, int] = {}
        for number, group in enumerate(self.groups):
            self.pages.append(_checked(group, f"page group {number}"))
            for layer in group.layers:
                if layer.index in self._group_of:
                    raise LayoutError(f"layer {layer.index} is in two page groups")
                self._group_of[layer.index] = number
        self.tensors = {
            (layer.index, name): tensor
            for group in self.groups
            for layer in group.layers
            for name, tensor in layer.tensors.items()
        }
        self.anchor = next(iter(self.tensors.values()))
        """Any one tensor: it tells the device of all of them."""
        devices = {tensor.device for tensor in self.tensors.values()}
        if len(devices) > 1:
            raise LayoutError(
                f"the pools of one rank are on several devices: {sorted(map(str, devices))}"
            )
        self._maps: dict[tuple[int, int], tuple[object, MemoryMap | None]] = {}

    def __repr__(self) -> str:
        kinds = ", ".join(f"{g.kind.value} x{len(g.layers)}" for g in self.groups)
        return f"<PagePools {kinds}; {self.pages} pages>"

    def group_of(self, layer: int) -> int:
        """Number of the group that a layer is in.

        Raises:
            LayoutError: if there is no such layer.
        """
        try:
            return self._group_of[layer]
        except KeyError:
            raise LayoutError(f"the pools have no layer {layer}") from None

    def owned(self, pages: Sequence[Sequence[int]]) -> list[set[int]]:
        """Per group, the pages of it that change hands where these, listed by group, do."""
        if self._apart:
            return [set(each) for each in pages]
        return [set().union(*pages)] * len(self.groups)

    def layout(self, block_tokens: int) -> Layout:
        """The layout of blocks of ``block_tokens`` tokens, whole pages all of them.

        Raises:
            LayoutError: if the pages of a group do not fill a block.
        """
        for number, group in enumerate(self.groups):
            if block_tokens < 1 or block_tokens % group.page_tokens:
                raise LayoutError(
                    f"page group {number} has pages of {group.page_tokens} tokens, which do not "
                    f"fill blocks of {block_tokens}; see block_tokens_for()"
                )
        return Layout(tuple(_described(group) for group in self.groups))

    def view(
        self, pages: Sequence[Sequence[int]], tokens: int | None = None, *, spill: bool = False
    ) -> PagesView:
        """The KV of a request.

        Args:
            pages: Per group, the request's pages; the first holds token 0, -1 is no memory.
            tokens: How many tokens are meant, whole pages; None: all that the pages hold. The
                state of a recurrent layer is the one behind the last of them.
            spill: Whether a range of which only some pages have memory can be written: what falls
                on the others goes nowhere. It happens where a window begins inside a block. Else
                such a range is refused.

        Raises:
            LayoutError: if a list of pages is missing, a page does not exist, or is named twice.
        """
        return PagesView(self, pages, tokens, spill=spill)

    def map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> MemoryMap | None:
        """The rule of :meth:`tierkv.abc.View.map` for sections of one group; it holds for all."""
        key = (id(sections), tokens)
        known = self._maps.get(key)
        if known is None or known[0] is not sections:
            if len(self._maps) >= _REMEMBERED:
                self._maps = {}  # a thread that is at the old one remembers nothing here
            known = self._maps[key] = (sections, self._map(sections, tokens))
        return known[1]

    def _map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> MemoryMap | None:
        numbers = {self._group_of.get(section[0], -1) for section in sections}
        if len(numbers) != 1 or -1 in numbers:
            return None
        group = self.groups[numbers.pop()]
        size = group.page_tokens
        if not group.per_token or not tokens or tokens % size:
            return None
        tensors, steps = [], []
        for layer, name, dtype, shape in (section[:4] for section in sections):
            tensor = self.tensors.get((layer, name))
            if (
                tensor is None
                or not tensor.is_cpu
                or tensor.dtype is not getattr(torch, dtype, None)
            ):
                return None
            if (tensor.shape[1], tokens, tensor.shape[3]) != tuple(shape):
                return None
            tensors.append(tensor)
            steps.append((tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)))
        return MemoryMap(size, tensors, steps)

    def raw_bytes(self, start: int, stop: int) -> int:
        """Raw bytes that bringing tokens ``[start, stop)`` into the pages writes, at most."""
        total = 0
        for group in self.groups:
            size = group.page_tokens
            first = start if group.window is None else max(start, stop - group.window + 1)
            pages = -(-stop // size) - first // size if group.per_token else 1
            total += max(0, pages) * sum(
                prod(tensor.shape[1:]) * tensor.element_size()
                for layer in group.layers
                for tensor in layer.tensors.values()
            )
        return total


def _described(group: PageGroup) -> Group:
    layers = []
    for layer in group.layers:
        specs = []
        packing = layer.packing
        if packing and group.per_token:  # an order inside of pages is one of pages of this size
            packing = f"{packing}/{group.page_tokens}"
        for name, tensor in layer.tensors.items():
            shape = tuple(tensor.shape[1:])
            if group.per_token:
                shape = (shape[0], shape[2])
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name, dtype, shape, packing))
        layers.append(Layer(layer.index, tuple(specs)))
    return Group(group.kind, tuple(layers), group.window)


def _checked(group: PageGroup, what: str) -> int:
    """Check one group; how many pages its pools have."""
    block_tokens_for([group], 1)
    if not group.layers:
        raise LayoutError(f"{what} has no layers")
    counts: set[int] = set()
    for layer in group.layers:
        if not layer.tensors:
            raise LayoutError(f"{what}: layer {layer.index} has no tensors")
        for name, tensor in layer.tensors.items():
            where = f"{what}: layer {layer.index}, {name!r}"
            if str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
                raise LayoutError(f"{where}: no layout has dtype {tensor.dtype}; use opaque()")
            if group.per_token and (tensor.dim() != 4 or tensor.shape[2] != group.page_tokens):
                raise LayoutError(
                    f"{where}: need [pages, heads, {group.page_tokens} tokens, dim], got "
                    f"{tuple(tensor.shape)}"
                )
            if tensor.dim() < 2:
                raise LayoutError(f"{where}: need [pages, ...], got {tuple(tensor.shape)}")
            counts.add(tensor.shape[0])
    if len(counts) != 1:
        raise LayoutError(f"{what}: its tensors disagree on the number of pages: {sorted(counts)}")
    refuse_shared(
        (layer.index, name, tensor)
        for layer in group.layers
        for name, tensor in layer.tensors.items()
    )
    return counts.pop()
