"""Machine code made at run time, where the extra ``fast`` is installed.

Some loops over memory cannot be put together from library calls without a pass, or a call for
every row, too many. They are written as LLVM IR, which llvmlite (numba's own back end) compiles for
the processor at hand in some milliseconds on first use. Each has a twin made of library calls that
gives the same bytes, for machines without the extra: what is stored with one is read with the
other. Nothing is used before it was tried on a sample, nor compiled where an event loop runs
(:mod:`tierkv.jit.trials`).
"""

from __future__ import annotations

from tierkv.jit.llvm import Host, function, functions, host
from tierkv.jit.trials import Refusal, Tried, behind, catch_up, later, refusals

__all__ = [
    "Host",
    "Refusal",
    "Tried",
    "behind",
    "catch_up",
    "function",
    "functions",
    "host",
    "later",
    "refusals",
]
