"""What was hung onto a live model's modules: hooks and replaced ``forward`` methods.

Steering vectors, activation edits and faster kernels change the KV and no weight. A function of a
module has a name that holds in every process; anything else (a closure, a lambda, an object) may
carry numbers that cannot be seen, and gets a name that holds for this one object only. What
PyTorch, Transformers, Accelerate and PEFT hang on themselves is theirs, and left out.
"""

from __future__ import annotations

import functools
import uuid
from typing import TYPE_CHECKING, Any

from torch.nn.modules import module as _module

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Patches"]

_THEIRS = frozenset({"accelerate", "peft", "torch", "transformers"})


class Patches:
    """Names what is patched; an object keeps its name for as long as it stays in place."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[object, str]] = {}

    def __call__(self, model: Any) -> tuple[str, ...]:
        """Return a line for each hook and each replaced method, in order; empty without any."""
        names, lines = {}, []
        for place, module, target in _found(model):
            plain = _plain_name(target, module)
            if plain is None:
                # the object is kept, so that its id is not given to another one meanwhile
                known = self._names.get(id(target)) or (target, f"object {uuid.uuid4()}")
                names[id(target)] = known
                plain = known[1]
            if plain:
                lines.append(f"{place}: {plain}")
        self._names = names
        return tuple(lines)


def _found(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where something hangs, on which module, and what."""
    for kind in ("forward_pre_hooks", "forward_hooks"):
        for hook in list(getattr(_module, f"_global_{kind}").values()):
            yield f"every {kind}", None, hook
    for path, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            for hook in list(getattr(module, kind).values()):
                yield f"{path}{kind}", module, hook
        if "forward" in vars(module):
            yield f"{path}.forward", module, vars(module)["forward"]


def _plain_name(target: Any, module: Any) -> str | None:
    """Name of a function that holds everywhere; empty: it is of no account; None: it has none."""
    function, bare = target, True
    while True:
        if isinstance(function, functools.partial):
            bare = bare and not function.keywords and all(x is module for x in function.args)
            function = function.func
        elif hasattr(function, "__func__"):
            bare = bare and function.__self__ is module
            function = function.__func__
        else:
            break
    # not __module__, which functools.wraps copies from what is replaced
    home = str(getattr(function, "__globals__", {}).get("__name__", ""))
    if home.partition(".")[0] in _THEIRS:
        return ""
    if not bare or not home or function.__closure__ or "<" in function.__qualname__:
        return None
    return f"{home}:{function.__qualname__}"
