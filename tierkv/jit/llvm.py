"""LLVM IR to functions that can be called: compiled for this processor, once for each process."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Host", "function", "functions", "host"]

_compiling = threading.Lock()
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
    """This processor; None without llvmlite, or where ``TIERKV_FAST=0`` leaves machine code off."""
    if os.environ.get("TIERKV_FAST") == "0" or importlib.util.find_spec("llvmlite") is None:
        return None
    llvm = importlib.import_module("llvmlite.binding")
    with _compiling:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        able = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
        return Host(llvm.get_default_triple(), llvm.get_host_cpu_name(), able)


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


def functions(
    text: str, *wanted: tuple[str, type[Any] | None, tuple[type[Any], ...]]
) -> list[Callable[..., Any]]:
    """Compile a module and return several of its functions, as :func:`function` does one.

    Args:
        text: The module.
        wanted: Name, result and arguments of each.

    Raises:
        RuntimeError: without llvmlite (ask :func:`host` first), or if LLVM refuses the module.
    """
    if host() is None:
        raise RuntimeError("machine code is off: install the extra 'fast', and unset TIERKV_FAST=0")
    llvm = importlib.import_module("llvmlite.binding")
    with _compiling:  # llvmlite guards single calls only
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
        return [
            ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(name))
            for name, result, arguments in wanted
        ]
