"""Inside a process with vLLM: an engine for measurements, and requests whose cost is measured.

Imports vLLM in functions only, so that it can be looked at where there is none.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["complete", "counters", "cpu_s", "make_llm", "prompt_tokens", "settle"]


def make_llm(
    model: str | Path,
    transfer: Mapping[str, Any] | None = None,
    *,
    kv_bytes: int = 64 << 20,
    **options: Any,
) -> Any:
    """A small ``vllm.LLM`` in float32, without warm-up.

    Args:
        model: Directory of the model.
        transfer: Arguments of ``KVTransferConfig``, or None: no connector.
        kv_bytes: Size of the paged KV cache.
        **options: More arguments of ``LLM``; they win.
    """
    import vllm
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_bytes,
        "max_num_seqs": 4,
        "max_model_len": 4096,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if transfer is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    return vllm.LLM(model=str(model), **(settings | options))


def cpu_s() -> float:
    """CPU seconds of this process and of all that it started and that still run."""
    psutil: Any = importlib.import_module("psutil")  # of vLLM's environment
    total = time.process_time()  # finer than the ticks that /proc counts in
    for process in psutil.Process().children(recursive=True):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
    return total


def complete(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 8,
    salts: Sequence[str | None] | None = None,
    transfer_params: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Answer prompts greedily, all at once; what each got, and what they cost together.

    Args:
        llm: The engine.
        prompts: Token ids of each.
        max_tokens: Length of every answer, exactly.
        salts: ``cache_salt`` of each.
        transfer_params: ``kv_transfer_params`` of all.

    Returns:
        Per prompt ``output`` (token ids), ``cached`` (tokens that the engine counts as cached),
        ``ttft_s`` and ``cpu_s`` (seconds and CPU seconds from the start of the call to its first
        token), ``wall_s`` and ``whole_cpu_s`` (of the whole call).
    """
    import vllm

    extra = {"kv_transfer_params": dict(transfer_params)} if transfer_params else None
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
    )
    engine = llm.llm_engine
    found: dict[str, dict[str, Any]] = {}
    cpu, wall = cpu_s(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        one: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salts is not None and salts[number] is not None:
            one["cache_salt"] = salts[number]
        engine.add_request(str(number), one, sampling.clone())
    while engine.has_unfinished_requests():
        for answer in engine.step():
            if answer.outputs and answer.outputs[0].token_ids:
                mine = found.setdefault(answer.request_id, {})
                if not mine:
                    mine["ttft_s"] = time.perf_counter() - wall
                    mine["cpu_s"] = cpu_s() - cpu
                mine["output"] = list(answer.outputs[0].token_ids)
                mine["cached"] = answer.num_cached_tokens
    both = {"wall_s": time.perf_counter() - wall, "whole_cpu_s": cpu_s() - cpu}
    return [found[str(number)] | both for number in range(len(prompts))]


def settle(llm: Any, folder: str | Path, within: float = 30.0) -> int:
    """Let stores that are under way end: until the files in a folder grow no more.

    Some connectors only go on while the engine steps, so that it is given little things to do.

    Args:
        llm: The engine.
        folder: Where the connector stores.
        within: Seconds after which it gives up.

    Returns:
        Bytes in the folder.
    """
    deadline, before, same = time.monotonic() + within, -1, 0
    while same < 4 and time.monotonic() < deadline:
        complete(llm, [[7, 7, 7, 7]], max_tokens=2)
        time.sleep(0.25)
        now = sum(path.stat().st_size for path in _files(folder))
        same, before = (same + 1, before) if now == before else (0, now)
    return before


def _files(folder: str | Path) -> Iterable[Path]:
    return (path for path in Path(folder).rglob("*") if path.is_file())


def counters(*prefixes: str) -> dict[str, float]:
    """Counters and gauges of this process's Prometheus page, summed over their labels.

    Args:
        *prefixes: What the names begin with.
    """
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if metric.name.startswith(prefixes) and metric.type in ("counter", "gauge"):
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def prompt_tokens(model: str | Path, length: int, seed: int) -> list[int]:
    """Token ids of a real text: source code of the standard library, another part for each seed.

    Args:
        model: Directory of the model, with a ``tokenizer.json``.
        length: How many.
        seed: Prompts of different seeds share no prefix.
    """
    import argparse

    from tokenizers import Tokenizer

    text = Path(argparse.__file__).read_text()
    start = seed * 7919 % (len(text) // 2)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids = tokenizer.encode(f"# {seed}\n{text[start : start + 8 * length]}").ids
    assert len(ids) >= length, (len(ids), length)
    return list(ids[:length])
