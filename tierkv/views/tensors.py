"""Views of torch tensors: dense ones, and the pages of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from tierkv.errors import LayoutError
from tierkv.views.memory import TensorView, check_rank, dtype_name, normal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from tierkv.views.memory import Layers, Tensors

__all__ = ["DenseView", "Order", "PagedView", "dense", "paged"]

Order = Literal["HND", "NHD"]
"""Axes of a page: heads, tokens, dim - or tokens, heads, dim."""


def _check_ranges(starts: NDArray[np.int64], tokens: int, room: int) -> None:
    if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= room - tokens:
        raise LayoutError(
            f"tokens [{starts.min()}, {starts.max() + tokens}) are outside the view, which has "
            f"room for {room}"
        )


class DenseView(TensorView):
    """Tensors ``[heads, tokens, dim]``; see :func:`dense`."""

    __slots__ = ()

    def __init__(
        self, tensors: Tensors, states: Tensors | None = None, *, owned: bool = False
    ) -> None:
        super().__init__(tensors, states, owned)
        self.measure()

    def measure(self) -> None:
        """As many tokens as the shortest tensor has; see :meth:`TensorView.measure`."""
        check_rank(self._tensors, 3, "[heads, tokens, dim]")
        shapes = [t.shape for named in self._tensors.values() for t in named.values()]
        self.tokens = min((shape[1] for shape in shapes), default=0)

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """The one slice of the caller's tensor; see :meth:`tierkv.abc.View.pieces`."""
        whole = self._find(layer, tensor)
        self._range(layer, tensor, start, stop, whole.shape[1])
        return ((start, whole.narrow(1, start, stop - start)),)

    def range_tokens(self, tokens: int) -> int:
        """Each block is one range."""
        return tokens

    def geometry(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, int, int, int]]:
        """Heads, dim and steps; there are no pages."""
        shape = tensor.shape
        return shape[0], shape[2], (0, *tensor.stride())  # type: ignore[return-value]

    def locate(
        self, starts: NDArray[np.int64], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where ranges begin; see :meth:`tierkv.abc.View.locate`."""
        _check_ranges(starts, tokens, self.tokens)
        return starts * 0, starts

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of one tensor."""
        whole = self._find(layer, tensor)
        return dtype_name(whole), whole.shape[0], whole.shape[2]


class PagedView(TensorView):
    """Pages of a pool; see :func:`paged`."""

    __slots__ = ("_block_ids", "_order", "_page_tokens", "_pages", "_wanted")

    def __init__(
        self,
        pools: Tensors,
        block_ids: Sequence[int],
        page_tokens: int | None,
        order: Order,
        states: Tensors | None = None,
        *,
        owned: bool = False,
    ) -> None:
        super().__init__(pools, states, owned)
        if order not in get_args(Order):
            raise LayoutError(f"order must be 'HND' or 'NHD', not {order!r}")
        self._order = order
        self._wanted = page_tokens
        self._block_ids = tuple(int(page) for page in block_ids)
        if len(set(self._block_ids)) != len(self._block_ids):
            raise LayoutError(
                "block_ids name a page twice: two ranges of tokens would share memory"
            )
        self._pages: NDArray[np.int64] | None = None
        self.measure()

    def measure(self) -> None:
        """As many tokens as the pages of this sequence have; see :meth:`TensorView.measure`."""
        order, wanted = self._order, self._wanted
        check_rank(
            self._tensors,
            4,
            "[pages, heads, page tokens, dim] (HND) or [pages, page tokens, ...] (NHD)",
        )
        shapes = [t.shape for named in self._tensors.values() for t in named.values()]
        axis = 2 if order == "HND" else 1
        sizes = {shape[axis] for shape in shapes}
        if wanted is not None:
            sizes.add(wanted)
        if len(sizes) != 1 or min(sizes) < 1:
            raise LayoutError(
                f"pools must agree on the tokens of a page (axis {axis} in order {order}); "
                f"page_tokens={wanted}, found {sorted(sizes)}"
            )
        pages = min((shape[0] for shape in shapes), default=0)
        if any(not 0 <= page < pages for page in self._block_ids):
            raise LayoutError(f"block_ids must be pages from 0 to {pages - 1}")
        self._page_tokens = sizes.pop()
        self.tokens = len(self._block_ids) * self._page_tokens

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """One slice per page; see :meth:`tierkv.abc.View.pieces`."""
        pool = self._find(layer, tensor)
        size = self._page_tokens
        self._range(layer, tensor, start, stop, len(self._block_ids) * size)
        if stop - start == size and start % size == 0:
            whole = pool[self._block_ids[start // size]]
            return ((start, whole if self._order == "HND" else whole.transpose(0, 1)),)
        out: list[tuple[int, torch.Tensor]] = []
        first = start
        while first < stop:
            page, low = divmod(first, size)
            high = min(size, low + stop - first)
            whole = pool[self._block_ids[page]]
            if self._order == "NHD":
                whole = whole.transpose(0, 1)
            part = whole if high - low == size else whole.narrow(1, low, high - low)
            out.append((first, part))
            first += high - low
        return out

    def range_tokens(self, tokens: int) -> int:
        """Blocks are parts of a page, or pages are parts of a block."""
        size = self._page_tokens
        if not tokens or (size % tokens and tokens % size):
            return 0
        return min(size, tokens)

    def geometry(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, int, int, int]]:
        """Heads, dim and steps of a pool."""
        shape, (page, first, second, dim) = tensor.shape, tensor.stride()
        if self._order == "HND":
            return shape[1], shape[3], (page, first, second, dim)
        return shape[2], shape[3], (page, second, first, dim)

    def locate(
        self, starts: NDArray[np.int64], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where ranges begin; see :meth:`tierkv.abc.View.locate`."""
        import numpy as np

        _check_ranges(starts, tokens, self.tokens)
        if self._pages is None:
            self._pages = np.array(self._block_ids, np.int64)
        size = self._page_tokens
        return self._pages[starts // size], starts % size

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of one tensor."""
        pool = self._find(layer, tensor)
        return dtype_name(pool), pool.shape[1 if self._order == "HND" else 2], pool.shape[3]


def dense(layers: Layers, states: Tensors | None = None, *, owned: bool = False) -> DenseView:
    """View of one tensor ``[heads, tokens, dim]`` per layer and name; any strides, any device.

    Args:
        layers: ``{layer: {"k": tensor, "v": tensor}}``, or pairs ``[(k, v), ...]`` for layers
            0, 1, 2, ... Tensors may have more room than there are tokens.
        states: Whole tensors of recurrent layers, ``{layer: {name: tensor}}``.
        owned: See :attr:`tierkv.abc.View.owned_by_engine`.

    Raises:
        LayoutError: if a tensor has not three axes.
    """
    return DenseView(normal(layers, "dense"), states, owned=owned)


def paged(
    pools: Layers,
    block_ids: Sequence[int],
    *,
    page_tokens: int | None = None,
    order: Order = "HND",
    states: Tensors | None = None,
    owned: bool = False,
) -> PagedView:
    """View of the pages ``block_ids``, in that order, of a pool per layer and name.

    Args:
        pools: ``{layer: {"k": pool, "v": pool}}`` or pairs ``[(k, v), ...]``. A pool is
            ``[pages, heads, page tokens, dim]`` (HND) or ``[pages, page tokens, heads, dim]``.
        block_ids: Pages of this sequence; the first holds token 0.
        page_tokens: Tokens of a page; given, it is checked against the pools (which tells apart
            HND and NHD).
        order: Axes of a page.
        states: Whole tensors of recurrent layers, ``{layer: {name: tensor}}``.
        owned: See :attr:`tierkv.abc.View.owned_by_engine`.

    Raises:
        LayoutError: if pools disagree, or a page does not exist or is named twice.
    """
    return PagedView(normal(pools, "paged"), block_ids, page_tokens, order, states, owned=owned)
