"""Identity of a live model: everything that its KV depends on, and no name alone.

* weights: a digest over the bytes of every parameter and buffer, saved with the model or not;
* configuration (RoPE, attention types, windows, ...), attention implementation, compute dtype;
* active LoRA-like adapters with a digest of their weights, their settings and their scales;
* hooks on its modules and replaced ``forward`` methods (:mod:`tierkv_adapters.hf.patches`).

Digests are kept per model object and renewed when a parameter was replaced, moved or changed in
place, and when adapters were merged or unmerged. Any other edit through ``parameter.data``, or of
a parameter made in inference mode, leaves no trace that could be seen cheaply; call
:meth:`ModelIdentity.refresh` after one. Numbers that a module keeps as plain attributes (an
epsilon, a scale) are taken from the configuration: change them there, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierkv.blocks import AdapterId, Identity
from tierkv_adapters.configs import config_digest
from tierkv_adapters.hf.compat import base_model, text_config
from tierkv_adapters.hf.patches import Patches
from tierkv_adapters.hf.tuners import adapter_config, tuners
from tierkv_adapters.hf.weights import Digests, Weights, read_weights, tensor_digest

if TYPE_CHECKING:
    from tierkv_adapters.hf.tuners import Tuner

__all__ = ["ModelIdentity"]

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
# implementations that are chosen per model object; a configuration's dict leaves them out
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")


class ModelIdentity:
    """Computes :class:`Identity` for one model object, and caches what is costly.

    Not thread-safe: the adapter calls it under its own lock.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._digests = Digests()
        self._patches = Patches()

    @property
    def readings(self) -> int:
        """How often weights were read: it moves whenever any tensor was changed or moved."""
        return self._digests.readings

    def refresh(self) -> None:
        """Forget every digest, so that the next call reads all weights again."""
        self._digests.clear()

    def __call__(self) -> Identity:
        """Return the identity of the model as it is now.

        Milliseconds if nothing changed; else one pass over the changed weights.

        Raises:
            AttachError: if a part of the model's state cannot be read, or its adapters are about
                to change by themselves.
        """
        inner = base_model(self._model)
        layers = tuners(self._model)
        base, owned = _split(read_weights(inner), layers)
        active = {name: None for layer in layers for name in layer.active}
        merged = [(layer.path, layer.merged) for layer in layers if layer.merged]
        versions = {
            name: self._version(name, owned, layers)
            for name in {**active, **{name: None for _, names in merged for name in names}}
        }
        # PEFT merges through ``.data``, which no stamp shows: what was merged tells it
        state = tuple((path, name, versions[name]) for path, names in merged for name in names)
        configs = (inner.config, text_config(self._model))
        patches = self._patches(self._model)
        return Identity(
            model=f"{type(inner).__module__}:{type(inner).__qualname__}",
            weights=self._digests.get("", base, state),
            adapters=tuple(
                AdapterId(name, versions[name], _common_scale(name, layers)) for name in active
            ),
            extra=(
                ("config", config_digest(inner.config.to_dict(), _IGNORED_CONFIG)),
                *((n, str([getattr(c, n, None) for c in configs])) for n in _IMPLEMENTATIONS),
                *((("patches", config_digest(list(patches))),) if patches else ()),
            ),
        )

    def _version(self, name: str, owned: dict[str, Weights], layers: list[Tuner]) -> str:
        """Digest of an adapter: weights, settings per layer, settings of the whole."""
        mine = owned.get(name, Weights({}, {}))
        settings = [
            (place, tensor_digest(value).hex() if isinstance(value, torch.Tensor) else value)
            for layer in layers
            if name in layer.active or name in layer.merged
            for place, value in layer.settings(name)
        ]
        weights = self._digests.get(f"adapter:{name}", mine)
        stated = [weights, settings, adapter_config(self._model, name)]
        return config_digest(stated, _IGNORED_CONFIG)


def _common_scale(name: str, layers: list[Tuner]) -> float:
    """The scale of an adapter; 0 if there is not one number (its version tells them apart)."""
    scales = {layer.scale(name) for layer in layers if name in layer.active} - {None}
    return (scales.pop() or 0.0) if len(scales) == 1 else 0.0


def _split(state: Weights, layers: list[Tuner]) -> tuple[Weights, dict[str, Weights]]:
    """Separate base weights from the weights of each adapter."""
    owners = dict(pair for layer in layers for pair in layer.owned())
    base = Weights({}, {})
    adapters: dict[str, Weights] = {}
    for kind in range(len(state)):
        values: dict[str, Any] = state[kind]
        for name, value in values.items():
            owner = _owner(name, owners)
            if owner is None:
                # as in the model before it was wrapped
                name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
                home = base
            else:
                home = adapters.setdefault(owner, Weights({}, {}))
            into: dict[str, Any] = home[kind]
            into[name] = value
    return base, adapters


def _owner(name: str, owners: dict[str, str]) -> str | None:
    """Adapter that the tensor ``name`` belongs to: the longest path prefix that is owned."""
    while name:
        if name in owners:
            return owners[name]
        name = name.rpartition(".")[0]
    return None
