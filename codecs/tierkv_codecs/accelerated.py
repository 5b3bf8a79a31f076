"""Tensors in device memory: the one place that decides who encodes and decodes them.

Codecs ask here first. A tensor in host memory is theirs, and nothing is loaded. For one in a GPU's
memory there are kernels (:mod:`tierkv_codecs.triton`) where Triton is installed, with the same
bytes: only the encoding crosses the bus. They are tried on a sample first, on each device and for
each codec and dtype. Where they fail, where there are none for a tensor or no memory for them, or
where ``TIERKV_FAST=0`` switches them off, the tensor crosses the bus, and the codec goes on in host
memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from tierkv.errors import CodecError
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tierkv.abc import TensorBytesCodec

__all__ = ["decode", "encode"]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_verdicts: dict[tuple[str, str, torch.dtype, str], bool] = {}
_SAMPLE = (3, 21, 80)


def encode(codec: TensorBytesCodec, source: torch.Tensor, tensor: str, out: memoryview) -> bool:
    """Encode a tensor in device memory; False: it is in host memory, or empty.

    Runs on torch's current stream and waits for it.

    Raises:
        CodecError: as the codec's own ``encode``.
    """
    if _in_host_memory(source) or source.numel() == 0:
        return False
    kernels = _kernels(codec, source, tensor)
    if kernels is None or not _fits(_encode, kernels, codec, source, tensor, out):
        codec.encode(source.cpu(), tensor, out)
    return True


def decode(codec: TensorBytesCodec, data: memoryview, tensor: str, into: torch.Tensor) -> bool:
    """Decode into a tensor in device memory; False: it is in host memory, or empty.

    Runs on torch's current stream; ``data`` may be reused when it returns.

    Raises:
        CodecError: as the codec's own ``decode``.
    """
    if _in_host_memory(into) or into.numel() == 0:
        return False
    kernels = _kernels(codec, into, tensor)
    if kernels is None or not _fits(_decode, kernels, codec, into, tensor, data):
        import torch

        whole = torch.empty(into.shape, dtype=into.dtype)
        codec.decode(data, tensor, whole)
        into.copy_(whole)
    return True


def _in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@functools.cache
def _module() -> Any:
    """The kernels, or None without Triton."""
    if os.environ.get("TIERKV_FAST") == "0" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("tierkv_codecs.triton.coding")


def _kernels(codec: TensorBytesCodec, like: torch.Tensor, tensor: str) -> Any:
    """The kernels, if they take such a tensor and give the right bytes on its device."""
    if like.device.type != "cuda" or (found := _module()) is None or not found.takes(codec, like):
        return None
    return found if _trusted(found, codec, like, tensor) else None


def _trusted(kernels: Any, codec: TensorBytesCodec, like: torch.Tensor, tensor: str) -> bool:
    way = getattr(codec, "grouping", "") or ("k" if tensor == "k" else "v")
    key = (codec.name, str(like.device), like.dtype, way)
    if key not in _verdicts:
        with _lock:  # seconds: kernels are compiled
            if key not in _verdicts:
                _verdicts[key] = _tried(kernels, codec, like, tensor)
    return _verdicts[key]


def _tried(kernels: Any, codec: TensorBytesCodec, like: torch.Tensor, tensor: str) -> bool:
    """Whether a sample is encoded and decoded as the codec does it in host memory."""
    import torch

    try:
        sample = torch.linspace(-3, 3, 3 * 21 * 80).sin().mul(4).view(_SAMPLE).to(like.dtype)
        size = codec.encoded_bytes(_SAMPLE, str(like.dtype).removeprefix("torch."), tensor)
        right, found = (memoryview(bytearray(size)) for _ in range(2))
        codec.encode(sample, tensor, right)
        there = sample.to(like.device)
        _encode(kernels, codec, there, tensor, found)
        back = torch.empty_like(sample)
        codec.decode(right, tensor, back)
        _decode(kernels, codec, there.zero_(), tensor, right)
        if found == right and torch.equal(there.cpu(), back):
            return True
        _log.warning("%s: kernels give other numbers on %s: not used", codec.name, like.device)
    except Exception as error:  # noqa: BLE001 - no compiler, no driver, another Triton: all the same
        _log.warning("%s: no kernels on %s: %s", codec.name, like.device, error)
    return False


def _fits(
    work: Callable[[Any, TensorBytesCodec, torch.Tensor, str, memoryview], None],
    kernels: Any,
    codec: TensorBytesCodec,
    values: torch.Tensor,
    tensor: str,
    data: memoryview,
) -> bool:
    """Do it; False if the device has no memory for it left."""
    import torch

    try:
        work(kernels, codec, values, tensor, data)
    except torch.cuda.OutOfMemoryError:
        _log.info("%s: no memory on %s: it is done in host memory", codec.name, values.device)
        return False
    return True


def _encode(
    kernels: Any, codec: TensorBytesCodec, source: torch.Tensor, tensor: str, out: memoryview
) -> None:
    shape, dtype = tuple(source.shape), str(source.dtype).removeprefix("torch.")
    there = kernels.room(codec, shape, dtype, tensor, source.device)
    (refused,) = kernels.encode(codec, [source], tensor, there)
    if refused:
        raise CodecError(f"{codec.name}: NaN, infinite or huge values cannot be quantised")
    size = codec.encoded_bytes(shape, dtype, tensor)
    over(out, "uint8", (size,)).copy_(there[0, :size])


def _decode(
    kernels: Any, codec: TensorBytesCodec, into: torch.Tensor, tensor: str, data: memoryview
) -> None:
    shape, dtype = tuple(into.shape), str(into.dtype).removeprefix("torch.")
    there = kernels.room(codec, shape, dtype, tensor, into.device)
    there[0, : len(data)].copy_(over(data, "uint8", (len(data),)))
    kernels.decode(codec, there, [data], tensor, [into])
