"""tierkv's connector as the replay driver of TensorRT-LLM makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm import Connector, Mode, Prompt, Replay
from tierkv_adapters.trtllm import TierKVConnectorScheduler, TierKVConnectorWorker
from tierkv_adapters.trtllm.lost import LostLoadError
from tierkv_adapters.trtllm.settings import VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

__all__ = ["PATIENT", "Made", "configure", "warm"]

PATIENT = 60.0
"""Seconds after which a hang is a failure."""

HOST = """
[serving]
block_tokens = {block_tokens}
{serving}

[identity]
weights = "tiny-1"

[[tiers]]
kind = "host"
capacity = "{host}"
{tiers}
"""


def configure(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    disk: bool = False,
    host: str = "8MiB",
    serving: str = "",
    block_tokens: int = 4,
) -> Path:
    """Write a configuration and name it in the environment."""
    tiers = f'[[tiers]]\nkind = "nvme"\ncapacity = "32MiB"\npath = "{path}/kv"\n' if disk else ""
    file = path / "tierkv.toml"
    file.write_text(HOST.format(host=host, serving=serving, tiers=tiers, block_tokens=block_tokens))
    monkeypatch.setenv(VARIABLE, str(file))
    return file


@dataclass
class Made:
    """Makes connectors, and keeps the last one to look at."""

    scheduler: TierKVConnectorScheduler | None = None
    workers: dict[int, TierKVConnectorWorker] = field(default_factory=dict)

    def connector(self) -> Connector:
        """As the driver wants it."""
        return Connector(self._scheduler, self._worker, self.settle, self.close, (LostLoadError,))

    def replay(self, mode: Mode, **options: Any) -> Replay:
        """An engine whose ranks are connected."""
        return warm(Replay(self.connector(), mode, **options))

    def _scheduler(self, args: Any) -> TierKVConnectorScheduler:
        self.scheduler = TierKVConnectorScheduler(args)
        return self.scheduler

    def _worker(self, args: Any, rank: int) -> TierKVConnectorWorker:
        self.workers[rank] = TierKVConnectorWorker(args, rank=rank)
        return self.workers[rank]

    def settle(self) -> None:
        """Wait until what was stored is held."""
        assert self.scheduler is not None
        assert self.scheduler.ready(PATIENT)

    def close(self) -> None:
        """End it."""
        if self.scheduler is not None:
            self.scheduler.shutdown()
        for worker in self.workers.values():
            worker.shutdown()
        self.scheduler, self.workers = None, {}

    def stats(self) -> dict[str, int]:
        """The scheduler's counts."""
        assert self.scheduler is not None
        return self.scheduler.stats()


def warm(replay: Replay) -> Replay:
    """Let the ranks be found: a step carries the directory in which they are."""
    try:
        replay.run(Prompt([31_999]))
        replay.settle()
    except BaseException:
        replay.close()
        raise
    return replay
