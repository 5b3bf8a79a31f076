"""Views: the caller's KV memory, seen token by token, without a copy.

``dense`` wraps tensors ``[heads, tokens, dim]`` per layer; ``paged`` wraps the page pools of a
serving engine. Index 0 is always token 0. A view owns nothing and is cheap to make.

Writes happen in inference mode, so that both ordinary tensors and tensors made under
``torch.inference_mode()`` can be filled, and no autograd history is recorded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from tierkv.abc import View
from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from tierkv.layout import Layout

    Tensors = Mapping[int, Mapping[str, torch.Tensor]]
    Layers = Tensors | Sequence[tuple[torch.Tensor, torch.Tensor]]

__all__ = ["DenseView", "Order", "PagedView", "check", "dense", "over", "paged"]

Order = Literal["HND", "NHD"]
"""Axes of a page: heads, tokens, dim - or tokens, heads, dim."""


def _normal(layers: Layers, what: str) -> dict[int, dict[str, torch.Tensor]]:
    if isinstance(layers, Mapping):
        return {int(layer): dict(tensors) for layer, tensors in layers.items()}
    out: dict[int, dict[str, torch.Tensor]] = {}
    for index, pair in enumerate(layers):
        if len(pair) != 2:
            raise LayoutError(f"{what}: layer {index} needs a pair (k, v), not {len(pair)} tensors")
        out[index] = {"k": pair[0], "v": pair[1]}
    return out


def _rank(tensors: Tensors, rank: int, axes: str) -> None:
    for layer, named in tensors.items():
        for name, tensor in named.items():
            if tensor.dim() != rank:
                raise LayoutError(
                    f"layer {layer}, {name!r}: need {axes}, got shape {tuple(tensor.shape)}"
                )


class _TensorView(View):
    """What dense and paged views share: lookup, states, ranges, inference mode."""

    __slots__ = ("_states", "_tensors", "tokens")

    tokens: int
    """How many tokens the view has room for."""

    def __init__(self, tensors: Tensors, states: Tensors | None) -> None:
        self._tensors = tensors
        self._states: Tensors = {} if states is None else _normal(states, "states")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._tensors)} layers, {self.tokens} tokens>"

    def _find(self, layer: int, tensor: str) -> torch.Tensor:
        try:
            return self._tensors[layer][tensor]
        except KeyError:
            raise LayoutError(f"the view has no tensor {tensor!r} for layer {layer}") from None

    def _range(self, layer: int, tensor: str, start: int, stop: int, room: int) -> None:
        if not 0 <= start <= stop <= room:
            raise LayoutError(
                f"layer {layer}, {tensor!r}: tokens [{start}, {stop}) are outside the view, "
                f"which has room for {room}"
            )

    def state(self, layer: int, tensor: str) -> torch.Tensor:
        """The whole tensor of a recurrent layer.

        Raises:
            LayoutError: if the view was made without it.
        """
        try:
            return self._states[layer][tensor]
        except KeyError:
            raise LayoutError(f"the view has no state {tensor!r} for layer {layer}") from None

    def writing(self) -> AbstractContextManager[None]:
        """Inference mode."""
        import torch

        return torch.inference_mode()

    @abstractmethod
    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of one tensor.

        Raises:
            LayoutError: if the view has no such tensor.
        """


class DenseView(_TensorView):
    """Tensors ``[heads, tokens, dim]``; see :func:`dense`."""

    __slots__ = ()

    def __init__(self, tensors: Tensors, states: Tensors | None = None) -> None:
        super().__init__(tensors, states)
        _rank(tensors, 3, "[heads, tokens, dim]")
        self.tokens = min(
            (t.shape[1] for named in tensors.values() for t in named.values()), default=0
        )

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """The one slice of the caller's tensor; see :meth:`tierkv.abc.View.pieces`."""
        whole = self._find(layer, tensor)
        self._range(layer, tensor, start, stop, whole.shape[1])
        return ((start, whole.narrow(1, start, stop - start)),)

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of one tensor."""
        whole = self._find(layer, tensor)
        return _dtype_name(whole), whole.shape[0], whole.shape[2]


class PagedView(_TensorView):
    """Pages of a pool; see :func:`paged`."""

    __slots__ = ("_block_ids", "_order", "_page_tokens")

    def __init__(
        self,
        pools: Tensors,
        block_ids: Sequence[int],
        page_tokens: int | None,
        order: Order,
        states: Tensors | None = None,
    ) -> None:
        super().__init__(pools, states)
        if order not in get_args(Order):
            raise LayoutError(f"order must be 'HND' or 'NHD', not {order!r}")
        _rank(pools, 4, "[pages, heads, page tokens, dim] (HND) or [pages, page tokens, ...] (NHD)")
        self._order = order
        axis = 2 if order == "HND" else 1
        sizes = {t.shape[axis] for named in pools.values() for t in named.values()}
        if page_tokens is not None:
            sizes.add(page_tokens)
        if len(sizes) != 1 or min(sizes) < 1:
            raise LayoutError(
                f"pools must agree on the tokens of a page (axis {axis} in order {order}); "
                f"page_tokens={page_tokens}, found {sorted(sizes)}"
            )
        self._page_tokens = sizes.pop()
        self._block_ids = tuple(int(page) for page in block_ids)
        pages = min((t.shape[0] for named in pools.values() for t in named.values()), default=0)
        if len(set(self._block_ids)) != len(self._block_ids):
            raise LayoutError(
                "block_ids name a page twice: two ranges of tokens would share memory"
            )
        if any(not 0 <= page < pages for page in self._block_ids):
            raise LayoutError(f"block_ids must be pages from 0 to {pages - 1}")
        self.tokens = len(self._block_ids) * self._page_tokens

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """One slice per page; see :meth:`tierkv.abc.View.pieces`."""
        pool = self._find(layer, tensor)
        self._range(layer, tensor, start, stop, self.tokens)
        size = self._page_tokens
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

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of one tensor."""
        pool = self._find(layer, tensor)
        return _dtype_name(pool), pool.shape[1 if self._order == "HND" else 2], pool.shape[3]


def dense(layers: Layers, states: Tensors | None = None) -> DenseView:
    """View of one tensor ``[heads, tokens, dim]`` per layer and name; any strides, any device.

    Args:
        layers: ``{layer: {"k": tensor, "v": tensor}}``, or pairs ``[(k, v), ...]`` for layers
            0, 1, 2, ... Tensors may have more room than there are tokens.
        states: Whole tensors of recurrent layers, ``{layer: {name: tensor}}``.

    Raises:
        LayoutError: if a tensor has not three axes.
    """
    return DenseView(_normal(layers, "dense"), states)


def paged(
    pools: Layers,
    block_ids: Sequence[int],
    *,
    page_tokens: int | None = None,
    order: Order = "HND",
    states: Tensors | None = None,
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

    Raises:
        LayoutError: if pools disagree, or a page does not exist or is named twice.
    """
    return PagedView(_normal(pools, "paged"), block_ids, page_tokens, order, states)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check(view: View, layout: Layout) -> None:
    """Check that ``view`` has every tensor of ``layout`` in the right dtype and shape.

    Raises:
        LayoutError: naming the first tensor that is missing or differs.
    """
    for group in layout.groups:
        for layer in group.layers:
            for spec in layer.tensors:
                if group.per_token:
                    found: tuple[Any, ...] = view.sample(layer.index, spec.name)
                else:
                    state = view.state(layer.index, spec.name)
                    found = (_dtype_name(state), *state.shape)
                if found != (spec.dtype, *spec.shape):
                    raise LayoutError(
                        f"layer {layer.index}, {spec.name!r}: the layout wants {spec.dtype} "
                        f"{spec.shape}, the view has {found[0]} {found[1:]}"
                    )


class _Exposed:
    """Hands the address of read-only memory to numpy as if it could be written.

    torch has no read-only tensors and warns about making one; the tensors made here are only read.
    """

    __slots__ = ("__array_interface__", "_keep")

    __array_interface__: dict[str, Any]

    def __init__(self, memory: memoryview) -> None:
        import numpy as np

        interface: dict[str, Any] = dict(np.frombuffer(memory, np.uint8).__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._keep = memory


def over(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Tensor over the first bytes of ``memory``: no copy. Only read it if ``memory`` is read-only.

    The tensor keeps the memory's exporter alive, not its meaning: it must not outlive the buffer's
    owner.

    Args:
        memory: Contiguous bytes, at least as many as ``shape`` needs.
        dtype: torch's name of the dtype.
        shape: Shape of the tensor, contiguous.
    """
    import numpy as np
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=kind)
    if not memory.readonly:
        return torch.frombuffer(memory, dtype=kind, count=count).view(shape)
    nbytes = count * kind.itemsize
    return torch.from_numpy(np.asarray(_Exposed(memory[:nbytes]))).view(kind).view(shape)
