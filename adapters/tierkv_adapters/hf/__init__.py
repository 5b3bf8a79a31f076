"""Hugging Face Transformers: attach a store to a model, without touching the model.

Importing this package needs no Transformers; its names are loaded when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv import registry

if TYPE_CHECKING:
    from tierkv_adapters.chat.result import GenerateResult, Token
    from tierkv_adapters.hf.handle import AsyncHandle, SyncHandle, attach
    from tierkv_adapters.hf.result import Status

__all__ = ["AsyncHandle", "GenerateResult", "Status", "SyncHandle", "Token", "attach"]

_HOMES = {
    "AsyncHandle": "hf.handle",
    "GenerateResult": "chat.result",
    "Status": "hf.result",
    "SyncHandle": "hf.handle",
    "Token": "chat.result",
    "attach": "hf.handle",
}


if not TYPE_CHECKING:  # type checkers shall go on telling names that are not there

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        target, hint = f"tierkv_adapters.{home}:{name}", "pip install -c constraints.txt -e '.[hf]'"
        return registry.load(target, what=f"tierkv_adapters.hf.{name}", hint=hint)


def __dir__() -> list[str]:
    return sorted(__all__)
