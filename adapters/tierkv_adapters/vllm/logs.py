"""What tierkv logs appears among vLLM's own lines.

vLLM sets up the logger ``vllm`` alone, in each of its processes. Anything else that is logged there
is shown from WARNING on only, and without a time, a level or the process that said it.
"""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["LOGGERS", "show_logs"]

LOGGERS: Final = ("tierkv", "tierkv_adapters", "tierkv_backends", "tierkv_codecs")


def show_logs() -> None:
    """Give tierkv's loggers the handlers and the level of vLLM's, in this process.

    A logger whose lines go somewhere already is left alone, and so are all of them where vLLM was
    told not to set up logging (``VLLM_CONFIGURE_LOGGING=0``). Idempotent.
    """
    theirs = logging.getLogger("vllm")
    if not theirs.handlers:
        return
    for name in LOGGERS:
        ours = logging.getLogger(name)
        if ours.hasHandlers():
            continue
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.propagate = theirs.propagate
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.level)
