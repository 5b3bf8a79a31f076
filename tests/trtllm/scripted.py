"""A connector for the replay driver that does as it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm import Connector

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Script"]


class Script:
    """Both sides of a connector that does as it is told, and remembers what it was given."""

    def __init__(
        self,
        offer: tuple[int, bool] = (0, False),
        *,
        saving: bool = False,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self.offer = offer
        self.hidden = hidden
        self.saving = saving
        self.given: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name.endswith("by_layer_group") or name in self.hidden:
            raise AttributeError(name)

        def hook(*args: Any) -> Any:
            self.given.append((name, args))
            if name == "get_num_new_matched_tokens":
                return self.offer
            if name == "request_finished":
                return self.saving
            if name == "get_finished":
                return args
            return None

        return hook

    def args_of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.given if called == name]

    def connector(self) -> Connector:
        return Connector(scheduler=lambda _args: self, worker=lambda _args, _rank: self)
