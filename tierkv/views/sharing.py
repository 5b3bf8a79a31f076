"""Whether tensors share memory: what is written there last would be all that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["refuse_shared"]


def refuse_shared(tensors: Iterable[tuple[int, str, torch.Tensor]]) -> None:
    """Refuse tensors (layer, name, tensor) of which two elements share memory.

    Found by where each begins: on an element of the one before it in memory, or not.

    Raises:
        LayoutError: naming the first one.
    """
    held = [(t.data_ptr(), layer, name, t) for layer, name, t in tensors if t.numel()]
    held.sort(key=lambda entry: entry[:3])
    last: tuple[int, int, str, torch.Tensor] | None = None
    for address, layer, name, tensor in held:
        _refuse_overlaps(layer, name, tensor)
        if last is not None and _collide(last[3], tensor, address - last[0]):
            raise LayoutError(
                f"layer {layer}, {name!r}: shares memory with layer {last[1]}, {last[2]!r}"
            )
        last = (address, layer, name, tensor)


def _refuse_overlaps(layer: int, name: str, tensor: torch.Tensor) -> None:
    if tensor.is_contiguous():
        return
    reach = 0  # elements from the first to the last along the axes looked at so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride == 0:
            raise LayoutError(
                f"layer {layer}, {name!r}: an expanded tensor cannot be loaded into; its "
                "elements share memory"
            )
        if stride <= reach:
            raise LayoutError(
                f"layer {layer}, {name!r}: strides {tensor.stride()} of shape "
                f"{tuple(tensor.shape)} overlap; it can be stored, not loaded into"
            )
        reach += stride * (size - 1)


def _collide(one: torch.Tensor, other: torch.Tensor, gap: int) -> bool:
    """Whether ``other``, which begins ``gap`` bytes behind ``one``, begins inside it.

    Interleaved tensors (K and V beside each other in one buffer) do not.
    """
    if one.device != other.device:
        return False
    for stride, size in sorted(zip(one.stride(), one.shape, strict=True), reverse=True):
        step = stride * one.element_size()
        gap -= min(gap // step, size - 1) * step if step else 0
    return 0 <= gap < one.element_size()
