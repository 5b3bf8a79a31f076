"""KV through a chain and back, by way of real frames; and how fast the chain is by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tierkv.blocks import BlockKey, Identity, part_id
from tierkv.chains import parse_chains
from tierkv.errors import CodecError
from tierkv.layout import Group, GroupKind, Layer, Layout, Space
from tierkv.pipeline import PartLabel, Pipeline, deliver, open_frame
from tierkv.views import dense, over
from tierkv_adapters.hf.report.choices import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.chains import Chain, Chains

__all__ = ["Coded", "Speed", "code", "speed"]

_ENOUGH = 0.2  # seconds of processor time for one measurement
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Coded:
    """KV that went through a chain.

    Attributes:
        kv: What came back, one pair a layer, ``[heads, tokens, dim]``.
        bits: Stored bits a number, scales and headers of codecs included.
        ratio: Raw bytes over stored bytes.
        fallbacks: Sections that the codec refused; they were stored losslessly.
    """

    kv: list[tuple[torch.Tensor, torch.Tensor]]
    bits: float
    ratio: float
    fallbacks: int


class Speed(NamedTuple):
    """GB of raw bytes a second of processor time of one thread, and against a plain copy."""

    encode: float
    decode: float
    encode_vs_memcpy: float
    decode_vs_memcpy: float


def _space(kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Space:
    dtype = str(kv[0][0].dtype).removeprefix("torch.")
    layers = tuple(
        Layer.kv(i, k.shape[0], k.shape[2], dtype, v_dim=v.shape[2]) for i, (k, v) in enumerate(kv)
    )
    layout = Layout((Group(GroupKind.FULL, layers),))
    return Space(Identity("codec-report", "1"), layout, block_tokens=BLOCK)


def code(
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]], chain: str, *, exact_blocks: int = 0
) -> Coded:
    """Store KV block by block in frames and read it back, as the engine does.

    Args:
        kv: One pair a layer, ``[heads, tokens, dim]``, all of one dtype.
        chain: Codec chain.
        exact_blocks: This many first blocks are stored raw; they count at their full size.

    Raises:
        ConfigError: if there is no such chain.
    """
    space = _space(kv)
    view = dense(list(kv))
    back = [(torch.empty_like(k), torch.empty_like(v)) for k, v in kv]
    target = dense(back)
    coder, exact = Pipeline(space, chain), Pipeline(space, "raw")
    frame = memoryview(bytearray(exact.max_bytes(0)))
    part, root = part_id(BlockKey(bytes(32)), 0), BlockKey(bytes(32))
    tokens, stored, raw, fallbacks = kv[0][0].shape[1], 0, 0, 0
    for number, start in enumerate(range(0, tokens, BLOCK)):
        label = PartLabel(part, 1, root, None, "exact", min(BLOCK, tokens - start))
        pipeline = exact if number < exact_blocks else coder
        done = pipeline.encode(label, view, start, frame)
        header = open_frame(frame, space, part, 1, root)
        deliver(header, frame, target, start)
        stored += sum(section.nbytes for section in header.sections)
        raw += done.raw_bytes
        fallbacks += done.fallbacks
    numbers = sum(k.numel() + v.numel() for k, v in kv)
    return Coded(back, stored * 8 / numbers, raw / stored, fallbacks)


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")


class _Bench:
    """One chain, or rules, over many tensors, each with memory of its own."""

    def __init__(
        self, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], chains: Chain | Chains
    ) -> None:
        named = [
            (i, t.contiguous(), name)
            for i, pair in enumerate(kv)
            for t, name in zip(pair, "kv", strict=True)
        ]
        self.tensors = [(t, name) for _, t, name in named]
        self.chains = [chains.of(i, name) for i, _, name in named]
        self.targets = [torch.zeros_like(t) for t, _ in self.tensors]
        self.packed = [
            memoryview(bytearray(self._packed_bytes(chain, *row)))
            for chain, row in zip(self.chains, self.tensors, strict=True)
        ]
        self.stored = [memoryview(bytearray(len(p) + 64)) for p in self.packed]
        self.lengths = [0] * len(self.tensors)

    def _packed_bytes(self, chain: Chain, tensor: torch.Tensor, name: str) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return chain.packed_bytes(tuple(tensor.shape), dtype, name)

    def copy(self) -> None:
        for (tensor, _), target in zip(self.tensors, self.targets, strict=True):
            target.copy_(tensor)

    def encode(self) -> None:
        rows = zip(self.chains, self.tensors, self.packed, self.stored, strict=True)
        for i, (chain, (tensor, name), packed, stored) in enumerate(rows):
            data = packed
            if chain.packing:
                chain.pack(tensor, name, packed)
            else:
                data = _memory(tensor)
            if chain.squeezer is not None:
                nbytes = chain.squeezer.encode(data, stored)
                if nbytes is None:
                    raise CodecError(f"{chain.name}: more than 64 bytes longer than its input")
                self.lengths[i] = nbytes
            elif not chain.packing:
                over(packed, "uint8", (len(packed),)).copy_(over(data, "uint8", (len(data),)))

    def decode(self) -> None:
        places = zip(self.targets, self.packed, self.stored, self.lengths, strict=True)
        rows = zip(self.chains, self.tensors, places, strict=True)
        for chain, (_, name), (target, packed, stored, nbytes) in rows:
            room = _memory(target)
            if chain.squeezer is not None:
                into = packed if chain.packing else room
                chain.squeezer.decode(stored[:nbytes], into)
            if chain.packing:
                chain.unpack(packed, name, target)
            elif chain.squeezer is None:
                over(room, "uint8", (len(room),)).copy_(over(packed, "uint8", (len(packed),)))


def speed(kv: Sequence[tuple[torch.Tensor, torch.Tensor]], chain: str) -> Speed:
    """Processor time of a chain on whole tensors, beside a copy of the same memory.

    One thread; encoding, decoding and copying take turns, and the median of the turns counts.
    Tensors are as long as they are given, not cut into blocks: calls cost nothing then.

    Raises:
        ConfigError: if there is no such chain.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bench = _Bench(kv, parse_chains(chain))
        steps = (bench.encode, bench.decode, bench.copy)
        loops = []
        for step in steps:
            step()  # compiles, touches memory
            start = time.process_time()
            step()
            cost = max(time.process_time() - start, 1e-6)
            loops.append(max(1, round(_ENOUGH / _REPEATS / cost)))
        taken: list[list[float]] = [[], [], []]
        for _ in range(_REPEATS):
            for i, step in enumerate(steps):
                start = time.process_time()
                for _ in range(loops[i]):
                    step()
                taken[i].append((time.process_time() - start) / loops[i])
    finally:
        torch.set_num_threads(threads)
    encode, decode, copy = (sorted(times)[_REPEATS // 2] for times in taken)
    gigabytes = sum(t.numel() * t.dtype.itemsize for t, _ in bench.tensors) / 1e9
    return Speed(gigabytes / encode, gigabytes / decode, copy / encode, copy / decode)
