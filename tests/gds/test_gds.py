"""Device memory and segment files through the real kvikio, on a double of the CUDA driver.

Everything runs in one process of its own (:mod:`tests.gds.scenarios`); each test looks at one line
of its report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCENARIOS = (
    "cancelled_in_flight",
    "closed_in_flight",
    "closed_over_a_hanging_transfer",
    "damaged_files_are_misses",
    "engine_promotes_into_the_device_directly",
    "engine_writes_device_frames_directly",
    "f039_offsets",
    "f039_sizes",
    "f040_end_seen_by_the_library",
    "f040_truncated_file",
    "f074_modes_are_told",
    "forked_children_are_refused",
    "full_and_older",
    "many_at_once",
    "medium_errors_are_results",
    "padding_holds_nobodys_bytes",
    "removed_segments_are_closed",
    "reopened",
    "wrong_tensors_are_refused",
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the double, built now."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the driver's double")
    place = tmp_path_factory.mktemp("driver")
    subprocess.run(
        [
            *(compiler, "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"),
            *("-o", str(place / "libcuda.so.1"), str(HERE / "libcuda_double.c"), "-lpthread"),
        ],
        check=True,
    )
    return place


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def report(
    request: pytest.FixtureRequest, driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str | None]:
    """How each scenario went on one event loop: None, or its traceback."""
    loop = request.param
    if importlib.util.find_spec(loop) is None:
        pytest.skip(f"{loop} is not installed")
    place = tmp_path_factory.mktemp("scenarios")
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error::ResourceWarning"),
            *("-m", "tests.gds.scenarios", loop, str(place)),
        ],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    seen: dict[str, str | None] = {line["name"]: line["error"] for line in lines}
    ended = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    return {name: seen.get(name, ended) for name in (*seen, *SCENARIOS)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_gds(name: str, report: Mapping[str, str | None]) -> None:
    assert report[name] is None, report[name]


def test_every_scenario_is_looked_at(report: Mapping[str, str | None]) -> None:
    assert set(report) == set(SCENARIOS)
