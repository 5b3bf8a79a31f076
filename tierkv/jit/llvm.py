"""LLVM IR to functions that can be called: compiled for this processor, once for each process."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Host", "compiling", "function", "functions", "host"]

_log = logging.getLogger(__name__)
_OLDEST: Final = 17
"""Version of LLVM from which on pointers have no types in its language, as they have none here."""
_Wanted = tuple[str, type[Any] | None, tuple[type[Any], ...]]

compiling = threading.RLock()
"""Held by the one thread that compiles."""
# A fork waits for who compiles: a lock that another thread holds would stay shut in the child.
os.register_at_fork(
    before=compiling.acquire,
    after_in_parent=compiling.release,
    after_in_child=compiling.release,
)
_made: dict[tuple[str, tuple[_Wanted, ...]], list[Callable[..., Any]]] = {}
_engines: list[Any] = []  # machine code lives as long as the engine that made it


class Host(NamedTuple):
    """The processor that code is made for.

    Attributes:
        triple: Architecture and system, such as ``x86_64-unknown-linux-gnu``.
        cpu: LLVM's name of the processor.
        features: What it can do, by LLVM's names, such as ``avx512vbmi2``.
    """

    triple: str
    cpu: str
    features: frozenset[str]


@functools.cache
def host() -> Host | None:
    """This processor; None without llvmlite, or where ``TIERKV_FAST=0`` leaves machine code off.

    None, too, and logged, where llvmlite cannot be loaded, does not know the processor, or is older
    than the extra ``fast`` asks for: an older numba may have brought it along.
    """
    if os.environ.get("TIERKV_FAST") == "0" or importlib.util.find_spec("llvmlite") is None:
        return None
    try:
        with compiling:  # the import, too: it has locks of its own
            llvm = importlib.import_module("llvmlite.binding")
            _show_itself(llvm)
            if llvm.llvm_version_info[0] < _OLDEST:
                raise RuntimeError(f"it has LLVM {llvm.llvm_version_info[0]}")
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            able = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
            return Host(llvm.get_default_triple(), llvm.get_host_cpu_name(), able)
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning("llvmlite cannot be used: %s; slower without (extra 'fast')", error)
        return None


def _show_itself(llvm: Any) -> None:
    """Give what stands for LLVM's library in llvmlite a ``__dict__``.

    It answers any name with a function, this one too. Who walks over loaded modules and calls
    ``vars()`` on what they hold (vLLM does) must get a mapping.
    """
    known = getattr(getattr(getattr(llvm, "ffi", None), "lib", None), "_fntab", None)
    if isinstance(known, dict):
        known.setdefault("__dict__", {})


def function(
    text: str, name: str, result: type[Any] | None, arguments: tuple[type[Any], ...]
) -> Callable[..., Any]:
    """Compile a module and return one of its functions; calls release the GIL.

    Args:
        text: A module of LLVM IR, in llvmlite's own words or written by hand.
        name: The function's name there; it follows the C calling convention.
        result: Its result as a ctypes type; None: nothing.
        arguments: Its arguments as ctypes types.

    Returns:
        The function, good for the rest of the process. It is as careful with addresses as C is.

    Raises:
        RuntimeError: without llvmlite (ask :func:`host` first), or if LLVM refuses the module.
    """
    return functions(text, (name, result, arguments))[0]


def functions(text: str, *wanted: _Wanted) -> list[Callable[..., Any]]:
    """Compile a module and return several of its functions, as :func:`function` does one.

    Whoever asks for the same while it is compiled waits, and gets the same.

    Args:
        text: The module.
        wanted: Name, result and arguments of each.

    Raises:
        RuntimeError: without llvmlite (ask :func:`host` first), or if LLVM refuses the module.
    """
    if host() is None:
        raise RuntimeError("machine code is off: install the extra 'fast', and unset TIERKV_FAST=0")
    llvm = importlib.import_module("llvmlite.binding")
    with compiling:  # llvmlite guards single calls only
        if (text, wanted) in _made:
            return _made[text, wanted]
        module = llvm.parse_assembly(text)
        module.verify()
        target = llvm.Target.from_default_triple()
        features = llvm.get_host_cpu_features().flatten()
        machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=3
        )
        options = llvm.PipelineTuningOptions(speed_level=3)
        llvm.create_pass_builder(machine, options).getModulePassManager().run(
            module, llvm.create_pass_builder(machine, options)
        )
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        _engines.append(engine)
        found = _made[text, wanted] = [
            ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(name))
            for name, result, arguments in wanted
        ]
        return found
