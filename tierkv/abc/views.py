"""The caller's KV memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["MemoryMap", "View"]


class MemoryMap:
    """Where the blocks of some tensors of a view are: one rule for all of them, in host memory.

    A block is one or several *ranges* of :attr:`tokens` tokens. Range ``r`` of tensor ``i`` begins
    ``pages[r] * page + lows[r] * token`` elements behind the beginning of the tensor, with
    ``page, head, token, element = steps[i]`` and ``pages, lows`` from :meth:`View.locate_in`.

    Attributes:
        tokens: Tokens of a range.
        tensors: The tensors, which keep the memory alive.
        steps: Of each: elements from one page, head, token and element of a token to the next.
        made: What whoever copies blocks has worked out from this, and for which sections. It must
            not keep this one.
    """

    __slots__ = ("made", "steps", "tensors", "tokens")

    def __init__(
        self,
        tokens: int,
        tensors: Sequence[torch.Tensor],
        steps: Sequence[tuple[int, int, int, int]],
    ) -> None:
        self.tokens = tokens
        self.tensors = tensors
        self.steps = steps
        self.made: tuple[object, object] | None = None


class View(ABC):
    """The caller's KV memory, seen token by token: index 0 is always token 0.

    A view owns no memory and copies none; it hands out strided pieces of the caller's tensors.
    """

    owned_by_engine: bool = False
    """Whether unverified bytes may be read straight into it, which saves a copy.

    Only for memory that the engine, or an adapter for it, alone writes, and whose logical length
    grows after verification: behind the tokens that a load reports there may be anything then.
    """

    @abstractmethod
    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """Tensors that hold tokens ``[start, stop)``, in order.

        Returns:
            Pairs (first token of the piece, tensor ``[heads, tokens, dim]``), which together cover
            the range exactly.

        Raises:
            LayoutError: if the range is not backed by memory.
        """

    def map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> MemoryMap | None:
        """One rule for where all blocks of these tensors are: it saves a call per block and tensor.

        Args:
            sections: Tuples that begin with layer, name, dtype and shape ``[heads, tokens, dim]``.
            tokens: Tokens of a block; the last one of a sequence may have fewer than the others.

        Returns:
            The rule; None if there is none (memory of a device, tensors that differ from the
            sections, blocks across odd page borders): then :meth:`pieces` tells.
        """
        del sections, tokens
        return None

    def locate(
        self, starts: NDArray[np.int64], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page, and token inside it, at which each range of a :class:`MemoryMap` begins.

        Args:
            starts: First token of each range, a multiple of ``tokens``.
            tokens: Tokens of a range.

        Raises:
            LayoutError: if a range is not backed by memory.
        """
        raise LayoutError(f"{type(self).__name__} has no rule for where blocks are")

    def locate_in(
        self, layer: int, starts: NDArray[np.int64], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As :meth:`locate`, for the layer group of ``layer``: groups may have pages of their own.

        Raises:
            LayoutError: if a range is not backed by memory.
        """
        del layer
        return self.locate(starts, tokens)

    def backs(self, layer: int, start: int, stop: int) -> bool:
        """Whether it has memory for all of the tokens ``[start, stop)`` of a layer.

        Asked before a store of layers with a sliding window, whose older pages a serving engine
        takes away, and of recurrent ones (of the block at whose end the state is): parts that are
        gone are left out. Other layers must back every token that is stored.
        """
        del layer, start, stop
        return True

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Dtype (torch's name), heads and dim of a tensor, without reading it.

        A view that does not back token 0 with memory overrides this.

        Raises:
            LayoutError: if the view has no such tensor.
        """
        piece = self.pieces(layer, tensor, 0, 1)[0][1]
        return str(piece.dtype).removeprefix("torch."), piece.shape[0], piece.shape[2]

    def anchor(self) -> torch.Tensor | None:
        """Any one tensor of the view: it tells on which device all of them are. None: in RAM."""
        return None

    def room(self) -> int | None:
        """How many tokens it has memory for; None if it does not know beforehand."""
        return None

    def state(self, layer: int, tensor: str) -> torch.Tensor:
        """The whole tensor of a recurrent layer.

        Raises:
            LayoutError: if the view has no state.
        """
        raise LayoutError(f"{type(self).__name__} holds no state (layer {layer}, {tensor!r})")

    def writing(self) -> AbstractContextManager[None]:
        """Entered around every write into the pieces (inference mode, locks)."""
        return nullcontext()
