"""What the report measures if nothing else is asked for, and how chains are listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BLOCK", "CHAINS", "Wanted", "listed"]

BLOCK: Final = 64
"""Tokens of a block, tierkv's default."""

CHAINS: Final = (
    "raw",
    "zstd",
    "planes",
    "int8",
    "int8+planes",
    "fp8",
    "int6",
    "int4",
    "int4+zstd",
    "rot4",
    "rot4+zstd",
    "ecq4+rans",
    "int3",
    "rot3",
    "ecq3+rans",
    "int2",
    "rot2",
    "ecq2+rans",
)
"""What is measured by default."""


def listed(text: str) -> list[str]:
    """Chains of a list: separated by commas, or by semicolons, where rules have commas in them.

    >>> listed("int8, int4+zstd"), listed("K:int8,V:int4; planes")
    (['int8', 'int4+zstd'], ['K:int8,V:int4', 'planes'])
    """
    mark = ";" if ";" in text or ":" in text else ","
    return [chain.strip() for chain in text.split(mark) if chain.strip()]


class Wanted(NamedTuple):
    """What chains are judged by.

    Attributes:
        model: A name of :data:`tierkv_adapters.hf.models.MODELS`, or a directory.
        text: Text file; None: Python's own help.
        prefix: Tokens that are stored.
        scored: Tokens read after them.
        dtype: Dtype of the KV.
    """

    model: str
    text: Path | None
    prefix: int
    scored: int
    dtype: str = "bfloat16"
