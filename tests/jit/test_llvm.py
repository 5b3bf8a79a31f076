from __future__ import annotations

import ctypes
import importlib
import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv import jit

compiles = pytest.mark.skipif(jit.host() is None, reason="no llvmlite, or TIERKV_FAST=0")

_SUM = """
define i64 @twice(i64 %number) {
  %found = shl i64 %number, 1
  ret i64 %found
}
"""


@compiles
def test_a_module_becomes_a_function() -> None:
    host = jit.host()
    assert host is not None
    assert host.cpu
    twice = jit.function(_SUM, "twice", ctypes.c_int64, (ctypes.c_int64,))
    assert [twice(n) for n in (0, 21, -3)] == [0, 42, -6]


@compiles
def test_what_many_threads_ask_for_is_compiled_once() -> None:
    text = _SUM.replace("twice", "twice_by_all")
    found: list[Any] = []
    every = [
        threading.Thread(
            target=lambda: found.append(
                jit.function(text, "twice_by_all", ctypes.c_int64, (ctypes.c_int64,))
            )
        )
        for _ in range(8)
    ]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join(60)
    assert len(found) == 8
    assert len({id(each) for each in found}) == 1
    assert found[0](21) == 42


@pytest.mark.parametrize("why", ["LLVM 15", "no such symbol", "no features"])
def test_an_llvmlite_that_is_no_use_is_told_of_and_left_alone(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An older one, which numba brought along for somebody else, does not know what is written."""
    pytest.importorskip("llvmlite")
    monkeypatch.delenv("TIERKV_FAST", raising=False)
    load = importlib.import_module

    def no_features() -> Any:
        raise RuntimeError(why)

    def binding(name: str) -> Any:
        if name != "llvmlite.binding":
            return load(name)
        if why == "no such symbol":
            raise OSError(why)
        return SimpleNamespace(
            llvm_version_info=(15 if why == "LLVM 15" else 20, 0, 7),
            initialize_native_target=lambda: None,
            initialize_native_asmprinter=lambda: None,
            get_host_cpu_features=no_features,
        )

    monkeypatch.setattr(importlib, "import_module", binding)
    with caplog.at_level(logging.WARNING, "tierkv.jit"):
        assert jit.host.__wrapped__() is None
    assert [why in record.message for record in caplog.records] == [True]


@compiles
def test_who_asks_for_the_variables_of_all_that_modules_hold_gets_them() -> None:
    """vLLM does, when it starts."""
    import llvmlite.binding as llvm

    assert vars(llvm.ffi.lib) == {}
    assert llvm.ffi.lib.LLVMPY_GetVersionInfo() > 0


@compiles
def test_a_wrong_module_is_refused_with_its_place() -> None:
    with pytest.raises(RuntimeError, match="expected"):
        jit.function("define i64 twice", "twice", ctypes.c_int64, ())


def test_switched_off_there_is_no_machine_code() -> None:
    told = (
        "from tierkv import jit\n"
        "assert jit.host() is None\n"
        "try: jit.function('', 'f', None, ())\n"
        "except RuntimeError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", told],
        env={"TIERKV_FAST": "0", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "'fast'" in done.stdout


FORKING = f"""
import ctypes, os, threading, time
from tierkv import jit
from tierkv.jit import llvm

held = threading.Event()

def compiling():
    with llvm.compiling:
        held.set()
        time.sleep(0.3)

threading.Thread(target=compiling).start()
held.wait()
child = os.fork()
if child == 0:
    twice = jit.function({_SUM!r}, "twice", ctypes.c_int64, (ctypes.c_int64,))
    os._exit(twice(21))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@compiles
def test_who_is_forked_while_somebody_compiles_can_compile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "42"
