"""What travels between the two sides of the connector, inside vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from tierkv_adapters.serving.orders import StepOrders

__all__ = ["TierKVHandshake", "TierKVMetadata", "TierKVWorkerMetadata"]


@dataclass(slots=True)
class TierKVMetadata(KVConnectorMetadata):
    """One step's orders, for every rank.

    Attributes:
        orders: What the ranks do in this step.
        idle: Whether no token is computed in this step.
    """

    orders: StepOrders
    idle: bool = False


@dataclass(slots=True)
class TierKVHandshake(KVConnectorHandshakeMetadata):
    """How the scheduler's side names the blocks of a rank, and where it hears of them.

    Attributes:
        facts: See :meth:`~tierkv_adapters.vllm.worker.WorkerSide.handshake`.
    """

    facts: dict[str, Any]


@dataclass(slots=True)
class TierKVWorkerMetadata(KVConnectorWorkerMetadata):
    """What ended on the ranks since their last step.

    Attributes:
        loads: Per request, tokens in place counted from 0 and why it is fewer than ordered, or
            None; of several ranks the one with the fewest.
        saves: Per request, the token up to which it is stored; the least of those ranks that told.
    """

    loads: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join what two ranks tell of one step."""
        if not isinstance(other, TierKVWorkerMetadata):
            raise TypeError(f"cannot join {type(other).__name__} to {type(self).__name__}")
        loads = dict(self.loads)
        for name, ended in other.loads.items():
            loads[name] = min(loads.get(name, ended), ended, key=_in_place)
        saves = dict(self.saves)
        for name, stop in other.saves.items():
            saves[name] = min(saves.get(name, stop), stop)
        return TierKVWorkerMetadata(loads, saves)


def _in_place(ended: tuple[int, str | None]) -> int:
    return ended[0]
