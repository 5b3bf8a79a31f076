"""Identity of a live model: everything that its KV depends on, and no name alone.

* weights: a digest over the bytes of every parameter and persistent buffer;
* configuration (RoPE, attention types, windows, ...), attention implementation, compute dtype;
* active LoRA-like adapters with a digest of their weights and their scales.

Digests are kept per model object and renewed when a parameter was replaced, moved or changed in
place. An edit through ``parameter.data`` leaves no trace that could be seen cheaply; call
:meth:`ModelIdentity.refresh` after one.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from tierkv.blocks import AdapterId, Identity
from tierkv_adapters.hf.compat import base_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ModelIdentity"]

_CHUNK = 64 << 20  # bytes hashed at once: bounds the copy made of weights on a device

# facts about files, defaults of generate() and labels: they change no number of the KV
_IGNORED_CONFIG = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "id2label",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)


class _Stamp(NamedTuple):
    """What tells whether a tensor is the one that was read, unchanged."""

    # the weak reference tells a new tensor from an old one whose address and id were reused
    tensor: weakref.ref[torch.Tensor]
    address: int
    version: int

    def still(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the same object, at the same place, not written since."""
        return self.tensor() is tensor and self[1:] == _stamp(tensor)[1:]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if str(k) not in _IGNORED_CONFIG}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _config_digest(config: Any) -> str:
    text = json.dumps(_plain(config.to_dict()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return b""
    raw = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)
    state = xxhash.xxh3_128()
    for start in range(0, raw.numel(), _CHUNK):
        state.update(raw[start : start + _CHUNK].cpu().numpy().data)
    return state.digest()


def _digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest names, shapes, dtypes and bytes; tied tensors are read once."""
    total = hashlib.sha256()
    seen: dict[int, bytes] = {}
    for name, tensor in named:
        if id(tensor) not in seen:
            seen[id(tensor)] = _tensor_digest(tensor)
        head = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|"
        total.update(f"{len(head)}:{head}".encode() + seen[id(tensor)])
    return total.hexdigest()


def _stamp(tensor: torch.Tensor) -> _Stamp:
    version = -1 if tensor.is_inference() else tensor._version
    return _Stamp(weakref.ref(tensor), tensor.data_ptr(), version)


def _adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers that follow PEFT's conventions (``BaseTunerLayer``), without importing PEFT."""
    for name, module in base_model(model).named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            yield name, module


def _active(layer: Any) -> tuple[str, ...]:
    # a merged adapter is part of the base weights already, and of their digest
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return ()
    active = layer.active_adapters
    return (active,) if isinstance(active, str) else tuple(active)


class ModelIdentity:
    """Computes :class:`Identity` for one model object, and caches what is costly.

    Not thread-safe: the adapter calls it under its own lock.

    Attributes:
        readings: How often weights were read: it moves whenever any tensor was changed or moved.
    """

    def __init__(self, model: Any) -> None:
        self.readings = 0
        self._model = model
        self._stamps: dict[str, dict[str, _Stamp]] = {}
        self._digests: dict[str, str] = {}

    def refresh(self) -> None:
        """Forget every digest, so that the next call reads all weights again."""
        self._stamps.clear()
        self._digests.clear()

    def __call__(self) -> Identity:
        """Return the identity of the model as it is now.

        Milliseconds if nothing changed; else one pass over the changed weights.
        """
        inner = base_model(self._model)
        base, adapters = self._split()
        config = inner.config
        return Identity(
            model=f"{type(inner).__module__.partition('.')[0]}:{type(inner).__qualname__}",
            weights=self._cached("", base),
            adapters=self._adapters(adapters),
            extra=(
                ("attention", str(getattr(config, "_attn_implementation", ""))),
                ("config", _config_digest(config)),
            ),
        )

    def _split(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
        """Separate base weights from the weights of each adapter."""
        inner = base_model(self._model)
        state: dict[str, Any] = inner.state_dict(keep_vars=True)
        owners: dict[str, str] = {}
        for path, layer in _adapter_layers(self._model):
            names = (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ()))
            for kind in names:
                holder = getattr(layer, kind, None)
                if not isinstance(holder, torch.nn.ModuleDict | torch.nn.ParameterDict):
                    continue
                for adapter in holder:
                    owners[f"{path}.{kind}.{adapter}"] = adapter
        base: dict[str, torch.Tensor] = {}
        adapters: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                continue  # extra state of a module, e.g. of a quantiser: not weights
            owner = _owner(name, owners)
            if owner is None:
                base[name.replace(".base_layer.", ".")] = tensor
            else:
                adapters.setdefault(owner, {})[name] = tensor
        return base, adapters

    def _cached(self, key: str, named: dict[str, torch.Tensor]) -> str:
        known = self._stamps.get(key, {})
        same = named.keys() == known.keys() and all(
            known[name].still(tensor) for name, tensor in named.items()
        )
        if key not in self._digests or not same:
            # stamped before it is read: a change meanwhile is seen at the next call
            self._stamps[key] = {name: _stamp(tensor) for name, tensor in named.items()}
            self._digests[key] = _digest(named.items())
            self.readings += 1
        return self._digests[key]

    def _adapters(self, weights: dict[str, dict[str, torch.Tensor]]) -> tuple[AdapterId, ...]:
        scales: dict[str, list[tuple[str, float]]] = {}
        for path, layer in _adapter_layers(self._model):
            for name in _active(layer):
                scale = getattr(layer, "scaling", {}).get(name)
                if scale is not None:
                    scales.setdefault(name, []).append((path, float(scale)))
        found = []
        for name, entries in scales.items():
            digest = self._cached(f"adapter:{name}", weights.get(name, {}))
            version = hashlib.sha256(f"{digest}|{entries!r}".encode()).hexdigest()
            common = {scale for _, scale in entries}
            # differing scales per layer are in the version; the field then says "not one number"
            found.append(AdapterId(name, version, common.pop() if len(common) == 1 else 0.0))
        return tuple(found)


def _owner(name: str, owners: dict[str, str]) -> str | None:
    """Adapter that the tensor ``name`` belongs to: the longest path prefix that is owned."""
    while name:
        if name in owners:
            return owners[name]
        name = name.rpartition(".")[0]
    return None
