"""What both generations of the API call, as recorded; and comparisons with what is there.

``first.json`` and ``second.json`` beside this file hold names and parameters only: those of
``kv_cache_connector.py`` and of the documentation of connectors in NVIDIA/TensorRT-LLM. A class is
compared by :func:`mismatches`; an installed copy by :func:`installed`, which parses its source and
never imports it (importing ``tensorrt_llm`` loads CUDA).
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tierkv.testing.trtllm.signatures.installed import installed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Side", "Signatures", "installed", "mismatches", "recorded"]


class Side(NamedTuple):
    """The hooks of one of the two classes, each with its parameters behind ``self``."""

    name: str
    abstract: Mapping[str, list[str]]
    """A class must have them."""
    inherited: Mapping[str, list[str]]
    """The base class has them; a class that inherits from nothing must have those called."""
    optional: Mapping[str, list[str]]
    """Called where they are there."""


class Signatures(NamedTuple):
    """One generation of the API."""

    api: str
    modules: list[str]
    scheduler: Side
    worker: Side
    dataclasses: Mapping[str, list[str]]


@cache
def recorded(api: Literal["first", "second"]) -> Signatures:
    """What was recorded of a generation."""
    text = json.loads((Path(__file__).parent / f"{api}.json").read_text())
    scheduler, worker = (
        Side(side["class"], side["abstract"], side["inherited"], side["optional"])
        for side in (text["scheduler"], text["worker"])
    )
    return Signatures(text["api"], text["modules"], scheduler, worker, text["dataclasses"])


def mismatches(side: Side, connector: type) -> list[str]:
    """Where a class cannot be called as the engine calls it; empty: nowhere.

    Hooks are called by position, so names of parameters are free. Abstract hooks must be there;
    others are looked at where they are.
    """
    wrong = []
    for name, parameters in (*side.abstract.items(), *side.inherited.items()):
        hook = getattr(connector, name, None)
        if hook is None:
            if name in side.abstract:
                wrong.append(f"{connector.__name__} has no {name}({', '.join(parameters)})")
        elif getattr(hook, "__isabstractmethod__", False):
            wrong.append(f"{connector.__name__}.{name} is abstract")
        else:
            wrong += _unlike(connector, name, hook, parameters)
    for name, parameters in side.optional.items():
        hook = getattr(connector, name, None)
        if hook is not None:
            wrong += _unlike(connector, name, hook, parameters)
    return wrong


def _unlike(connector: type, name: str, hook: object, parameters: list[str]) -> list[str]:
    if not callable(hook):
        return [f"{connector.__name__}.{name} is not callable"]
    found = inspect.signature(hook)
    try:
        found.bind(None, *parameters)
    except TypeError as error:
        called = f"{name}({', '.join(parameters)})"
        return [f"{connector.__name__}.{name}{found} cannot be called as {called}: {error}"]
    return []
