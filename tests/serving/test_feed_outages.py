"""What is logged while a rank does not answer: an end is told, a lasting outage is a warning."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tierkv_adapters.remote import SocketFeed, hub

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from tierkv.blocks import PartId

GUARD = 60.0


class Told:
    """An index that counts how often a rank was lost."""

    def __init__(self) -> None:
        self.losses = threading.Semaphore(0)

    def apply(self, rank: int, changes: Sequence[tuple[PartId, int]]) -> None:
        raise AssertionError("nobody is there to tell anything")

    def complete(self, rank: int) -> None:
        raise AssertionError("nobody is there to tell anything")

    def lost(self, rank: int) -> None:
        self.losses.release()


def test_an_outage_that_lasts_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_PAUSES_S", (0.001,))
    told = Told()
    feed = SocketFeed(tmp_path / "nobody.sock", told, 0)
    assert not feed.start(0.01)
    for _ in range(3 * hub._LASTING):
        assert told.losses.acquire(timeout=GUARD), "it goes on trying"
    feed.close()
    assert [r.levelname for r in caplog.records if "for a while now" in r.getMessage()] == [
        "WARNING"
    ]
