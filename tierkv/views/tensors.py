"""Views of torch tensors: dense ones, and the pages of a pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from tierkv.abc import View
from tierkv.errors import LayoutError
from tierkv.views.sharing import refuse_shared

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from tierkv.layout import Layout

    Tensors = Mapping[int, Mapping[str, torch.Tensor]]
    Layers = Tensors | Sequence[tuple[torch.Tensor, torch.Tensor]]

__all__ = ["DenseView", "Order", "PagedView", "check", "dense", "paged"]

Order = Literal["HND", "NHD"]
"""Axes of a page: heads, tokens, dim - or tokens, heads, dim."""


def _normal(layers: object, what: str) -> dict[int, dict[str, torch.Tensor]]:
    out: dict[int, dict[str, torch.Tensor]] = {}
    if isinstance(layers, Mapping):
        for layer, named in layers.items():
            if type(layer) is not int or not isinstance(named, Mapping):
                raise LayoutError(f"{what}: need {{layer number: {{name: tensor}}}}, not {layer!r}")
            out[layer] = dict(named)
    elif isinstance(layers, Sequence) and not isinstance(layers, str | bytes):
        for index, pair in enumerate(layers):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise LayoutError(f"{what}: layer {index} needs a pair (k, v), not {_kind(pair)}")
            out[index] = {"k": pair[0], "v": pair[1]}
    else:
        raise LayoutError(
            f"{what}: need [(k, v), ...] or {{layer: {{name: tensor}}}}, not {_kind(layers)}"
        )
    for index, tensors in out.items():
        for name, tensor in tensors.items():
            _usable(tensor, f"{what}: layer {index}, {name!r}")
    return out


def _kind(thing: object) -> str:
    return f"{len(thing)} tensors" if isinstance(thing, tuple | list) else type(thing).__name__


def _usable(tensor: object, what: str) -> None:
    """Refuse what has no elements in memory that can be addressed one by one."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        hint = "; wrap it: torch.from_numpy(array)" if hasattr(tensor, "__array__") else ""
        raise LayoutError(f"{what}: need a torch tensor, not {_kind(tensor)}{hint}")
    if tensor.is_meta or tensor.layout != torch.strided:
        form = "is on the meta device" if tensor.is_meta else f"has layout {tensor.layout}"
        raise LayoutError(f"{what}: the tensor {form}: it has no plain memory")


def _rank(tensors: Tensors, rank: int, axes: str) -> None:
    for layer, named in tensors.items():
        for name, tensor in named.items():
            if tensor.dim() != rank:
                raise LayoutError(
                    f"layer {layer}, {name!r}: need {axes}, got shape {tuple(tensor.shape)}"
                )


class _TensorView(View):
    """What dense and paged views share: lookup, states, ranges, inference mode."""

    __slots__ = ("_states", "_tensors", "owned_by_engine", "tokens")

    tokens: int
    """How many tokens the view has room for."""

    def __init__(self, tensors: Tensors, states: Tensors | None, owned: bool) -> None:
        self._tensors = tensors
        self.owned_by_engine = owned
        self._states: Tensors = {} if states is None else _normal(states, "states")
        if not any(tensors.values()) and not any(self._states.values()):
            raise LayoutError("a view needs at least one tensor")

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

    def anchor(self) -> torch.Tensor | None:
        """Any one tensor of the view: it tells on which device all of them are."""
        every = (*self._tensors.values(), *self._states.values())
        return next((t for named in every for t in named.values()), None)

    def check_device(self) -> None:
        """Refuse tensors on several devices: a copy runs on the streams of one.

        Raises:
            LayoutError: naming the first tensor that is elsewhere.
        """
        first = self.anchor()
        for layer, named in (*self._tensors.items(), *self._states.items()):
            for name, tensor in named.items():
                if first is not None and tensor.device != first.device:
                    raise LayoutError(
                        f"layer {layer}, {name!r}: it is on {tensor.device}, others of the view "
                        f"on {first.device}; make one view (and one call) for each device"
                    )

    def room(self) -> int | None:
        """How many tokens it has memory for; None if it holds states alone."""
        return self.tokens if self._tensors else None

    def check_layers(self, layout: Layout) -> None:
        """Refuse tensors that the layout does not have: they are of some other model.

        Raises:
            LayoutError: naming the first one.
        """
        for per_token, mine in ((True, self._tensors), (False, self._states)):
            known = {
                (layer.index, spec.name)
                for group in layout.groups
                if group.per_token is per_token
                for layer in group.layers
                for spec in layer.tensors
            }
            for layer, named in mine.items():
                for name in named:
                    if (layer, name) not in known:
                        raise LayoutError(f"the layout has no tensor {name!r} for layer {layer}")

    def check_writable(self) -> None:
        """Refuse tensors of which two elements share memory: what is written there last stays.

        Raises:
            LayoutError: naming the first one.
        """
        named = (*self._tensors.items(), *self._states.items())
        refuse_shared([(i, name, t) for i, held in named for name, t in held.items()])

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

    def __init__(
        self, tensors: Tensors, states: Tensors | None = None, *, owned: bool = False
    ) -> None:
        super().__init__(tensors, states, owned)
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
        *,
        owned: bool = False,
    ) -> None:
        super().__init__(pools, states, owned)
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

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim of one tensor."""
        pool = self._find(layer, tensor)
        return _dtype_name(pool), pool.shape[1 if self._order == "HND" else 2], pool.shape[3]


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
    return DenseView(_normal(layers, "dense"), states, owned=owned)


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
    return PagedView(_normal(pools, "paged"), block_ids, page_tokens, order, states, owned=owned)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check(view: View, layout: Layout, tokens: int = 0, *, writing: bool = False) -> None:
    """Check that ``view`` has every tensor of ``layout``, in the right dtype and shape.

    Args:
        view: What a caller gave as his memory.
        layout: Layout of the space.
        tokens: How many tokens will be read or written.
        writing: Whether they will be written: then no two elements may share memory.

    Raises:
        LayoutError: if it is no view, has no room for the tokens, or naming the first tensor that
            is missing, differs, is not of this layout, is on another device than the rest, or
            shares memory with another.
    """
    if not isinstance(view, View):
        raise LayoutError(
            f"need a view of your memory, not {_kind(view)}; wrap it: tierkv.views.dense(kv)"
        )
    if isinstance(view, _TensorView):
        view.check_device()
        view.check_layers(layout)
        if writing:
            view.check_writable()
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
    room = view.room()
    if room is not None and room < tokens:
        raise LayoutError(f"the view has room for {room} tokens, {tokens} are needed")
