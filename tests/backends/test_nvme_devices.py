"""The ``nvme`` tier and device memory where kvikio is missing or fails; see ``tests/gds`` for where
it works."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK, DirectBackend
from tierkv.device.cpu import CpuDevice
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.testing.bench import contents, part
from tierkv_backends.nvme import backend as backend_module
from tierkv_backends.nvme import gds
from tierkv_backends.nvme.gds import Unavailable, load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _without_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nobody installed it, whatever this one has."""
    monkeypatch.setattr(gds, "_loaded", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


async def test_f074_without_kvikio_everything_works_and_one_line_says_how(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = part(0, 10_000)
    with caplog.at_level(logging.INFO, "tierkv.nvme"):
        async with Nvme().opened(tmp_path) as bench:
            assert isinstance(bench.backend, DirectBackend)
            assert bench.backend.direct(CpuDevice()) is None
            assert await bench.write(stored) == [OK]
            assert await bench.read(stored) == [contents(stored)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'nvme'" in line
    assert "O_DIRECT" in line or "page cache" in line
    assert "device memory through host memory" in line
    assert "pip install" in line


async def test_f074_who_insists_is_told_at_open(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"kvikio is not installed"):
        async with Nvme(io="gds").opened(tmp_path):
            pass
    async with Nvme().opened(tmp_path) as bench:  # nothing was left open
        assert bench.found == []


@pytest.mark.parametrize("options", [{"gds": "off"}, {"io": "buffered"}])
async def test_kvikio_is_not_even_looked_for(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden() -> None:
        raise AssertionError("looked for")

    monkeypatch.setattr(backend_module, "load", forbidden)
    async with Nvme(**options).opened(tmp_path) as bench:
        assert isinstance(bench.backend, DirectBackend)
        assert bench.backend.direct(CpuDevice()) is None
    with pytest.raises(ClosedError):
        bench.backend.direct(CpuDevice())


async def test_a_library_that_fails_here_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        version, mode = "1", "posix"

        def probe(self, directory: int) -> None:
            raise Unavailable("kvikio does not work here: injected")

    monkeypatch.setattr(backend_module, "load", Failing)
    with caplog.at_level(logging.INFO, "tierkv.nvme"):
        async with Nvme().opened(tmp_path / "a") as bench:
            assert isinstance(bench.backend, DirectBackend)
            assert bench.backend.direct(CpuDevice()) is None
    assert "injected" in caplog.text
    with pytest.raises(BackendError, match="does not work here: injected"):
        async with Nvme(io="gds").opened(tmp_path / "b"):
            pass


def test_a_driver_is_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: object, **__: object) -> None:
        raise OSError("libcuda.so.1: not found")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr("ctypes.CDLL", no_library)
    with pytest.raises(Unavailable, match="no CUDA driver"):
        load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gds": "on"}, r"gds must be one of \('auto', 'off'\), not 'on'"),
        ({"gds": True}, "gds must be one of"),
        ({"io": "gds", "gds": "off"}, "exclude each other"),
    ],
)
def test_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Nvme(**options).make(tmp_path, 1 << 20)
