"""What ``attach`` looks at of vLLM: arguments, configurations, and an engine that answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODE = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass
class EngineArgs:
    """As vLLM's, for what ``attach`` looks at."""

    model: str = "m"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_transfer_config: Any = None
    kv_offloading_size: float | None = None


@dataclass
class AsyncEngineArgs(EngineArgs):
    """As vLLM's."""


def extra_of(args: Any) -> dict[str, Any]:
    given = args["kv_transfer_config"] if isinstance(args, dict) else args.kv_transfer_config
    return dict(given["kv_connector_extra_config"])


def config_of(args: Any, world: int = 1) -> Any:
    """vLLM's configuration that these arguments would make."""
    given = args["kv_transfer_config"] if isinstance(args, dict) else args.kv_transfer_config
    return SimpleNamespace(
        kv_transfer_config=None if given is None else SimpleNamespace(**given),
        parallel_config=SimpleNamespace(world_size=world),
        model_config=SimpleNamespace(skip_tokenizer_init=False),
    )


@dataclass
class Output:
    """vLLM's ``RequestOutput``."""

    request_id: str
    token_ids: list[int]
    finished: bool
    kv_transfer_params: Any = None
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        text = "".join(map(chr, self.token_ids))
        self.outputs = [SimpleNamespace(token_ids=list(self.token_ids), text=text)]


class Engine:
    """An ``LLMEngine`` that says the prompt's last two tokens again, one a step."""

    def __init__(self, args: Any) -> None:
        self.vllm_config = config_of(args)
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.on_step: Callable[[], None] = lambda: None
        self._running: dict[str, tuple[list[int], int]] = {}

    def get_tokenizer(self) -> Any:
        return lambda text, add_special_tokens: {"input_ids": list(map(ord, text))}

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        self.asked.append({**prompt, "params": params})
        self._running[name] = prompt["prompt_token_ids"], 0

    def abort_request(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            self._running.pop(name, None)

    def step(self) -> list[Output]:
        self.on_step()
        outputs = []
        for name, (ids, said) in list(self._running.items()):
            finished = said == 1
            told = {"tierkv": {"own": 1, "loaded": 2, "tier": "host"}} if finished else None
            outputs.append(Output(name, ids[-2:][: said + 1], finished, told))
            self._running[name] = ids, said + 1
            if finished:
                del self._running[name]
        return outputs
