"""Names of plug-ins and how they become objects: a small built-in table, then entry points.

A third party registers itself in its own distribution::

    [project.entry-points."tierkv.backends"]
    mystore = "my_package.store:MyBackend"

The table is needed beside entry points because a checkout that is not installed has none, and
because it carries the install hint of optional parts. Nothing is imported before its name is
asked for, and a plug-in that cannot be imported is an error, never a log line and silence.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from tierkv import abc
from tierkv.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Kind", "factory", "lacks", "load", "names", "refresh", "resolve"]

Kind = Literal["adapters", "admissions", "backends", "codecs", "devices", "policies", "predictors"]
"""Groups of plug-ins; third parties use the entry point group ``tierkv.<kind>``."""

_HF_HINT: Final = "pip install -c constraints.txt -e '.[hf]'"
_SERVING_HINT: Final = "install this checkout into the engine's own environment: pip install -e ."
_CORE_HINT: Final = "reinstall the package with its dependencies: pip install -e ."

_BUILT_IN: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("adapters", "hf"): ("tierkv_adapters.hf", _HF_HINT),
    ("adapters", "trtllm"): ("tierkv_adapters.trtllm", _SERVING_HINT),
    ("adapters", "vllm"): ("tierkv_adapters.vllm", _SERVING_HINT),
    ("admissions", "all"): ("tierkv.decisions.admission.everything:Everything", _CORE_HINT),
    ("admissions", "second_use"): (
        "tierkv.decisions.admission.second_use:SecondUse",
        _CORE_HINT,
    ),
    ("admissions", "tinylfu"): ("tierkv.decisions.admission.tinylfu:TinyLfu", _CORE_HINT),
    ("admissions", "write_budget"): (
        "tierkv.decisions.admission.write_budget:WriteBudget",
        _CORE_HINT,
    ),
    ("backends", "device"): ("tierkv_backends.device:DeviceBackend", _CORE_HINT),
    ("backends", "file"): ("tierkv_backends.file:FileBackend", _CORE_HINT),
    ("backends", "host"): ("tierkv_backends.host:HostBackend", _CORE_HINT),
    ("backends", "nvme"): ("tierkv_backends.nvme:NvmeBackend", _CORE_HINT),
    ("codecs", "ecq2"): ("tierkv_codecs.ecq:Ecq2", _CORE_HINT),
    ("codecs", "ecq3"): ("tierkv_codecs.ecq:Ecq3", _CORE_HINT),
    ("codecs", "ecq4"): ("tierkv_codecs.ecq:Ecq4", _CORE_HINT),
    ("codecs", "fp8"): ("tierkv_codecs.fp8:Fp8", _CORE_HINT),
    ("codecs", "int2"): ("tierkv_codecs.grouped:Int2", _CORE_HINT),
    ("codecs", "int3"): ("tierkv_codecs.grouped:Int3", _CORE_HINT),
    ("codecs", "int4"): ("tierkv_codecs.grouped:Int4", _CORE_HINT),
    ("codecs", "int6"): ("tierkv_codecs.grouped:Int6", _CORE_HINT),
    ("codecs", "int8"): ("tierkv_codecs.int8:Int8", _CORE_HINT),
    ("codecs", "lowrank"): ("tierkv_codecs.lowrank:LowRank", _CORE_HINT),
    ("codecs", "lz4"): ("tierkv_codecs.lz4:Lz4", _CORE_HINT),
    ("codecs", "planes"): ("tierkv_codecs.planes:Planes", _CORE_HINT),
    ("codecs", "rans"): ("tierkv_codecs.rans_codec:Rans", _CORE_HINT),
    ("codecs", "raw"): ("tierkv_codecs.raw:Raw", _CORE_HINT),
    ("codecs", "rot2"): ("tierkv_codecs.rot:Rot2", _CORE_HINT),
    ("codecs", "rot3"): ("tierkv_codecs.rot:Rot3", _CORE_HINT),
    ("codecs", "rot4"): ("tierkv_codecs.rot:Rot4", _CORE_HINT),
    ("codecs", "zstd"): ("tierkv_codecs.zstd:Zstd", _CORE_HINT),
    ("devices", "cpu"): ("tierkv.device.cpu:CpuDevice", _CORE_HINT),
    ("devices", "cuda"): ("tierkv.device.cuda:CudaDevice", _CORE_HINT),
    ("devices", "sim"): ("tierkv.testing.accelerator:SimDevice", _CORE_HINT),
    ("policies", "adaptive"): ("tierkv.decisions.policy.adaptive:Adaptive", _CORE_HINT),
    ("policies", "arc"): ("tierkv.decisions.policy.arc:Arc", _CORE_HINT),
    ("policies", "fifo"): ("tierkv.decisions.policy.fifo:Fifo", _CORE_HINT),
    ("policies", "gdsf"): ("tierkv.decisions.policy.size_aware:Gdsf", _CORE_HINT),
    ("policies", "gittins"): ("tierkv.decisions.policy.gittins:Gittins", _CORE_HINT),
    ("policies", "importance"): ("tierkv.decisions.policy.importance:Importance", _CORE_HINT),
    ("policies", "lfu"): ("tierkv.decisions.policy.lfu:Lfu", _CORE_HINT),
    ("policies", "lfu_decay"): ("tierkv.decisions.policy.lfu:LfuDecay", _CORE_HINT),
    ("policies", "lrfu"): ("tierkv.decisions.policy.lrfu:Lrfu", _CORE_HINT),
    ("policies", "lru"): ("tierkv.decisions.policy.lru:Lru", _CORE_HINT),
    ("policies", "lru2"): ("tierkv.decisions.policy.lru2:Lru2", _CORE_HINT),
    ("policies", "s3fifo"): ("tierkv.decisions.policy.s3fifo:S3Fifo", _CORE_HINT),
    ("policies", "size_aware"): ("tierkv.decisions.policy.size_aware:SizeAware", _CORE_HINT),
    ("predictors", "arrival"): ("tierkv.decisions.predict.arrival:AtArrival", _CORE_HINT),
    ("predictors", "chain"): ("tierkv.decisions.predict.chain:MostRecentChild", _CORE_HINT),
    ("predictors", "oracle"): ("tierkv.decisions.predict.oracle:Oracle", _CORE_HINT),
    ("predictors", "return_time"): ("tierkv.decisions.predict.return_time:ReturnTime", _CORE_HINT),
    ("predictors", "sequential"): ("tierkv.decisions.predict.sequential:ReadAhead", _CORE_HINT),
}

# What an adapter adapts: it may load without, so that it can be configured, but has nothing to do.
_NEEDS: Final[dict[tuple[str, str], str]] = {
    ("adapters", "hf"): "transformers",
    ("adapters", "trtllm"): "tensorrt_llm",
    ("adapters", "vllm"): "vllm",
}

# Names that the design reserves for later versions: asking for one is not a typing mistake.
_PLANNED: Final[dict[str, frozenset[str]]] = {
    "backends": frozenset({"redis", "s3"}),
}

_BASES: Final[dict[str, tuple[type, ...]]] = {
    "admissions": (abc.Admission,),
    "backends": (abc.Backend,),
    "devices": (abc.Device,),
    "codecs": (abc.TensorCodec, abc.TensorBytesCodec, abc.BytesCodec),
    "policies": (abc.Policy,),
    "predictors": (abc.Predictor,),
}


@functools.cache
def _entry_points(kind: str) -> dict[str, tuple[importlib.metadata.EntryPoint, ...]]:
    found: dict[str, tuple[importlib.metadata.EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=f"tierkv.{kind}"):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def refresh() -> None:
    """Forget which entry points were seen; call it after installing a plug-in at run time."""
    _entry_points.cache_clear()


def names(kind: Kind) -> list[str]:
    """Every name that :func:`resolve` knows for ``kind``, sorted; imports nothing.

    Raises:
        ConfigError: if there is no such kind.
    """
    _check_kind(kind)
    return sorted({name for k, name in _BUILT_IN if k == kind} | set(_entry_points(kind)))


def lacks(kind: Kind, name: str) -> str | None:
    """The library that a built-in plug-in is for, if it is not installed here; imports nothing.

    Returns:
        Name of a module; None if it can be found, or if the plug-in stands by itself.
    """
    library = _NEEDS.get((kind, name))
    if library is None:
        return None
    try:
        spec = importlib.util.find_spec(library)
    except ValueError:  # it is there, and was loaded in a way of its own
        return None
    # a folder that happens to have its name is a package without an origin
    return library if spec is None or spec.origin is None else None


def resolve(kind: Kind, name: str) -> Any:
    """Import the plug-in called ``name``.

    Returns:
        The class of a backend, codec or policy; the module or object of the other kinds.

    Raises:
        ConfigError: if the name is unknown, registered twice, or names something that is not a
            plug-in of this kind.
        MissingDependencyError: if its module cannot be imported; the message carries the hint.
    """
    _check_kind(kind)
    built_in = _BUILT_IN.get((kind, name))
    points = _entry_points(kind).get(name, ())
    owners = [point.value for point in points] + ([built_in[0]] if built_in else [])
    if len(owners) > 1:
        raise ConfigError(
            f"{kind}: the name {name!r} is registered {len(owners)} times ({', '.join(owners)}); "
            f"uninstall or rename all but one of them"
        )
    if built_in:
        target, hint = built_in
    elif points:
        dist = points[0].dist
        target = points[0].value
        hint = f"it belongs to the distribution {dist.name if dist else 'of that entry point'!r}"
    else:
        raise ConfigError(_unknown(kind, name))
    found = load(target, what=f"{kind}: {name!r}", hint=hint)
    bases = _BASES.get(kind)
    if bases and not (isinstance(found, type) and issubclass(found, bases)):
        wanted = " or ".join(f"tierkv.abc.{base.__name__}" for base in bases)
        raise ConfigError(f"{kind}: {name!r} ({target}) is not a subclass of {wanted}")
    return found


def factory(kind: Kind, text: str) -> Callable[[], Any]:
    """What makes the plug-in that a configuration names: ``"name"`` or ``"name:option"``.

    Raises:
        ConfigError: if the name is unknown, or the plug-in does not take the option.
        MissingDependencyError: as :func:`resolve`.
    """
    name, colon, option = text.partition(":")
    made = resolve(kind, name)
    make: Callable[[], Any] = functools.partial(made, option) if colon else made
    try:
        make()  # an option that means nothing is found at start, not at the first use
    except TypeError as error:
        why = f"takes no option, or another one: {text!r}" if colon else f"cannot be made: {error}"
        raise ConfigError(f"{kind}: {name!r} {why}") from error
    return make


def load(target: str, *, what: str, hint: str) -> Any:
    """Import ``"module"`` or ``"module:attribute"``.

    Args:
        target: What to import.
        what: How messages call it, e.g. ``"backends: 'nvme'"``.
        hint: What to do when the import fails.

    Raises:
        MissingDependencyError: if the import fails. Optional libraries fail with ImportError,
            OSError (a shared object is missing) or RuntimeError (no driver): all three count.
        ConfigError: if the module has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(f"{what} {_lacking(module_name, error)}; {hint}") from error
    for step in attribute.split(".") if attribute else ():
        if not hasattr(found, step):
            raise ConfigError(f"{what}: {module_name} has no attribute {attribute!r}")
        found = getattr(found, step)
    return found


def _lacking(module: str, error: Exception) -> str:
    if isinstance(error, MissingDependencyError) and isinstance(error.__cause__, ImportError):
        error = error.__cause__  # the hint of who asks is the better one
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and missing != module and "." not in missing:
        return f"needs {missing}, which is not installed"
    return f"needs {module}, which cannot be imported ({error})"


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise ConfigError(f"no such kind of plug-in: {kind!r} (one of {', '.join(get_args(Kind))})")


def _unknown(kind: Kind, name: str) -> str:
    known = names(kind)
    listing = ", ".join(known) or "none is installed"
    if name in _PLANNED.get(kind, ()):
        return f"{kind}: {name!r} is not available in this version (available: {listing})"
    close = difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {close[0]!r}?" if close else ""
    return f"{kind}: unknown name {name!r} (known: {listing}){suggestion}"
