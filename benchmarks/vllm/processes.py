"""Code that runs in a process of its own in which vLLM can be imported, and what became of it.

vLLM pins its own torch, so that it lives in an environment of its own: ``TIERKV_VLLM_PYTHON`` names
the interpreter, else it is the running one. Every piece of work gets a fresh process and session,
which is killed as a whole when its time is over: whatever an engine leaves behind dies with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENVIRONMENT", "ROOT", "Ran", "environment", "find_python", "run", "why_not"]

ROOT: Final = Path(__file__).resolve().parents[2]
_SOURCES: Final = (".", "backends", "codecs", "adapters")

ENVIRONMENT: Final = {
    # a thread each for OpenMP and no pinning: on shared cores everything else is ten times slower
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

_BOOT: Final = """
import json, os, sys
_place, _code, _asked = sys.argv[1:4]
sys.argv = sys.argv[:1]
args, told = json.loads(_asked), {}
def tell(**values):
    told.update(values)
    with open(_place + ".part", "w") as file:
        json.dump(told, file)
    os.replace(_place + ".part", _place)
exec(compile(_code, "<snippet>", "exec"))
"""


class Ran(NamedTuple):
    """What became of a process.

    Attributes:
        told: What it told, also if it died or was killed afterwards.
        status: Exit status (negative: the signal that ended it); None: it was killed for time.
        log: The end of its output.
        wall_s: Seconds that it lived.
    """

    told: dict[str, Any]
    status: int | None
    log: str
    wall_s: float

    @property
    def outcome(self) -> str:
        """``"alive"`` (it came to its end), ``"died"`` or ``"hung"``."""
        if self.status is None:
            return "hung"
        return "died" if self.status else "alive"

    def checked(self) -> dict[str, Any]:
        """What it told.

        Raises:
            RuntimeError: with the end of its output, if it died or hung.
        """
        if self.status != 0:
            raise RuntimeError(
                f"the process {self.outcome} (status {self.status}, {self.wall_s:.0f} s):\n"
                f"{self.log}"
            )
        return self.told


def find_python() -> Path:
    """Interpreter of the environment with vLLM; it may lack it, see :func:`why_not`."""
    return Path(os.environ.get("TIERKV_VLLM_PYTHON") or sys.executable)


@functools.cache
def why_not(python: Path) -> str | None:
    """Why vLLM cannot be used with this interpreter, or None: it can; looks without importing it.

    Args:
        python: An interpreter.
    """
    code = (
        "import importlib.metadata as m\n"
        "print(*[d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')][:1])"
    )
    try:
        done = subprocess.run(
            [str(python), "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be run: {error}"
    if done.returncode or not done.stdout.strip():
        return (
            f"{python} has no vLLM; set TIERKV_VLLM_PYTHON to the interpreter of an environment "
            "with vllm or vllm-cpu"
        )
    return None


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of such a process: ours on its path, and what vLLM needs on a CPU.

    Args:
        more: Variables that win; a ``PYTHONPATH`` comes after ours.
    """
    paths = [str((ROOT / source).resolve()) for source in _SOURCES]
    more = dict(more or {})
    given = (more.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH"))
    mine = {"PYTHONPATH": os.pathsep.join([*paths, *(path for path in given if path)])}
    return os.environ | ENVIRONMENT | mine | more


def run(
    code: str,
    args: Mapping[str, Any] | None = None,
    *,
    within: float = 300.0,
    multiprocess: bool = False,
    python: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run Python code in a fresh process; it sees ``args`` and calls ``tell(name=value, ...)``.

    What it tells must go through JSON, and survives the process whatever becomes of that.

    Args:
        code: Source; top-level statements.
        args: What it finds in ``args``; goes through JSON.
        within: Seconds after which it is killed, with all that it started.
        multiprocess: Whether the engine core runs in a process of its own (vLLM's default).
        python: Interpreter; default: :func:`find_python`.
        env: More environment variables.
    """
    mode = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0"}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierkv-vllm-") as folder:
        place, log = Path(folder) / "told.json", Path(folder) / "log"
        command = [str(python or find_python()), "-c", _BOOT, str(place), code]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, json.dumps(dict(args or {}))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment(mode | dict(env or {})),
                start_new_session=True,
            )
            status: int | None = None
            try:
                status = process.wait(within)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill(process)
        told = json.loads(place.read_text()) if place.exists() else {}
        text = log.read_text(errors="replace")
    return Ran(told, status, text[-6000:], time.monotonic() - begun)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group lives on while any member does
    process.wait()
