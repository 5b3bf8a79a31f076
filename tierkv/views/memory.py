"""What all views of torch tensors share: lookup, checks, states, one rule for every block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierkv.abc import MemoryMap, View
from tierkv.errors import LayoutError
from tierkv.views.sharing import refuse_shared

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from tierkv.layout import Layout

    Tensors = Mapping[int, Mapping[str, torch.Tensor]]
    Layers = Tensors | Sequence[tuple[torch.Tensor, torch.Tensor]]

__all__ = ["TensorView", "check", "check_rank", "dtype_name", "normal"]

_REMEMBERED = 8


def normal(layers: object, what: str) -> dict[int, dict[str, torch.Tensor]]:
    """Tensors by layer and name, whichever way they were given.

    Raises:
        LayoutError: naming what cannot be used.
    """
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
    if tensor.is_neg():  # the imaginary part of a conjugate: its memory has the other sign
        raise LayoutError(f"{what}: the tensor is negated lazily; call resolve_neg() first")


def _origin(view: View, method: str) -> type:
    return next(kind for kind in type(view).__mro__ if method in vars(kind))


def check_rank(tensors: Tensors, rank: int, axes: str) -> None:
    """Refuse tensors of another number of axes.

    Raises:
        LayoutError: naming the first one.
    """
    for layer, named in tensors.items():
        for name, tensor in named.items():
            if tensor.dim() != rank:
                raise LayoutError(
                    f"layer {layer}, {name!r}: need {axes}, got shape {tuple(tensor.shape)}"
                )


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype, without the module."""
    return str(tensor.dtype).removeprefix("torch.")


class TensorView(View):
    """What dense and paged views share: lookup, states, ranges, inference mode."""

    __slots__ = (
        "_addresses",
        "_checked",
        "_every",
        "_maps",
        "_seen",
        "_states",
        "_tensors",
        "tokens",
    )

    tokens: int
    """How many tokens the view has room for."""

    def __init__(self, tensors: Tensors, states: Tensors | None, owned: bool) -> None:
        self._tensors = tensors
        self.owned_by_engine = owned
        self._states: Tensors = {} if states is None else normal(states, "states")
        every = (*tensors.values(), *self._states.values())
        self._every = [t for named in every for t in named.values()]
        if not self._every:
            raise LayoutError("a view needs at least one tensor")
        self._seen: list[object] | None = None
        self._addresses: list[int] | None = None
        self._checked: list[tuple[Layout, bool]] = []
        self._maps: dict[tuple[int, int], tuple[object, MemoryMap | None]] = {}

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

    # ------------------------------------------------------------------ what is remembered

    def renew(self) -> None:
        """Forget what was found out if a tensor has other memory or strides than it had then.

        Raises:
            LayoutError: as :meth:`measure`.
        """
        seen: list[object] = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self._every]
        if seen != self._seen:
            self.measure()  # every time, until they are of a shape that can be used
            self._seen = seen
            self._addresses = [t.data_ptr() for t in self._every]
            self._checked.clear()
            self._maps = {}  # a thread that is at the old one remembers nothing here

    def fits(self, layout: Layout, *, writing: bool) -> None:
        """Check that the view has every tensor of ``layout``, and no other ones.

        What was found out holds for as long as the tensors stay where they are.

        Raises:
            LayoutError: naming the first tensor that does not fit; see :func:`check`.
        """
        self.renew()
        if any(known is layout and wrote >= writing for known, wrote in self._checked):
            return
        self.check_device()
        self.check_memory()
        self.check_layers(layout)
        if writing:
            self.check_writable()
        _check_tensors(self, layout)
        del self._checked[: -_REMEMBERED + 1]
        self._checked.append((layout, writing))

    def map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> MemoryMap | None:
        """One rule for where all blocks are; see :meth:`tierkv.abc.View.map`."""
        if self._addresses != [t.data_ptr() for t in self._every]:
            self.renew()
        maps, key = self._maps, (id(sections), tokens)
        known = maps.get(key)
        if known is None or known[0] is not sections:
            if len(maps) >= _REMEMBERED:
                maps.clear()
            known = maps[key] = (sections, self._map(sections, tokens))
        return known[1]

    def _map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> MemoryMap | None:
        import torch

        if len({_origin(self, name) for name in ("pieces", "range_tokens", "geometry")}) > 1:
            return None  # a subclass has pieces of its own, and said no rule for them
        size = self.range_tokens(tokens)
        tensors, steps = [], []
        kinds: dict[str, torch.dtype | None] = {}
        for section in sections:
            layer, name, dtype, shape = section[:4]
            tensor = self._tensors.get(layer, {}).get(name)
            if dtype not in kinds:
                kinds[dtype] = getattr(torch, dtype, None)
            if size == 0 or tensor is None or not tensor.is_cpu or tensor.dtype is not kinds[dtype]:
                return None
            heads, dim, step = self.geometry(tensor)
            if (heads, tokens, dim) != shape:
                return None
            tensors.append(tensor)
            steps.append(step)
        return MemoryMap(size, tensors, steps) if tensors else None

    @abstractmethod
    def range_tokens(self, tokens: int) -> int:
        """Tokens of the longest range that blocks of ``tokens`` tokens consist of; 0: of none."""

    @abstractmethod
    def geometry(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, int, int, int]]:
        """Heads, dim, and steps from a page, head, token and element to the next."""

    @abstractmethod
    def measure(self) -> None:
        """Find out how many tokens there is room for: tensors may have been swapped in place.

        Raises:
            LayoutError: if a tensor is not of a shape that such views have.
        """

    # ------------------------------------------------------------------ checks

    def anchor(self) -> torch.Tensor | None:
        """Any one tensor of the view: it tells on which device all of them are."""
        return self._every[0]

    def check_device(self) -> None:
        """Refuse tensors on several devices: a copy runs on the streams of one.

        Raises:
            LayoutError: naming the first tensor that is elsewhere.
        """
        first = self._every[0].device
        for layer, named in (*self._tensors.items(), *self._states.items()):
            for name, tensor in named.items():
                if tensor.device != first:
                    raise LayoutError(
                        f"layer {layer}, {name!r}: it is on {tensor.device}, others of the view "
                        f"on {first}; make one view (and one call) for each device"
                    )

    def check_memory(self) -> None:
        """Refuse tensors whose storage was given back or made shorter than they are.

        Raises:
            LayoutError: naming the first one.
        """
        for layer, named in (*self._tensors.items(), *self._states.items()):
            for name, tensor in named.items():
                there = tensor.untyped_storage().nbytes() // tensor.element_size()
                needed = tensor.numel()
                if needed and not tensor.is_contiguous():
                    spans = zip(tensor.shape, tensor.stride(), strict=True)
                    needed = sum([(size - 1) * stride for size, stride in spans]) + 1
                if needed and tensor.storage_offset() + needed > there:
                    raise LayoutError(
                        f"layer {layer}, {name!r}: its storage was resized to {there} elements, "
                        f"{tensor.storage_offset() + needed} are needed"
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


def check(
    view: View, layout: Layout, tokens: int = 0, *, writing: bool = False, start: int = 0
) -> None:
    """Check that ``view`` has every tensor of ``layout``, in the right dtype and shape.

    Args:
        view: What a caller gave as his memory.
        layout: Layout of the space.
        tokens: How many tokens will be read or written.
        writing: Whether they will be written: then no two elements may share memory.
        start: First of them that will be; the view need back none before it with memory.

    Raises:
        LayoutError: if it is no view, has no room for the tokens, or naming the first tensor that
            is missing, differs, is not of this layout, is on another device than the rest, or
            shares memory with another.
    """
    if not isinstance(view, View):
        raise LayoutError(
            f"need a view of your memory, not {_kind(view)}; wrap it: tierkv.views.dense(kv)"
        )
    if isinstance(view, TensorView):
        view.fits(layout, writing=writing)
    elif start == 0 or start < tokens:  # else nothing of it will be touched
        _check_tensors(view, layout, tokens - 1 if start else 0)
    room = view.room()
    if room is not None and room < tokens:
        raise LayoutError(f"the view has room for {room} tokens, {tokens} are needed")


def _sample(view: View, layer: int, tensor: str, token: int) -> tuple[str, int, int]:
    """Dtype, heads and dim of a tensor, from a token that has memory where no page is known."""
    if token == 0 or type(view).sample is not View.sample:
        return view.sample(layer, tensor)
    piece = view.pieces(layer, tensor, token, token + 1)[0][1]
    return dtype_name(piece), piece.shape[0], piece.shape[2]


def _check_tensors(view: View, layout: Layout, token: int = 0) -> None:
    for group in layout.groups:
        for layer in group.layers:
            for spec in layer.tensors:
                if group.per_token:
                    found: tuple[Any, ...] = _sample(view, layer.index, spec.name, token)
                else:
                    state = view.state(layer.index, spec.name)
                    found = (dtype_name(state), *state.shape)
                if found != (spec.dtype, *spec.shape):
                    raise LayoutError(
                        f"layer {layer.index}, {spec.name!r}: the layout wants {spec.dtype} "
                        f"{spec.shape}, the view has {found[0]} {found[1:]}"
                    )
