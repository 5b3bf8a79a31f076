"""The ``nvme`` tier is closed while the medium hangs, or whoever closes it is cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.backends.nvme_bench import Nvme
from tierkv.errors import RootLockedError
from tierkv.testing.bench import contents, part
from tierkv_backends.nvme import store as stores

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.every_loop,
    pytest.mark.usefixtures("no_fd_leaks"),
]


@pytest.fixture(scope="module", autouse=True)
async def _loop_has_run(anyio_backend: object) -> None:
    """A loop opens descriptors of its own when it first runs: not to be taken for a leak."""
    await asyncio.sleep(0)


class _Gate:
    """Stops every write of a store in its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        write = stores.Store.write

        def gated(*args: Any) -> None:
            self.entered.set()
            assert self.go.wait(30)
            write(*args)

        monkeypatch.setattr(stores.Store, "write", gated)

    async def reached(self) -> None:
        while not self.entered.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)


async def test_c8_a_root_is_given_up_when_the_medium_lets_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing ends; the root is taken while a thread may write there, and free afterwards."""
    monkeypatch.setattr("tierkv_backends.nvme.backend._CLOSE_S", 0.05)
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        gate = _Gate(monkeypatch)
        writing = bench.workers.spawn(bench.write, part(1, 5000))
        await gate.reached()
        await bench.backend.aclose()
        assert "given up" in caplog.text
        with pytest.raises(RootLockedError):
            async with Nvme().opened(tmp_path):
                pass
        gate.go.set()
        await writing.wait()
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.read(*bench.found) == [contents(p) for p in bench.found]
        assert part(0, 5000) in bench.found


@pytest.mark.parametrize("busy", [False, True])
async def test_c8_a_cancelled_close_closes(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        gate = _Gate(monkeypatch)
        writing = bench.workers.spawn(bench.write, part(1, 5000)) if busy else None
        if busy:
            await gate.reached()
            asyncio.get_running_loop().call_later(0.02, gate.go.set)
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await bench.backend.aclose()
        task.uncancel()
        if writing is not None:
            await writing.wait()
        async with Nvme().opened(tmp_path) as again:
            assert part(0, 5000) in again.found
