"""vLLM's cache tensors as page groups: opaque pages, or K and V with their true axes.

vLLM hands one tensor per layer, logically ``[blocks, heads, states, content]`` in one of several
physical orders; what the content is, only the attention backend knows. *Opaque* pages are moved
whole and looked into by nobody, which is right for every backend. *Described* ones are cut into K
and V (or a latent) so that lossy codecs find heads, tokens and channels where they expect them:

* FlashAttention and Triton keep ``[K | V]`` along the content axis;
* the CPU backend keeps K and then V inside each head's page, K channel by channel
  (``[channels, tokens]``), V token by token; instruction sets that tile it are not described;
* MLA keeps one latent per token.

*Recurrent* layers (Mamba, linear attention, short convolutions) have no tokens in their pages: a
page is the state behind one token, in one tensor or several, and is always opaque.

Refused are groups of which a prefix cannot be brought back, or not provably right: cross-attention
(its KV is another input's), states that vLLM keeps for the running token only (prefix caching off)
or rolls back (speculative decoding), and chunked-local attention. Of the last, a prefix needs the
KV since its chunk began, which is none of the rules that blocks are stored by; vLLM keeps all of it
with ``--disable-hybrid-kv-cache-manager``, and it is then served like full attention.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.errors import AttachError
from tierkv.layout import GroupKind
from tierkv_adapters.serving.pages import PagedLayer, PageGroup, opaque

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["page_groups", "shapes"]

_KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.LATENT,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
}
_HALVES = frozenset({"FLASH_ATTN", "FLASH_ATTN_VLLM_V1", "TRITON_ATTN", "TRITON_ATTN_VLLM_V1"})
_CHANNELS_FIRST = frozenset({"CPU_ATTN/vec", "CPU_ATTN/vec16"})


class _Place(NamedTuple):
    """One layer: its tensor, what vLLM says of it, and its backend."""

    name: str
    number: int
    cache: Any
    spec: Any
    backend: str


def page_groups(
    caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    config: Any,
    backends: Mapping[str, str],
    *,
    described: bool = False,
) -> tuple[PageGroup, ...]:
    """Page groups of one rank, in the order of vLLM's transferable groups.

    Args:
        caches: Cache tensor, or those of a recurrent layer, by layer name, as
            ``register_kv_caches`` gets them.
        config: vLLM's ``KVCacheConfig`` of the rank.
        backends: Attention backend by layer name.
        described: Whether K and V are wanted with their true axes, not opaque pages.

    Raises:
        AttachError: if a group is of a kind that cannot be kept, or described pages are wanted
            and a layer cannot be described.
    """
    numbers = _numbers(config)
    groups = []
    for group in _transferred(config):
        kind, window = _kind(group.kv_cache_spec)
        places = _places(group, caches, backends, numbers, int(config.num_blocks))
        packing = str(getattr(config, "kv_cache_layout", None) or "default")
        recurrent = kind is GroupKind.STATE
        layers = tuple(
            _state(place) if recurrent else _layer(place, packing, described) for place in places
        )
        groups.append(PageGroup(kind, window, int(group.kv_cache_spec.block_size), layers))
    if not groups:
        raise AttachError("this model keeps no KV that could be stored; take the connector out")
    return tuple(groups)


def _transferred(config: Any) -> list[Any]:
    """Groups that connectors move; older versions have no others."""
    found = [g for g in config.kv_cache_groups if getattr(g, "enable_kv_transfer", True)]
    for group in found:
        if getattr(group, "host_resident", False):
            raise AttachError(
                "a group of this model's KV lives in host memory already (HiSparse), which "
                "TierKVConnector does not support; take the connector out"
            )
    return found


def _kind(spec: Any) -> tuple[GroupKind, int | None]:
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:
        kinds = {_kind(one) for one in inner.values()}
        if len(kinds) == 1:
            return kinds.pop()
        raise AttachError(_refused("a group of differing attention", spec))
    name = type(spec).__name__
    if name == "MambaSpec":
        _check_states(spec)
        return GroupKind.STATE, None
    kind = _KINDS.get(name)
    if name == "ChunkedLocalAttentionSpec":
        raise AttachError(
            "this model has chunked-local attention, whose KV TierKVConnector cannot bring back by "
            "chunks: set --disable-hybrid-kv-cache-manager, which keeps all of it"
        )
    if kind is None or not getattr(spec, "prefix_cacheable", True):
        raise AttachError(_refused("KV", spec))
    if getattr(spec, "extra_retained_tokens", 0) or getattr(spec, "bounded_replay", False):
        raise AttachError(_refused("a window that is replayed", spec))
    window = int(spec.sliding_window) if kind is GroupKind.SLIDING else None
    return kind, window


def _check_states(spec: Any) -> None:
    """Refuse states that are not kept at the borders of blocks, or that may be rolled back."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise AttachError(
            f"this model's recurrent states are kept for the running token only (cache mode "
            f"{mode!r}): set --enable-prefix-caching, so that vLLM keeps those between blocks"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        raise AttachError(
            "speculative decoding rolls recurrent states back, and nobody tells which page then "
            "holds which: TierKVConnector serves recurrent models without --speculative-config only"
        )


def _refused(what: str, spec: Any) -> str:
    return (
        f"this model keeps {what} of kind {type(spec).__name__}, of which a prefix cannot be "
        "brought back; TierKVConnector serves full, sliding-window and MLA attention and recurrent "
        "states: take the connector out for this model"
    )


def _numbers(config: Any) -> dict[str, int]:
    """A number for each layer: that in its name, or its place where those are not unique."""
    names = [name for group in _transferred(config) for name in group.layer_names]
    found = [re.findall(r"\.(\d+)(?=\.|$)", f".{name}") for name in names]
    numbers = [int(digits[0]) for digits in found if digits]
    if len(set(numbers)) == len(names):
        return dict(zip(names, numbers, strict=True))
    return {name: place for place, name in enumerate(names)}


def _places(
    group: Any,
    caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    backends: Mapping[str, str],
    numbers: Mapping[str, int],
    blocks: int,
) -> list[_Place]:
    """The layers of a group that have memory of their own (others use another layer's KV)."""
    found, seen = [], set()
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        cache: Any = caches.get(name)
        if cache is None:
            raise AttachError(f"vLLM registered no cache for layer {name!r}")
        spec = inner[name] if inner and name in inner else group.kv_cache_spec
        if type(spec).__name__ == "MambaSpec":
            found.append(_Place(name, numbers[name], _states(cache), spec, backends[name]))
            continue
        if not hasattr(cache, "data_ptr"):
            raise AttachError(f"the cache of layer {name!r} is several tensors, not one")
        memory = cache.data_ptr(), tuple(cache.shape), cache.stride()
        if memory in seen:
            continue
        seen.add(memory)
        if cache.dim() == 3:  # one latent a token, without an axis of heads
            cache = cache.unsqueeze(1)
        if cache.shape[0] != blocks:
            # the kernel's blocks are smaller than the manager's: several make a page
            if cache.shape[0] % blocks:
                raise AttachError(
                    f"layer {name!r}: {cache.shape[0]} kernel blocks are not a multiple of "
                    f"{blocks} blocks"
                )
            cache = cache.view(blocks, -1, *cache.shape[1:])
        found.append(_Place(name, numbers[name], cache, spec, backends[name]))
    return found


def _states(cache: Any) -> tuple[torch.Tensor, ...]:
    return tuple(cache) if isinstance(cache, list | tuple) else (cache,)


def _state(place: _Place) -> PagedLayer:
    """A recurrent layer: all bytes of its states, in one tensor (vLLM 0.32) or in one for each.

    Raises:
        AttachError: if its tensors are not what vLLM says of them.
    """
    stated = [
        (*map(int, shape), str(dtype).removeprefix("torch."))
        for shape, dtype in zip(place.spec.shapes, place.spec.dtypes, strict=True)
    ]
    due = sum(
        prod(shape) * dtype.itemsize
        for shape, dtype in zip(place.spec.shapes, place.spec.dtypes, strict=True)
    )
    found = sum(prod(t.shape[1:]) * t.element_size() for t in place.cache)
    if found != due or not all(_dense(tensor) for tensor in place.cache):
        raise AttachError(
            f"layer {place.name!r}: vLLM says that a page holds states {stated}, {due} bytes, and "
            f"registered {[(tuple(t.shape), t.stride(), str(t.dtype)) for t in place.cache]}"
        )
    named = {f"state{number}": opaque(tensor) for number, tensor in enumerate(place.cache)}
    shapes = ",".join("x".join(map(str, shape)) for shape in stated)
    orders = "" if len(place.cache) == 1 else f":{[_order(tensor) for tensor in place.cache]}"
    return PagedLayer(place.number, named, f"vllm:{place.backend}:{shapes}{orders}")


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Axes of a page from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(1, tensor.dim()), key=lambda axis: (-strides[axis], axis)))


def _layer(place: _Place, packing: str, described: bool) -> PagedLayer:
    order = f"vllm:{place.backend}:{packing}"
    if described:
        tensors = _describe(place)
        if tensors is None:
            raise AttachError(
                f"layer {place.name!r} (backend {place.backend}, cache {tuple(place.cache.shape)} "
                f"{place.cache.dtype}) cannot be described, which lossy codecs need: choose "
                "lossless codecs (layout 'opaque'), or another attention backend"
            )
        # the axes are true ones: how the pool orders them does not change what is stored
        return PagedLayer(place.number, tensors)
    cache, tokens = place.cache, int(place.spec.block_size)
    if _dense(cache):
        shape = "x".join(map(str, cache.shape[1:]))
        return PagedLayer(
            place.number, {"page": opaque(cache, tokens)}, f"{order}:{shape}:{cache.dtype}"
        )
    if cache.dim() == 4 and cache.shape[2] == tokens and cache.stride(3) == 1:
        # other layers' bytes lie between the heads of a page: a head at a time
        import torch

        return PagedLayer(place.number, {"cells": cache.view(torch.uint8)}, f"{order}:cells")
    raise AttachError(
        f"layer {place.name!r}: pages of shape {tuple(cache.shape[1:])} with strides "
        f"{cache.stride()[1:]} are not one stretch of memory; set VLLM_KV_CACHE_LAYOUT=LBHNC"
    )


def _dense(cache: torch.Tensor) -> bool:
    """Whether each page is one stretch of memory, in whatever order of its axes."""
    due = 1
    axes = sorted(zip(cache.shape[1:], cache.stride()[1:], strict=True), key=lambda a: (a[1], a[0]))
    for size, step in axes:
        if size > 1 and step != due:
            return False
        due *= size
    return True


def _describe(place: _Place) -> dict[str, torch.Tensor] | None:
    """K and V, or the latent, as ``[pages, heads, tokens, dim]``; None if that is not known."""
    cache, spec = place.cache, place.spec
    tokens = int(spec.block_size)
    quantised = int(getattr(spec, "kv_quant_mode", 0) or 0)
    if cache.dim() != 4 or cache.shape[2] != tokens or quantised:
        return None
    if getattr(spec, "state_content_bytes", None) is not None:
        return None
    keys, values = int(spec.head_size), int(spec.head_size_v)
    if _kind(spec)[0] is GroupKind.LATENT:
        whole = cache.shape[1] == 1 and cache.shape[3] == keys
        return {"latent": cache} if whole and "fp8" not in str(cache.dtype) else None
    if cache.shape[3] != keys + values or cache.dtype.itemsize < 2:
        return None
    if place.backend in _HALVES:
        return {"k": cache[..., :keys], "v": cache[..., keys:]}
    if place.backend in _CHANNELS_FIRST and keys == values:
        return _channels_first(cache, keys)
    return None


def _channels_first(cache: torch.Tensor, dim: int) -> dict[str, torch.Tensor] | None:
    pages, heads, tokens, content = cache.shape
    if cache.stride(3) != 1 or cache.stride(2) != content:
        return None
    outer = cache.stride(0), cache.stride(1)
    first, shape = cache.storage_offset(), (pages, heads, tokens, dim)
    return {
        "k": cache.as_strided(shape, (*outer, 1, tokens), first),
        "v": cache.as_strided(shape, (*outer, dim, 1), first + tokens * dim),
    }


def shapes(groups: Sequence[PageGroup]) -> tuple[tuple[str, int | None, int], ...]:
    """Kind, window and page tokens of each group: plain data for the scheduler's side."""
    return tuple((group.kind.value, group.window, group.page_tokens) for group in groups)
