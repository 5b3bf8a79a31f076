"""Event loops, profiles and leak checks of the whole test run."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
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


_IN_MEMORY, _ROOM, _PREFIX = Path("/dev/shm"), 8 << 30, "tkv"  # paths of sockets are short
_TEMPROOT = "PYTEST_DEBUG_TEMPROOT"  # where pytest makes the folders of tests


def _use_memory(config: pytest.Config) -> None:
    """Put the files of tests in memory if there is plenty, unless somebody said where.

    Syncing a disk is most of what they would wait for, and few are about a disk: those ask for
    ``disk_path``. What a run leaves there is removed at its end, or by the next one.
    """
    try:
        room = os.statvfs(_IN_MEMORY)
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no such place on this system
        return
    available = next((1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")), 0)
    if _TEMPROOT in os.environ or min(room.f_bavail * room.f_frsize, available) < _ROOM:
        return
    for old in _IN_MEMORY.glob(f"{_PREFIX}*"):
        number = old.name.removeprefix(_PREFIX)
        if number.isdecimal() and not Path("/proc", number).exists():  # it was killed
            shutil.rmtree(old, ignore_errors=True)
    mine = _IN_MEMORY / f"{_PREFIX}{os.getpid()}"
    mine.mkdir(mode=0o700)
    os.environ[_TEMPROOT] = str(mine)
    config.add_cleanup(lambda: shutil.rmtree(mine, ignore_errors=True))


def pytest_report_header() -> list[str]:
    """Say on which event loops this run tests, and where its files are."""
    where = os.environ.get(_TEMPROOT) or tempfile.gettempdir()
    return [f"event loops: {', '.join(_LOOPS)}", f"files: {where}"]


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what imports an optional library; `test_house` has a skip that says so."""
    _use_memory(config)
    absent = [*(() if HAS_TRANSFORMERS else _HF), *(() if HAS_VLLM else _VLLM)]
    optional = [glob for path in absent for glob in (f"{ROOT}/{path}", f"{ROOT}/{path}/*")]
    config.option.ignore_glob = [*(config.option.ignore_glob or []), *optional]


def _on_another_loop(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    loop = None if callspec is None else callspec.params.get("anyio_backend")
    other = isinstance(loop, str) and loop in _LOOPS and loop != "asyncio"
    return other and item.get_closest_marker("every_loop") is None


@pytest.hookimpl(tryfirst=True)  # before pytest itself looks at the marks for -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave stress tests to the runs that ask for them: ``-m stress``, or TIERKV_SCALE is set.

    What is not about the loop itself runs on plain asyncio, and on the others as a stress test.
    """
    for item in items:
        if _on_another_loop(item):
            item.add_marker(pytest.mark.stress)
    if "stress" in str(config.option.markexpr) or "TIERKV_SCALE" in os.environ:
        return
    stress = [item for item in items if item.get_closest_marker("stress")]
    if stress:
        config.hook.pytest_deselected(items=stress)
        items[:] = [item for item in items if item not in set(stress)]


def pytest_collection_finish() -> None:
    """Keep the collector away from what lives as long as the run: libraries, and the tests."""
    gc.collect()
    gc.freeze()


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
def disk_path() -> Iterator[Path]:
    """A folder on the disk of temporary files, wherever the others are."""
    with tempfile.TemporaryDirectory(prefix="tierkv-") as folder:
        yield Path(folder)


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
