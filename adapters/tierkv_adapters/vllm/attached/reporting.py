"""How an engine of vLLM and tierkv get along, asked from outside, wherever its parts live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tierkv.errors import TierKVError
from tierkv_adapters.remote.client import RemoteManager
from tierkv_adapters.vllm.attached.engines import sockets_of, transfer_of, vllm_config_of

__all__ = ["RankStatus", "Status", "status"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank: the engine of one of vLLM's workers.

    Attributes:
        socket: Where it is asked.
        alive: Whether it answers.
        health: State in words: ``"status"``, and how bytes travel in each tier.
        counters: What became of its loads and saves
            (:class:`~tierkv_adapters.serving.counters.RankCounters`).
    """

    socket: str
    alive: bool
    health: dict[str, str] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """How an attachment is doing. Blocks and loads are those of the first rank.

    Attributes:
        attached: Whether the engine has our connector, and its ranks answer.
        requests_seen: Requests that came to its scheduler, as of its last step.
        blocks_stored: Blocks put into the store.
        blocks_reused: Blocks loaded instead of computed.
        restores_failed: Loads that brought less than they were to; the rest was computed.
        stores_failed: Stores that did not store all of their blocks.
        reason: Why it is not attached, or nothing was stored or reused; None if both happened.
        ranks: Each rank.
    """

    attached: bool
    requests_seen: int = 0
    blocks_stored: int = 0
    blocks_reused: int = 0
    restores_failed: int = 0
    stores_failed: int = 0
    reason: str | None = None
    ranks: tuple[RankStatus, ...] = ()


def status(engine: Any) -> Status:
    """Ask how an engine is doing.

    Args:
        engine: A built ``LLM``, ``LLMEngine`` or ``AsyncLLM``, in this process or with its core in
            another. It is asked over the ranks' sockets, which takes about a millisecond.

    Raises:
        AttachError: if this is no engine of vLLM.
    """
    config = vllm_config_of(engine)
    found = transfer_of(getattr(config, "kv_transfer_config", None))
    if found.extra is None:
        has = f"the connector {found.name!r}" if found.name else "no connector"
        return Status(attached=False, reason=f"the engine has {has}: build it from attach(...)")
    folder = found.extra.get("socket_dir")
    if not folder:
        return Status(
            attached=True,
            reason="its ranks cannot be asked: kv_connector_extra_config has no "
            "socket_dir (attach() sets it)",
        )
    parallel = config.parallel_config
    replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
    sockets = sockets_of(folder, int(parallel.world_size) * replicas)
    asked = [_ask(socket) for socket in sockets]
    ranks, first = tuple(rank for rank, _ in asked), asked[0][1]
    dead = [rank.socket for rank in ranks if not rank.alive]
    if dead:
        return Status(attached=False, reason=f"no engine answers at {dead[0]}", ranks=ranks)
    counters = ranks[0].counters
    block = int(first.get("block_tokens", 1))
    stored, reused = int(counters["save_blocks"]), int(counters["load_tokens"]) // block
    requests = int(first.get("requests", 0))
    return Status(
        attached=True,
        requests_seen=requests,
        blocks_stored=stored,
        blocks_reused=reused,
        restores_failed=int(counters["loads_short"]),
        stores_failed=int(counters["saves_failed"]),
        reason=_reason(requests, stored, reused),
        ranks=ranks,
    )


def _reason(requests: int, stored: int, reused: int) -> str | None:
    if not requests:
        return "no request yet"
    if not stored:
        return "nothing stored: all blocks were there, or no prompt filled one"
    return None if reused else "nothing loaded: no prompt had blocks that vLLM's own cache lacked"


def _ask(socket: str) -> tuple[RankStatus, dict[str, Any]]:
    client = RemoteManager(socket)
    try:
        told = client.about()
        if told:
            return RankStatus(socket, True, client.health(), told["counters"]), told
    except TierKVError:
        pass  # it is gone, which is the answer
    finally:
        client.close()
    return RankStatus(socket, False, {"status": "closed"}), {}
