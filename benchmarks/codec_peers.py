"""Codec chains beside other people's codecs, on the same tensors, by one thread.

Run ``python -m benchmarks.codec_peers [--json] [--repeats N] [--layers N]``. Peers: ZipNN
(lossless), LMCache's fp8 and CacheGen, and the package ``turboquant``. What cannot be imported, or
does not run without a GPU, has a row that says so. All of them run in this process: start it with
an interpreter that has them.

Each peer is followed by the chain of ours that takes as many bits or fewer. GB/s are raw bytes per
second of processor time; peers take turns, and the median counts. ``rel_error`` is the Frobenius
norm of the error over that of the tensors, keys and values apart.
"""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.report import About, arguments, emit
from benchmarks.synthetic import synthetic
from tierkv.chains import parse_chain
from tierkv_codecs.kernels import available

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.report import Cell

Tensors = list[tuple[torch.Tensor, str]]


class Contender(NamedTuple):
    """One codec: ``encode`` keeps its result and returns its bytes, ``decode`` gives tensors."""

    name: str
    encode: Callable[[], int]
    decode: Callable[[], list[torch.Tensor]]


def ours(text: str, tensors: Tensors) -> Contender:
    """A chain of this project, into memory that is kept."""
    chain = parse_chain(text)
    targets = [torch.empty_like(t) for t, _ in tensors]
    packed = [
        memoryview(bytearray(chain.packed_bytes(tuple(t.shape), "bfloat16", name)))
        for t, name in tensors
    ]
    stored = [memoryview(bytearray(len(p) + 4096)) for p in packed]
    lengths = [len(p) for p in packed]

    def encode() -> int:
        for i, (tensor, name) in enumerate(tensors):
            chain.pack(tensor, name, packed[i])
            if chain.squeezer is not None:
                nbytes = chain.squeezer.encode(packed[i], stored[i])
                assert nbytes is not None
                lengths[i] = nbytes
        return sum(lengths)

    def decode() -> list[torch.Tensor]:
        for i, (_, name) in enumerate(tensors):
            if chain.squeezer is not None:
                chain.squeezer.decode(stored[i][: lengths[i]], packed[i])
            chain.unpack(packed[i], name, targets[i])
        return targets

    return Contender(f"tierkv {text}", encode, decode)


def zipnn(tensors: Tensors) -> Contender:
    """ZipNN on bytes, one thread; it changes its input, so that it gets a copy (not timed out)."""
    coder = importlib.import_module("zipnn").ZipNN(
        input_format="byte", bytearray_dtype="bfloat16", threads=1
    )
    kept: list[Any] = []

    def encode() -> int:
        kept.clear()
        for tensor, _ in tensors:
            array: Any = tensor.view(torch.uint8).numpy()
            kept.append(coder.compress(bytearray(array.reshape(-1))))
        return sum(len(k) for k in kept)

    def decode() -> list[torch.Tensor]:
        found = []
        for data, (tensor, _) in zip(kept, tensors, strict=True):
            plain = torch.frombuffer(bytearray(coder.decompress(data)), dtype=torch.bfloat16)
            found.append(plain.view(tensor.shape))
        return found

    return Contender("zipnn", encode, decode)


def lmcache_fp8(tensors: Tensors) -> Contender:
    """The serializer of LMCache's distributed storage, on memory objects that are only tensors."""
    fp8 = importlib.import_module("lmcache.v1.distributed.serde.fp8")
    writer, reader = fp8.Fp8QuantizationSerializer(), fp8.Fp8QuantizationDeserializer()
    stored = [SimpleNamespace(tensor=torch.empty(t.numel(), dtype=torch.uint8)) for t, _ in tensors]
    targets = [SimpleNamespace(tensor=torch.empty_like(t)) for t, _ in tensors]

    def encode() -> int:
        pairs = zip(tensors, stored, strict=True)
        return sum(writer.serialize(SimpleNamespace(tensor=t), s, None) for (t, _), s in pairs)

    def decode() -> list[torch.Tensor]:
        for source, target in zip(stored, targets, strict=True):
            reader.deserialize(source, target, None)
        return [target.tensor for target in targets]

    return Contender("lmcache fp8", encode, decode)


def lmcache_cachegen(tensors: Tensors) -> Contender:
    """CacheGen as LMCache has it: the bins of a 7B model, arithmetic coding."""
    place = "lmcache.v1.storage_backend.naive_serde"
    encoder, decoder, basics = (
        importlib.import_module(f"{place}.cachegen_{part}")
        for part in ("encoder", "decoder", "basics")
    )
    config = basics.CacheGenConfig.from_model_name("mistralai/Mistral-7B-Instruct-v0.2")
    layers = len(tensors) // 2
    heads, tokens, dim = tensors[0][0].shape
    whole = torch.stack([t.transpose(0, 1) for t, _ in tensors])
    whole = whole.view(layers, 2, tokens, heads, dim)
    bins = [torch.full((layers,), float(specs[0].bins)) for specs in (config.kspecs, config.vspecs)]
    room = torch.zeros((tokens, 2 * layers * heads * dim), dtype=torch.uint8)
    kept: list[Any] = []

    def encode() -> int:
        found = encoder.encode_function(whole, config, *bins, tokens)
        kept[:] = [type(found), found.to_bytes()]
        return len(kept[1])

    def decode() -> list[torch.Tensor]:
        data = kept[0].from_bytes(kept[1])
        codes = decoder.decode_function_gpu(data.cdf, data.data_chunks, layers, tokens, room)
        largest = (data.max_tensors_key, data.max_tensors_value)
        both = [
            decoder.do_dequantize(*part).bfloat16().view(layers, tokens, heads, dim).transpose(1, 2)
            for part in zip(codes, bins, largest, strict=True)
        ]
        return [both[i % 2][i // 2] for i in range(2 * layers)]

    encode()
    decode()  # says at once if this machine cannot
    return Contender("lmcache cachegen", encode, decode)


def turboquant(bits: int) -> Callable[[Tensors], Contender]:
    """The package of that name; its codes are one byte each, counted as ``bits`` if packed."""

    def make(tensors: Tensors) -> Contender:
        core = importlib.import_module("turboquant.core")
        coder = core.TurboQuantMSE(tensors[0][0].shape[-1], bits, device="cpu")
        kept: list[Any] = []

        def encode() -> int:
            kept.clear()
            for tensor, _ in tensors:
                kept.append(coder.quantize(tensor.view(-1, tensor.shape[-1]).float()))
            return sum(codes.numel() * bits // 8 + norms.numel() * 2 for codes, norms in kept)

        def decode() -> list[torch.Tensor]:
            pairs = zip(kept, tensors, strict=True)
            return [coder.dequantize(*k).bfloat16().view(t.shape) for k, (t, _) in pairs]

        return Contender(f"turboquant {bits}", encode, decode)

    return make


PEERS: Final[tuple[tuple[str, Callable[[Tensors], Contender], tuple[str, ...]], ...]] = (
    ("zipnn", zipnn, ("planes",)),
    ("lmcache fp8", lmcache_fp8, ("fp8", "int8")),
    ("lmcache cachegen", lmcache_cachegen, ("int3+planes", "int2")),
    ("turboquant 4", turboquant(4), ("rot4/token", "rot4", "int4")),
    ("turboquant 3", turboquant(3), ("rot3/token", "rot3")),
)


def _errors(tensors: Tensors, found: Sequence[torch.Tensor]) -> dict[str, float]:
    errors = {}
    for name in ("k", "v"):
        pairs = [(t, f) for (t, n), f in zip(tensors, found, strict=True) if n == name]
        miss = sum(float((f.double() - t.double()).square().sum()) for t, f in pairs)
        errors[name] = (miss / sum(float(t.double().square().sum()) for t, _ in pairs)) ** 0.5
    return errors


def _timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def rows(tensors: Tensors, repeats: int) -> list[dict[str, Cell]]:
    """One row a codec, in the order of :data:`PEERS`."""
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    for name, make, chains in PEERS:
        try:
            contenders.append(make(tensors))
        except Exception as error:  # noqa: BLE001 - a peer may be missing or fail in any way
            missing[name] = f"{type(error).__name__}: {error}"[:100]
        contenders += [ours(chain, tensors) for chain in chains]
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in contenders]
    sizes = [contender.encode() for contender in contenders]  # compiles, touches memory
    errors = [_errors(tensors, contender.decode()) for contender in contenders]
    for _ in range(repeats):
        for contender, (encode, decode) in zip(contenders, taken, strict=True):
            encode.append(_timed(contender.encode))
            decode.append(_timed(contender.decode))
    numbers = sum(t.numel() for t, _ in tensors)
    found: list[dict[str, Cell]] = []
    for contender, size, miss, (encode, decode) in zip(
        contenders, sizes, errors, taken, strict=True
    ):
        medians = [sorted(times)[len(times) // 2] for times in (encode, decode)]
        found.append(
            {
                "codec": contender.name,
                "bits_per_element": size * 8 / numbers,
                "encode_GBps": 2 * numbers / 1e9 / medians[0],
                "decode_GBps": 2 * numbers / 1e9 / medians[1],
                "k_rel_error": miss["k"],
                "v_rel_error": miss["v"],
                "fast": available(),
                "missing": None,
            }
        )
    empty = dict.fromkeys(found[0])
    return found + [{**empty, "codec": name, "missing": why} for name, why in missing.items()]


ABOUT: Final = About(
    measures="bits a number, error, and GB/s of encoding and decoding, by one thread",
    against="ZipNN, LMCache's fp8 and CacheGen, and turboquant, on the same tensors in turns",
    floors="none; exit status 0",
    takes="seconds without a peer, minutes with all of them; less with --layers 1",
    needs="whichever of the peers can be imported; the others have a row that says so",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = arguments("codec_peers", __doc__, ABOUT)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each; default: 5")
    parser.add_argument("--layers", type=int, default=4, help="of 4 MiB each; default: 4")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    pairs = synthetic(layers=args.layers)
    tensors = [(t, name) for pair in pairs for t, name in zip(pair, ("k", "v"), strict=True)]
    with torch.inference_mode():
        emit("codec_peers", rows(tensors, args.repeats), args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
