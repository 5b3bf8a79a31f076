"""Steps through machine code, where the extra ``fast`` is installed.

Contiguous bfloat16 goes through :mod:`tierkv_codecs.step_code`. Callers go on in torch where a
function here says that it has none, with the same result to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv_codecs import step_calls, step_trials

if TYPE_CHECKING:
    import torch

    from tierkv_codecs.affine import Groups
    from tierkv_codecs.step_code import Loops

__all__ = ["decode_keys", "decode_rows", "numbers"]


def _loops(tensor: torch.Tensor, way: str, nibbles: bool = False) -> Loops | None:
    import torch

    if tensor.dtype is not torch.bfloat16 or not tensor.is_contiguous():
        return None
    return step_trials.loops(way, tensor.shape[-1], nibbles)


def numbers(source: torch.Tensor, kind: str) -> step_calls.Numbers | None:
    """Look for the largest magnitude, in one pass; None if there are no loops for this tensor.

    Args:
        source: The tensor.
        kind: What it will be coded as: ``"rows"`` or ``"keys"``.
    """
    loops = _loops(source, f"encode {kind}")
    return None if loops is None else step_calls.numbers(loops, source)


def decode_rows(data: memoryview, base: float, nibbles: bool, into: torch.Tensor) -> bool:
    """Decode in one pass; False if there is none for this tensor.

    Args:
        data: The exponents of the rows, and the codes.
        base: The step of exponent 0.
        nibbles: Whether codes are half bytes.
        into: The target.
    """
    loops = _loops(into, "decode rows", nibbles)
    if loops is not None:
        step_calls.decode_rows(loops, data, base, into)
    return loops is not None


def decode_keys(
    parts: tuple[memoryview, ...],
    base: float,
    frequency: Any,
    groups: Groups,
    nibbles: bool,
    into: torch.Tensor,
) -> bool:
    """Decode all but constant channels in one pass; False if there is none for this tensor.

    Args:
        parts: Low bytes of the means, high ones, exponents, codes.
        base: The step of exponent 0.
        frequency: Of each pair, int64.
        groups: How the target is cut.
        nibbles: Whether codes are half bytes.
        into: The target.
    """
    loops = _loops(into, "decode keys", nibbles)
    if loops is not None:
        step_calls.decode_keys(loops, parts, base, frequency, groups, into)
    return loops is not None
