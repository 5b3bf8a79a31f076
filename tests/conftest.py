"""Event loops, profiles and leak checks of the whole test run."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

pytest.register_assert_rewrite("tierkv.testing")

# Where these are set pytest explains a failing comparison whole, and its diff of a megabyte takes
# minutes: the suites' mutants, which all fail, would look like hangs.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# Examples are reproducible in CI and in the default run; a longer search is asked for by name.
hypothesis.settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "nightly",
    parent=hypothesis.settings.get_profile("default"),
    max_examples=500,
    derandomize=False,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ROOT = Path(__file__).parent.parent
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None
_HF = ("tests/adapters", "adapters/tierkv_adapters/hf")
# what subclasses vLLM's own classes; everything else of that adapter works without
_VLLM = tuple(
    f"adapters/tierkv_adapters/vllm/{name}"
    for name in ("connector.py", "metadata.py", "stats.py", "tier/manager.py", "tier/policies.py")
)


def pytest_report_header() -> str:
    """Say on which event loops this run tests."""
    return f"event loops: {', '.join(_LOOPS)}"


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what imports an optional library; `test_house` has a skip that says so."""
    absent = [*(() if HAS_TRANSFORMERS else _HF), *(() if HAS_VLLM else _VLLM)]
    optional = [glob for path in absent for glob in (f"{ROOT}/{path}", f"{ROOT}/{path}/*")]
    config.option.ignore_glob = [*(config.option.ignore_glob or []), *optional]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave stress tests to the runs that ask for them: ``-m stress``, or TIERKV_SCALE is set."""
    if "stress" in str(config.option.markexpr) or "TIERKV_SCALE" in os.environ:
        return
    stress = [item for item in items if item.get_closest_marker("stress")]
    if stress:
        config.hook.pytest_deselected(items=stress)
        items[:] = [item for item in items if item not in set(stress)]


_LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"debug": False, "use_uvloop": False},
    "asyncio-debug": {"debug": True, "use_uvloop": False},
}
if importlib.util.find_spec("uvloop") is not None:
    _LOOPS["uvloop"] = {"debug": False, "use_uvloop": True}


@pytest.fixture(params=_LOOPS, scope="session")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run every async test on plain asyncio, asyncio in debug mode and, if there, uvloop."""
    return "asyncio", _LOOPS[request.param]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    # the runs share few cores, where more threads only add noise; a test without torch stays so
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    # a shell starts what it puts in the background with SIGINT ignored; Python leaves it so, and
    # every test of Ctrl-C would wait for ever, in this process or in those that it starts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    # a developer's own TIERKV_TIERS must not decide what the tests see
    from tierkv.config import OWN_VARIABLES

    for name in list(os.environ):
        if name.upper().startswith("TIERKV_") and name.upper() not in OWN_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture
def no_thread_leaks() -> Iterator[None]:
    """Fail if the test leaves threads behind (they get twenty seconds to end)."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 20
    while left := set(threading.enumerate()) - before:
        if time.monotonic() > deadline:
            pytest.fail(f"threads left behind: {sorted(t.name for t in left)}")
        time.sleep(0.01)


def _open_fds() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this very listing
            continue
    return found


@pytest.fixture
def no_fd_leaks() -> Iterator[None]:
    """Fail if the test leaves file descriptors open."""
    before = _open_fds()

    def left() -> dict[str, str]:
        return {fd: what for fd, what in _open_fds().items() if before.get(fd) != what}

    yield
    if left():
        gc.collect()  # half a second with real models in memory: only where it can matter
    assert not left(), f"file descriptors left open: {left()}"


@pytest.fixture
async def no_task_leaks() -> AsyncIterator[None]:
    """Fail if the test leaves asyncio tasks running."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    mine = (t for t in asyncio.all_tasks() - before if "TestRunner" not in repr(t.get_coro()))
    left = [task for task in mine if not task.done()]
    assert not left, f"tasks left running: {left}"


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """Fail any call in the test that blocks the event loop (sleep, file and socket I/O)."""
    blockbuster = pytest.importorskip("blockbuster", reason="blockbuster is not installed")
    with blockbuster.blockbuster_ctx():
        yield
