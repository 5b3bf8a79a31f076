"""Clients and feeds while servers come and go: nothing hangs, and in the end everybody agrees."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.blocks import PartId, part_id
from tierkv.errors import ClosedError
from tierkv_adapters.remote import RemoteManager, RemoteServer, SocketFeed
from tierkv_adapters.serving.replicas import ReplicaIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.engine import Residency

GUARD = 60.0
SCALE = float(os.environ.get("TIERKV_SCALE", "1"))


def _held(manager: CacheManager) -> dict[PartId, int]:
    """All that the engine holds, asked anew."""
    held: dict[PartId, int] = {}
    whole = threading.Event()

    async def ask() -> None:
        def told(changes: Sequence[Residency]) -> None:
            held.update(changes)
            if not changes:
                whole.set()

        stop.append(manager.engine.watch(told))

    async def end() -> None:
        stop[0]()

    stop: list[Callable[[], None]] = []
    manager.call(ask)
    assert whole.wait(GUARD)
    manager.call(end)
    return {part: tiers for part, tiers in held.items() if tiers}


def _agree(index: ReplicaIndex, held: dict[PartId, int]) -> bool:
    same = all(index.tiers(0, part) == tiers for part, tiers in held.items())
    return same and index.parts(0) == len(held)


def _chat(
    path: Path, number: int, over: threading.Event, done: list[int], unexpected: list[BaseException]
) -> None:
    """A client's thread: conversations through whatever server there is, until ``over``."""
    dice = random.Random(number)
    client = RemoteManager(path)
    while not over.is_set():
        name = f"{number}-{dice.randrange(4)}"
        try:
            client.create_session(name, adopt=True)
            with client.use_session(name):
                client.explain(kit.tokens(2, seed=dice.randrange(6)))
            client.clear_session(name)
            client.destroy_session(name)
            client.stats()
            done[number] += 1
        except ClosedError:
            time.sleep(0.001)
        except BaseException as error:  # noqa: BLE001 - told to the test
            unexpected.append(error)
            return
    client.close()


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_servers_that_come_and_go(tmp_path: Path, no_thread_leaks: None) -> None:
    space = kit.space()
    path = tmp_path / "s" / "e.sock"
    rounds = max(3, int(60 * SCALE))
    index = ReplicaIndex(1)
    feed = SocketFeed(path, index, 0)
    feed.start(0)
    over = threading.Event()
    unexpected: list[BaseException] = []
    done = [0] * 4
    threads = [
        threading.Thread(target=_chat, args=(path, number, over, done, unexpected))
        for number in range(len(done))
    ]
    for thread in threads:
        thread.start()
    dice = random.Random(1)
    try:
        with CacheManager(
            tiers=[tierkv.Tier("host", "96KiB")], space=space, metrics=False
        ) as manager:
            manager.create_session("mine")
            for _ in range(rounds):
                with RemoteServer(manager, path):
                    for _ in range(dice.randint(1, 12)):
                        ids = kit.tokens(dice.randint(1, 4), seed=dice.randrange(1000))
                        kv = kit.Memory(space.layout, len(ids), seed=1)
                        manager.store(ids, kv.view, session="mine")
                    if dice.random() < 0.5:
                        end = time.monotonic() + GUARD
                        while not _agree(index, _held(manager)):  # the engine tidies up meanwhile
                            assert time.monotonic() < end
                            time.sleep(0.002)
                    before = sum(done)
                    end = time.monotonic() + GUARD
                    while sum(done) == before and not unexpected:
                        assert time.monotonic() < end, "clients come back"
                        time.sleep(0.001)
            assert manager.stats().leases == 0
    finally:
        over.set()
        for thread in threads:
            thread.join(GUARD)
        feed.close()
    assert not unexpected, unexpected
    assert not any(thread.is_alive() for thread in threads)
    assert index.match([[]], [], kit.BLOCK) == 0
    assert index.tiers(0, part_id(space.root(), 0)) == 0
