"""An environment with the peer in it, and a process in there that takes orders.

LMCache's wheel asks for CUDA packages that its CPU paths never load, so that it is installed
without dependencies, beside the pure ones that its storage backends import. torch and numpy are
those of the running environment. ``BENCH_LMCACHE_ENV`` names an environment that is ready; without
it one is made, once, in ``~/.cache/tierkv`` (or ``TIERKV_CACHE_DIR``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["VERSION", "Peer", "find_python"]

VERSION: Final = "0.5.6"
_CHILD: Final = Path(__file__).with_name("peers_lmcache.py")
_PURE: Final = (
    *("aiofile", "aiohttp", "blake3", "cryptography", "fastapi", "httpx", "msgspec", "numba"),
    *("opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "psutil"),
    *("py-cpuinfo", "pyyaml", "pyzmq", "protobuf<7,>=6.31.1", "redis", "safetensors"),
    *("sortedcontainers", "uvicorn", "httptools", "cachetools", "nvtx", "numpy<=2.2.6"),
)


def find_python() -> Path:
    """The interpreter of an environment in which LMCache can be imported; made if need be.

    Raises:
        RuntimeError: if there is none and none can be made, e.g. without a package index.
    """
    named = os.environ.get("BENCH_LMCACHE_ENV")
    if named:
        python = Path(named) / "bin" / "python"
        if not _works(python):
            raise RuntimeError(f"BENCH_LMCACHE_ENV={named}: lmcache cannot be imported there")
        return python
    cache = Path(os.environ.get("TIERKV_CACHE_DIR") or Path.home() / ".cache" / "tierkv")
    folder = cache / f"lmcache-{VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
    python = folder / "bin" / "python"
    if not _works(python):
        _make(folder, python)
    return python


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    code = f"import lmcache; assert lmcache.__version__.startswith({VERSION!r})"
    done = subprocess.run([str(python), "-c", code], capture_output=True, check=False, timeout=300)
    return done.returncode == 0


def _make(folder: Path, python: Path) -> None:
    print(f"making an environment for lmcache {VERSION} in {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # the name sorts last: what is installed here wins
    (site / "zz_running.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for more in (["--no-deps", f"lmcache=={VERSION}"], ["--ignore-installed", *_PURE]):
        done = subprocess.run([*pip, *more], stdout=sys.stderr, check=False)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(f"lmcache {VERSION} cannot be installed: pip install {more[0]} ...")
    if not _works(python):
        raise RuntimeError(f"lmcache {VERSION} was installed in {folder} and cannot be imported")


class Peer:
    """A process with LMCache in it: ``with Peer(python) as peer: peer.ask("restart", ...)``."""

    def __init__(self, python: Path) -> None:
        self._python = python

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [str(self._python), str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()  # some of its threads may hang by now
        self._process.communicate()

    def ask(self, op: str, name: str = "", kind: str = "", **args: Any) -> Any:
        """Let it do something and wait for the answer.

        Raises:
            RuntimeError: if it failed, or the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"op": op, "name": name, "kind": kind, "args": args}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in said:
            raise RuntimeError(f"lmcache, {op}: {said['error']}")
        return said["ok"]
