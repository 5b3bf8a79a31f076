"""Everything numeric that a module holds, and digests of it that are renewed when it changes."""

from __future__ import annotations

import hashlib
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from tierkv.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

__all__ = ["Digests", "Weights", "read_weights", "tensor_digest"]

_CHUNK = 64 << 20  # bytes hashed at once: bounds the copy made of weights on a device
_PLAIN = (str, int, float, bool, bytes, torch.dtype, torch.device, type(None))


class Weights(NamedTuple):
    """What a module holds.

    Attributes:
        tensors: Plain tensors by name.
        facts: Everything else by name, as text: parts of packed or quantised weights.
    """

    tensors: dict[str, torch.Tensor]
    facts: dict[str, str]


def read_weights(module: torch.nn.Module) -> Weights:
    """Return parameters and buffers, also those that are not saved (the frequencies of RoPE).

    Packed weights and tensor subclasses of quantisers are taken apart into plain tensors.

    Raises:
        AttachError: if some of the state cannot be read; two models could then look alike.
    """
    found = Weights({}, {})
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in chain(state.items(), module.named_buffers()):
        _take(name, value, found)
    return found


def _take(name: str, value: Any, found: Weights) -> None:
    if isinstance(value, torch.Tensor):
        _take_tensor(name, value, found)
    elif isinstance(value, _PLAIN):
        found.facts[name] = repr(value)
    elif isinstance(value, list | tuple):
        found.facts[name] = f"{len(value)} items"
        for index, item in enumerate(value):
            _take(f"{name}.{index}", item, found)
    elif isinstance(value, dict):
        found.facts[name] = f"{len(value)} items"
        for key, item in value.items():
            _take(f"{name}.{key!r}", item, found)
    else:
        raise AttachError(
            f"{name} is a {type(value).__name__}, which cannot be read: two models that differ in "
            "it could not be told apart"
        )


def _take_tensor(name: str, tensor: torch.Tensor, found: Weights) -> None:
    if tensor.is_meta:
        raise AttachError(f"{name} is not in memory (offloaded): load the whole model first")
    if tensor.is_quantized:
        raise AttachError(f"{name} is of torch's own quantised type, which is not supported")
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        found.facts[name] = f"{type(tensor).__qualname__} {tuple(tensor.shape)} {context!r}"
        for inner in names:
            _take_tensor(f"{name}.{inner}", getattr(tensor, inner), found)
    else:
        found.tensors[name] = tensor


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Digest of the elements in logical order; empty for no elements."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return b""
    raw = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)
    state = xxhash.xxh3_128()
    for start in range(0, raw.numel(), _CHUNK):
        state.update(raw[start : start + _CHUNK].cpu().numpy().data)
    return state.digest()


def _digest(weights: Weights) -> str:
    """Digest names, shapes, dtypes and bytes; tied tensors are read once."""
    total = hashlib.sha256()
    seen: dict[int, bytes] = {}
    for name, tensor in weights.tensors.items():
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor_digest(tensor)
        head = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|"
        total.update(f"{len(head)}:{head}".encode() + seen[id(tensor)])
    for fact in _lines(weights.facts.items()):
        total.update(fact)
    return total.hexdigest()


def _lines(items: Iterable[tuple[str, str]]) -> Iterable[bytes]:
    for name, value in items:
        line = f"{name}={value}".encode("utf-8", "surrogatepass")
        yield f"{len(line)}:".encode() + line


class _Stamp(NamedTuple):
    """What tells whether a tensor is the one that was read, unchanged."""

    # the weak reference tells a new tensor from an old one whose address and id were reused
    tensor: weakref.ref[torch.Tensor]
    address: int
    version: int

    def still(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the same object, at the same place, not written since."""
        return self.tensor() is tensor and self[1:] == _stamp(tensor)[1:]


def _stamp(tensor: torch.Tensor) -> _Stamp:
    version = -1 if tensor.is_inference() else tensor._version
    return _Stamp(weakref.ref(tensor), tensor.data_ptr(), version)


class _Known(NamedTuple):
    stamps: dict[str, _Stamp]
    facts: dict[str, str]
    state: Hashable
    digest: str


class Digests:
    """Digests of sets of weights, kept until one of their tensors is replaced or written.

    Attributes:
        readings: How often weights were read.
    """

    def __init__(self) -> None:
        self.readings = 0
        self._known: dict[str, _Known] = {}

    def clear(self) -> None:
        """Forget every digest."""
        self._known.clear()

    def get(self, key: str, weights: Weights, state: Hashable = None) -> str:
        """Digest of ``weights``, read if anything changed since the last call for ``key``.

        Args:
            key: Name of the set.
            weights: Its members now.
            state: What else tells that the tensors were written, where they do not tell it.
        """
        known = self._known.get(key)
        if known is None or not _same(known, weights, state):
            # stamped before it is read: a change meanwhile is seen at the next call
            stamps = {name: _stamp(tensor) for name, tensor in weights.tensors.items()}
            known = _Known(stamps, weights.facts, state, _digest(weights))
            self._known[key] = known
            self.readings += 1
        return known.digest


def _same(known: _Known, weights: Weights, state: Hashable) -> bool:
    if state != known.state or weights.facts != known.facts:
        return False
    if weights.tensors.keys() != known.stamps.keys():
        return False
    return all(known.stamps[name].still(tensor) for name, tensor in weights.tensors.items())
