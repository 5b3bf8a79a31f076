"""Machine code made at run time, where the extra ``fast`` is installed.

Some loops over memory cannot be put together from library calls without a pass, or a call for
every row, too many. They are written as LLVM IR, which llvmlite (numba's own back end) compiles for
the processor at hand in some milliseconds on first use. Each has a twin made of library calls that
gives the same bytes, for machines without the extra: what is stored with one is read with the
other.
"""

from __future__ import annotations

from tierkv.jit.llvm import Host, function, functions, host

__all__ = ["Host", "function", "functions", "host"]
