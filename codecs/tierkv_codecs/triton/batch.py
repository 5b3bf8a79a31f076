"""A batch of sections in device memory, and launches over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Sections", "launch", "over_groups", "power"]

_BLOCK: Final = 512  # groups of a program
_ALIGN: Final = 8  # elements: 16 bytes of the shortest dtype


class Sections(NamedTuple):
    """The tensors of a batch, as kernels see them: ``[heads, tokens, dim]``.

    Attributes:
        base: The first of them; bfloat16 as int16.
        table: int64: how far each is from the first, in elements.
        heads: Of each section, as are the next two.
        tokens: Rows of a head.
        dim: Numbers of a row.
        steps: Elements from one head, token and number to the next.
        align: What divides every number of the table.
        f16: Whether they are float16.
    """

    base: torch.Tensor
    table: torch.Tensor
    heads: int
    tokens: int
    dim: int
    steps: tuple[int, int, int]
    align: int
    f16: bool

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Sections:
        """Tensors of one shape (three axes at most), dtype and strides, on one device."""
        first = tensors[0]
        size = first.element_size()
        at = [(t.data_ptr() - first.data_ptr()) // size for t in tensors]
        table = torch.tensor(at, dtype=torch.int64, device=first.device)
        lead = 3 - first.dim()
        heads, tokens, dim = (1,) * lead + tuple(first.shape)
        head, token, number = (0,) * lead + first.stride()
        base = first.view(torch.int16) if first.dtype is torch.bfloat16 else first
        align = _ALIGN if all(step % _ALIGN == 0 for step in at) else 1
        f16 = first.dtype is torch.float16
        return cls(base, table, heads, tokens, dim, (head, token, number), align, f16)

    @property
    def number(self) -> int:
        """How many sections there are."""
        return len(self.table)

    @property
    def rows(self) -> int:
        """Rows of a section."""
        return self.heads * self.tokens

    @property
    def bf16(self) -> bool:
        """Whether they are bfloat16."""
        return self.base.dtype is torch.int16

    @property
    def reading(self) -> dict[str, Any]:
        """How kernels read them."""
        return {"ALIGN": self.align, "BF16": self.bf16}

    @property
    def writing(self) -> dict[str, Any]:
        """How kernels write them."""
        return {**self.reading, "F16": self.f16}

    @property
    def stored(self) -> dict[str, Any]:
        """How kernels read and write single numbers of their dtype in encodings."""
        return {"ITEM": self.base.element_size(), "BF16": self.bf16, "F16": self.f16}

    def empty(self, count: int) -> torch.Tensor:
        """Room for float32 numbers, ``count`` of each section."""
        return torch.empty((self.number, count), dtype=torch.float32, device=self.table.device)


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def launch(kernel: Any, programs: int, s: Sections, *numbers: Any, **how: Any) -> None:
    """Launch so many programs for each section; products and sums are not fused."""
    kernel[(programs, s.number)](*numbers, **how, enable_fp_fusion=False)


def over_groups(kernel: Any, s: Sections, groups: int, *numbers: Any, **how: Any) -> None:
    """Launch a kernel that has one number for each group of a section."""
    launch(kernel, -(-groups // _BLOCK), s, *numbers, **how, BLOCK=_BLOCK)
