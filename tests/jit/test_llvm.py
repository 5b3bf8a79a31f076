from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tierkv import jit

_SUM = """
define i64 @twice(i64 %number) {
  %found = shl i64 %number, 1
  ret i64 %found
}
"""


def test_a_module_becomes_a_function() -> None:
    pytest.importorskip("llvmlite")
    host = jit.host()
    assert host is not None
    assert host.cpu
    twice = jit.function(_SUM, "twice", ctypes.c_int64, (ctypes.c_int64,))
    assert [twice(n) for n in (0, 21, -3)] == [0, 42, -6]


def test_a_wrong_module_is_refused_with_its_place() -> None:
    pytest.importorskip("llvmlite")
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
