"""Tiers on broken hardware, as third-party backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.testing.faults import Failing, Faulty, FaultyMemory, Slow
from tierkv_backends.host import HostBackend
from tierkv_backends.nvme import NvmeBackend

if TYPE_CHECKING:
    from tierkv.config import Tier

__all__ = ["FailingNvme", "FullHost", "ReadonlyNvme", "SlowNvme"]

SLOW_S: Final = 8.0


class SlowNvme(Faulty):
    """An ``nvme`` tier whose every read takes :data:`SLOW_S` longer."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(NvmeBackend(tier), [Slow(SLOW_S, "read")])


class FailingNvme(Faulty):
    """An ``nvme`` tier whose every read fails."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(NvmeBackend(tier), [Failing("read")])


class ReadonlyNvme(Faulty):
    """An ``nvme`` tier whose every write fails."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(NvmeBackend(tier), [Failing("write")])


class FullHost(FaultyMemory):
    """A ``host`` tier that never has memory for anything."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(HostBackend(tier), [Failing("write")])
