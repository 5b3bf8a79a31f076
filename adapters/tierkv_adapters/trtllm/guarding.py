"""No exception leaves a hook once the engine runs: a failure there ends the server.

There is one that is meant to: :class:`~tierkv_adapters.trtllm.lost.LostLoadError`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tierkv_adapters.serving.limited_log import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["complain", "guarded"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_complain = LimitedLog(logging.getLogger("tierkv.trtllm"))


def complain(kind: str, text: str) -> None:
    """Log a failure, or count it for the next line of its kind."""
    _complain.warning(kind, text)


def guarded(
    otherwise: Callable[..., _R], *, tell: Callable[[Any, str, str], None] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a hook answer ``otherwise(self)`` where it fails; logged, and counted in ``errors``.

    Args:
        otherwise: Makes the answer that costs least: nothing offered, nothing planned.
        tell: Is given (self, hook, what happened) where the hook itself may not log.
    """

    def wrap(hook: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(hook)
        def guard(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see the module
                owner: Any = args[0]
                owner.errors += 1
                text = f"{type(error).__name__}: {error}"
                if tell is None:
                    complain(hook.__name__, text)
                else:
                    tell(owner, hook.__name__, text)
                return otherwise(owner)

        return guard

    return wrap
