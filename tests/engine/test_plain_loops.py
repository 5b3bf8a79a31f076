"""Engines under a bare ``asyncio.run``, where nobody told anyio which loop runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import asyncio, sys, tempfile
from pathlib import Path

if sys.argv[1] == "without":
    sys.modules["sniffio"] = None
else:
    import sniffio

import tierkv
from tests import kit
from tierkv.workers import callbacks
from tierkv.blocking import CacheManager
from tierkv_adapters.remote import RemoteServer

assert (callbacks.sniffio is None) == (sys.argv[1] == "without")
IDS, SPACE = kit.tokens(4), kit.space()


async def main(path):
    tiers = [tierkv.Tier("host", "8MiB"), tierkv.Tier("nvme", "16MiB", path=str(path / "nvme"))]
    loop, batches = asyncio.get_running_loop(), []
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        async with engine.session("a") as session:
            await session.store(IDS, kit.Memory(SPACE.layout, 64, seed=1).view)
            await session.flush()
            keys = list(session.state.chain.keys)
        heard = asyncio.Event()

        def told(batch):
            batches.append(list(batch))
            heard.set()

        def begin():  # neither in a task
            stops.append(engine.watch(told))

        def fail():
            for _ in range(10):
                engine.core.decisions.failed(1, "read", engine.core.clock())

        stops = []
        loop.call_soon(begin)
        async with asyncio.timeout(60):
            while [] not in batches:
                heard.clear()
                await heard.wait()
            assert {tiers for batch in batches for _, tiers in batch} == {3}
            batches.clear()
            loop.call_soon(fail)  # all parts are told of once more
            while sum(map(len, batches)) < 4:
                heard.clear()
                await heard.wait()
            assert {tiers for batch in batches for _, tiers in batch} == {1}
            hold = await engine.hold(SPACE, keys)
            assert hold.blocks == 4
            loop.call_soon(hold.release)
            stops[0]()


def handed_over(path):
    host = [tierkv.Tier("host", "8MiB")]
    with CacheManager(tiers=host, space=SPACE, name="there") as there:
        with RemoteServer(there, str(path / "s" / "e.sock")) as server:
            with CacheManager(tiers=host, name="mine") as mine:
                mine.create_session("a")
                mine.hand_over(server.path)
                there.store(IDS, kit.Memory(SPACE.layout, 64, seed=1).view, session="a")
                assert [(i.id, i.tokens) for i in mine.sessions()] == [("a", 64)]
        pending = there.submit(there.astats)
        assert pending.wait(60)
        assert pending.result().sessions == 1


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
    handed_over(Path(folder))
print("fine")
"""


@pytest.mark.parametrize("sniffio", ["with", "without"])
def test_watching_holding_and_handing_over(sniffio: str) -> None:
    if sniffio == "with":
        pytest.importorskip("sniffio")
    ended = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", _SCRIPT, sniffio],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "fine\n"), ended.stderr
