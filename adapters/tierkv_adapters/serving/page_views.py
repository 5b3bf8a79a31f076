"""Views of the pages of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierkv.abc import MemoryMap, View
from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tierkv_adapters.serving.pages import PagePools

    Numbers = NDArray[np.int64]

__all__ = ["PagesView"]


class PagesView(View):
    """Pages of one request, of every group; see :meth:`PagePools.view`.

    Memory of the engine: what is read of a tier is verified before it is copied here
    (``owned_by_engine`` is off), since pages that a request gave back belong to another one when
    a slow tier answers.
    """

    def __init__(
        self,
        pools: PagePools,
        pages: Sequence[Sequence[int]],
        tokens: int | None,
        *,
        spill: bool,
    ) -> None:
        if len(pages) != len(pools.groups):
            raise LayoutError(f"{len(pools.groups)} page groups, {len(pages)} lists of pages")
        self._pools = pools
        self._pages: list[Numbers] = [np.array(each, np.int64) for each in pages]
        rooms = []
        for number, (group, mine) in enumerate(zip(pools.groups, self._pages, strict=True)):
            _check_pages(mine, pools.pages[number], f"page group {number}", writing=spill)
            if group.per_token:
                rooms.append(len(mine) * group.page_tokens)
        room = min(rooms, default=None)
        if tokens is not None and room is not None and tokens > room:
            raise LayoutError(f"the pages hold {room} tokens, {tokens} are meant")
        self._tokens = room if tokens is None else tokens
        self._room = None if room is None else self._tokens
        self._spill = spill
        self._spilt: dict[tuple[int, str, int], torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<PagesView of {self._tokens} tokens, {[len(p) for p in self._pages]} pages>"

    def _find(self, layer: int, tensor: str) -> torch.Tensor:
        try:
            return self._pools.tensors[layer, tensor]
        except KeyError:
            raise LayoutError(f"the pools have no tensor {tensor!r} for layer {layer}") from None

    def _range(self, layer: int, start: int, stop: int) -> tuple[Numbers, int]:
        """The group's pages of a range, and tokens of a page."""
        number = self._pools.group_of(layer)
        size = self._pools.groups[number].page_tokens
        pages = self._pages[number]
        if (
            not 0
            <= start
            <= stop
            <= min(len(pages) * size, stop if self._tokens is None else self._tokens)
        ):
            raise LayoutError(
                f"layer {layer}: tokens [{start}, {stop}) are outside of the {self._tokens} tokens "
                "of this view"
            )
        return pages[start // size : -(-stop // size)], size

    def backs(self, layer: int, start: int, stop: int) -> bool:
        """Whether there is memory for all of a layer's tokens ``[start, stop)``.

        Of a recurrent layer: for the state behind the last of them.

        Raises:
            LayoutError: if they are outside of the view.
        """
        number = self._pools.group_of(layer)
        if not self._pools.groups[number].per_token:
            return stop == self._tokens and self._state_page(number) >= 0
        return bool((self._range(layer, start, stop)[0] >= 0).all())

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """One slice per page; see :meth:`tierkv.abc.View.pieces`."""
        pool = self._find(layer, tensor)
        pages, size = self._range(layer, start, stop)
        found: list[int] = pages.tolist()
        if found and min(found) < 0 and (not self._spill or max(found) < 0):
            raise LayoutError(
                f"layer {layer}, {tensor!r}: tokens [{start}, {stop}) have no memory; they are "
                "outside of the window"
            )
        out: list[tuple[int, torch.Tensor]] = []
        first = start
        for page in found:
            low = first % size
            high = min(size, low + stop - first)
            whole = pool[page] if page >= 0 else self._nowhere(layer, tensor, first // size, pool)
            out.append((first, whole if high - low == size else whole.narrow(1, low, high - low)))
            first += high - low
        return out

    def _nowhere(self, layer: int, tensor: str, number: int, pool: torch.Tensor) -> torch.Tensor:
        """Memory for a page that nobody will read: one of its own, so that no two writes meet."""
        key = (layer, tensor, number)
        known = self._spilt.get(key)
        if known is None:
            known = self._spilt[key] = torch.empty_like(pool[0])
        return known

    def map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> MemoryMap | None:
        """One rule for all blocks of a group; see :meth:`tierkv.abc.View.map`."""
        if self._spill and not self._whole(sections[0][0], tokens):
            return None
        return self._pools.map(sections, tokens)

    def _whole(self, layer: int, tokens: int) -> bool:
        """Whether every block of ``tokens`` tokens has memory for all of its pages, or for none."""
        number = self._pools.group_of(layer)
        pages, each = self._pages[number], tokens // self._pools.groups[number].page_tokens
        if each < 2 or len(pages) == 0 or int(pages.min()) >= 0:
            return True
        there = pages[: len(pages) // each * each].reshape(-1, each) >= 0
        return bool((there.all(axis=1) == there.any(axis=1)).all()) and not len(pages) % each

    def locate(self, starts: Numbers, tokens: int) -> tuple[Numbers, Numbers]:
        """Where ranges begin, in the only group that has tokens; see :meth:`locate_in`."""
        groups = [group for group in self._pools.groups if group.per_token]
        if len(groups) != 1:
            raise LayoutError("several page groups: name a layer (locate_in)")
        return self.locate_in(groups[0].layers[0].index, starts, tokens)

    def locate_in(self, layer: int, starts: Numbers, tokens: int) -> tuple[Numbers, Numbers]:
        """Page, and token inside of it, at which each range of a layer begins.

        Args:
            layer: Any layer of the group that is meant.
            starts: First token of each range, multiples of ``tokens``.
            tokens: Tokens of a range, at most those of a page.

        Raises:
            LayoutError: if a range is not backed by memory.
        """
        if not len(starts):
            return starts, starts
        low, high = int(starts.min()), int(starts.max()) + tokens
        self._range(layer, max(low, 0) if low >= 0 else low, high)
        number = self._pools.group_of(layer)
        size = self._pools.groups[number].page_tokens
        pages = self._pages[number][starts // size]
        if int(pages.min()) < 0:
            raise LayoutError(f"layer {layer}: tokens of [{low}, {high}) have no memory")
        return pages, starts % size

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype, heads and dim, from the pool: the first page may have no memory."""
        pool = self._find(layer, tensor)
        return str(pool.dtype).removeprefix("torch."), pool.shape[1], pool.shape[3]

    def anchor(self) -> torch.Tensor:
        """Any tensor of the pools."""
        return self._pools.anchor

    def room(self) -> int | None:
        """Tokens it has pages for; None if it holds states alone."""
        return self._room

    def state(self, layer: int, tensor: str) -> torch.Tensor:
        """The state behind the last token of the view.

        Raises:
            LayoutError: if there is no such state, or no page for it.
        """
        pool = self._find(layer, tensor)
        number = self._pools.group_of(layer)
        if self._pools.groups[number].per_token:
            raise LayoutError(f"layer {layer}, {tensor!r} is no recurrent state")
        page = self._state_page(number)
        if page < 0:
            raise LayoutError(f"layer {layer}: no page for the state behind token {self._tokens}")
        found: torch.Tensor = pool[page]
        return found

    def _state_page(self, number: int) -> int:
        """The page of a group's state behind the last token; -1 if there is none."""
        pages, size = self._pages[number], self._pools.groups[number].page_tokens
        at = len(pages) - 1 if self._tokens is None else self._tokens // size - 1
        return int(pages[at]) if 0 <= at < len(pages) else -1

    def holds_states(self) -> bool:
        """Whether there is a page for the state of every recurrent group."""
        groups = enumerate(self._pools.groups)
        return all(self._state_page(n) >= 0 for n, group in groups if not group.per_token)

    def writing(self) -> AbstractContextManager[None]:
        """Inference mode: pools may be inference tensors, which only it can write."""
        return torch.inference_mode()


def _check_pages(pages: Numbers, count: int, what: str, *, writing: bool) -> None:
    if not len(pages):
        return
    if int(pages.min()) < -1 or int(pages.max()) >= count:
        raise LayoutError(
            f"{what} has pages 0 to {count - 1} (-1: none), not {pages.min()} to {pages.max()}"
        )
    if writing:
        held = np.sort(pages[pages >= 0])
        if (held[1:] == held[:-1]).any():
            raise LayoutError(f"{what}: a page is named twice: two ranges would share memory")
