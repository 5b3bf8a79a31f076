"""Stand-ins for what TensorRT-LLM builds a connector with (``TorchLlmArgs`` and its parts)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv.testing.trtllm.modes import Mode

__all__ = ["FakeConnectorConfig", "FakeKvCacheConfig", "FakeLlmArgs", "FakeStream"]


@dataclass(slots=True)
class FakeKvCacheConfig:
    """``KvCacheConfig``: the fields and defaults of releases 1.2 and 1.3, and later ones."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    disk_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32
    use_kv_cache_manager_v2: bool | str = False
    max_util_for_resume: float = 0.95


@dataclass(slots=True)
class FakeConnectorConfig:
    """``KvCacheConnectorConfig``: extra keys are forbidden there, so it carries no settings."""

    connector: str | None = None
    connector_module: str | None = "tierkv_adapters.trtllm"
    connector_scheduler_class: str | None = "Scheduler"
    connector_worker_class: str | None = "Worker"
    server_url: str | None = None


@dataclass(slots=True)
class FakeLlmArgs:
    """``TorchLlmArgs``, as far as connectors read it."""

    model: str = "tiny"
    tokenizer: Any = None
    revision: str | None = None
    backend: str = "pytorch"
    dtype: str = "bfloat16"
    quant_config: Any = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_attention_dp: bool = False
    max_beam_width: int | None = 1
    max_batch_size: int | None = 16
    max_num_tokens: int | None = 8192
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    cuda_graph_config: Any = None
    speculative_config: Any = None
    lora_config: Any = None
    kv_cache_config: FakeKvCacheConfig = field(default_factory=FakeKvCacheConfig)
    kv_connector_config: FakeConnectorConfig = field(default_factory=FakeConnectorConfig)

    @classmethod
    def of(cls, mode: Mode, **changes: Any) -> FakeLlmArgs:
        """The arguments that set an engine up in this mode, with changes of one's own."""
        windows = [window or 1 << 20 for window in mode.windows]
        cache = FakeKvCacheConfig(
            tokens_per_block=mode.tokens_per_block,
            max_attention_window=windows if any(mode.windows) else None,
            use_kv_cache_manager_v2=mode.grouped,
        )
        args: dict[str, Any] = {
            "tensor_parallel_size": mode.ranks,
            "enable_chunked_prefill": mode.chunk is not None,
            "max_num_tokens": mode.chunk or 8192,
            "disable_overlap_scheduler": not mode.overlap,
            "cuda_graph_config": {} if mode.cuda_graphs else None,
            "kv_cache_config": cache,
        }
        return cls(**(args | changes))


class FakeStream:
    """``torch.cuda.Stream`` of a machine without CUDA: all of its work is done at once."""

    cuda_stream: int = 0

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: object) -> None:
        """Order nothing."""

    def wait_event(self, event: object) -> None:
        """Order nothing."""

    def query(self) -> bool:
        """Whether all of its work is done: always."""
        return True
