"""A tiered store for the KV caches of language models: exactly what was put, or a miss.

::

    async with tierkv.open(tiers=[tierkv.Tier("host", "8GiB")], space=space) as engine:
        async with engine.session("chat-42") as session:
            async with session.match(token_ids) as match:
                loaded = await match.load(into=kv)

Names are imported on first use: ``import tierkv`` loads neither torch nor a plug-in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv import errors as errors
    from tierkv import views as views
    from tierkv.blocks import AdapterId as AdapterId
    from tierkv.blocks import Identity as Identity
    from tierkv.blocks import Media as Media
    from tierkv.config import CompressionPolicy as CompressionPolicy
    from tierkv.config import EngineConfig as EngineConfig
    from tierkv.config import Hybrid as Hybrid
    from tierkv.config import Policy as Policy
    from tierkv.config import Tier as Tier
    from tierkv.config import load_config as load_config
    from tierkv.engine import Engine as Engine
    from tierkv.engine import open as open
    from tierkv.errors import TierKVError as TierKVError
    from tierkv.layout import Group as Group
    from tierkv.layout import GroupKind as GroupKind
    from tierkv.layout import Layer as Layer
    from tierkv.layout import Layout as Layout
    from tierkv.layout import Space as Space
    from tierkv.layout import TensorSpec as TensorSpec
    from tierkv.session import Match as Match
    from tierkv.session import Session as Session

__all__ = [
    "AdapterId",
    "CompressionPolicy",
    "Engine",
    "EngineConfig",
    "Group",
    "GroupKind",
    "Hybrid",
    "Identity",
    "Layer",
    "Layout",
    "Match",
    "Media",
    "Policy",
    "Session",
    "Space",
    "TensorSpec",
    "Tier",
    "TierKVError",
    "__version__",
    "errors",
    "load_config",
    "open",
    "views",
]

__version__ = "0.2.0"

_HOMES = {
    "AdapterId": "blocks",
    "CompressionPolicy": "config",
    "Engine": "engine",
    "EngineConfig": "config",
    "Group": "layout",
    "GroupKind": "layout",
    "Hybrid": "config",
    "Identity": "blocks",
    "Layer": "layout",
    "Layout": "layout",
    "Match": "session",
    "Media": "blocks",
    "Policy": "config",
    "Session": "session",
    "Space": "layout",
    "TensorSpec": "layout",
    "Tier": "config",
    "TierKVError": "errors",
    "load_config": "config",
    "open": "engine",
}
_MODULES = frozenset({"errors", "views"})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tierkv.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tierkv.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
