"""The caller's KV memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

__all__ = ["View"]


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
