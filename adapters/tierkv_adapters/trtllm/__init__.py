"""tierkv under TensorRT-LLM, as a KV cache connector of its PyTorch backend.

Name the two classes in the runtime's own configuration, and a file with ours in the environment::

    # llm.yaml
    kv_connector_config:
      connector_module: tierkv_adapters.trtllm
      connector_scheduler_class: TierKVConnectorScheduler
      connector_worker_class: TierKVConnectorWorker
    kv_cache_config:
      enable_partial_reuse: false  # a match that ends inside of a block is offered nothing

    # tierkv.toml
    [[tiers]]
    kind = "host"
    capacity = "64GiB"

    [[tiers]]
    kind = "nvme"
    capacity = "1TiB"
    path = "/var/cache/tierkv/{worker}"

::

    TLLM_TIERKV_CONFIG=/etc/tierkv.toml trtllm-serve MODEL --extra_llm_api_options llm.yaml

Loads are asynchronous, and only of what every rank holds in memory, verified and leased; what lies
on disk is brought there for the next request. Saves are incremental, decoded tokens included. Keys
know salt, LoRA adapter and media.

What was offered counts as computed, and the interface has no way to take it back. A held block that
is damaged in RAM is read from another tier, or as soon as somebody stores it again, and nobody else
is offered it. Where neither happens within ``[serving] lost_after`` (30 s; ``"never"`` waits), all
ranks end the engine with :class:`LostLoadError` at the same step, rather than serve other KV or let
the request wait for ever.

The interface does not tell of weights that are changed in place, nor that the runtime forgot its
own blocks: restart the engine after that. And do not reset a rank's engine while requests wait, as
that takes away what they were offered.

Tested against the documented contract of the interface
(:mod:`tierkv.testing.trtllm`), not on the runtime itself.
"""

from tierkv_adapters.trtllm.lost import LostLoadError
from tierkv_adapters.trtllm.scheduler import TierKVConnectorScheduler
from tierkv_adapters.trtllm.worker import TierKVConnectorWorker

__all__ = ["LostLoadError", "TierKVConnectorScheduler", "TierKVConnectorWorker"]
