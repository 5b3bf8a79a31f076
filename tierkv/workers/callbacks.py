"""Starting tasks out of plain callbacks of the loop.

anyio asks sniffio, where that is installed, which event loop runs, and sniffio knows no answer
outside of a task: starting one out of a callback would fail there, and only there.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["loop_known"]

sniffio: Any
try:
    import sniffio
except ModuleNotFoundError:
    sniffio = None

_NOTHING = contextlib.nullcontext()


def loop_known() -> AbstractContextManager[Any]:
    """Inside of it tasks can be started, in a task and in a callback of an asyncio loop."""
    if sniffio is None or asyncio.current_task() is not None:
        return _NOTHING
    return _told()


@contextlib.contextmanager
def _told() -> Any:
    variable = sniffio.current_async_library_cvar
    token = variable.set("asyncio")
    try:
        yield
    finally:
        variable.reset(token)
