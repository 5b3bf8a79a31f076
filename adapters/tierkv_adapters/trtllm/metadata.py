"""What travels from the scheduler to every rank, once a step, inside the runtime's broadcast."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv_adapters.serving.orders import StepOrders

__all__ = ["StepMeta"]


@dataclass(slots=True)
class StepMeta:
    """One step; plain data, picklable, also of a step in which nothing happens.

    Attributes:
        directory: Private directory in which the ranks open their sockets.
        host: Machine on which it is.
        orders: What the ranks do.
        dropped: Requests whose load was announced to the runtime and will not take place: it
            computes those tokens itself, once the load is reported to be over.
    """

    directory: str
    host: str
    orders: StepOrders = field(default_factory=StepOrders)
    dropped: list[int] = field(default_factory=list)
