"""Machine code for copies: compiled for any processor, off the loop, used only if it is right."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("llvmlite")

from tierkv import jit
from tierkv.jit import copying, trials

if TYPE_CHECKING:
    from collections.abc import Callable

if jit.host() is None:
    pytest.skip("TIERKV_FAST=0", allow_module_level=True)


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3", "x86-64-v4", "znver2", "skylake"])
def test_it_compiles_for_other_processors_of_this_kind(cpu: str) -> None:
    """LLVM splits what is one register here into two or four."""
    import llvmlite.binding as llvm

    host = jit.host()
    assert host is not None
    if not host.triple.startswith("x86_64"):
        pytest.skip("another kind of processor")
    module = llvm.parse_assembly(copying.TEXT)
    module.verify()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu, features="", opt=3)
    options = llvm.PipelineTuningOptions(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    text = machine.emit_assembly(module)
    assert "movnt" in text, "stores past the caches are none"
    assert ("zmm" in text) == (cpu == "x86-64-v4")
    assert ("ymm" in text) == (cpu != "x86-64")
    assert "mfence" in text or "lock" in text


def test_it_compiles_for_another_kind_of_processor() -> None:
    """The same text for ARM, if this LLVM knows it."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError as error:
        pytest.skip(str(error))
    machine = target.create_target_machine(cpu="neoverse-n1", opt=3)
    module = llvm.parse_assembly(copying.TEXT)
    module.triple = "aarch64-unknown-linux-gnu"
    module.verify()
    options = llvm.PipelineTuningOptions(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    text = machine.emit_assembly(module)
    assert "umlal" in text or "umull" in text
    assert "dmb" in text, "no fence"


def test_nothing_is_compiled_where_a_loop_runs() -> None:
    told = """
import asyncio
from tierkv.jit import copying
async def main():
    assert not copying.ready()
    assert not copying._code.cache_info().currsize
    await asyncio.get_running_loop().run_in_executor(None, copying.prepare)
    assert copying.ready()
asyncio.run(main())
print("done")
"""
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", told],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    assert done.stdout == "done\n"


def test_once_compiled_a_loop_may_use_it() -> None:
    copying.prepare()

    async def ask(what: Callable[[], bool]) -> bool:
        return what()

    assert asyncio.run(ask(copying.ready))


def tried() -> bool:
    """What a process finds out that has not tried yet."""
    return jit.Tried("copies of a test", copying._made, copying._right)() is not None


@pytest.mark.parametrize("wrong", ["bytes", "sums", "target", "verdict"])
def test_code_that_does_something_else_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As LLVM may make of it for a processor that nobody tried: its sample tells."""
    right = copying._code()
    assert tried()

    def gather(job: int, low: int, high: int, flags: int) -> None:
        right.gather(job, low, high, flags)
        field = {"bytes": 0, "sums": 3}.get(wrong)  # of the job: frames, digests
        if field is not None:
            at = ctypes.c_int64.from_address(job + 8 * field).value
            if wrong == "bytes":
                at = ctypes.c_int64.from_address(at).value
            ctypes.c_uint8.from_address(at + 5).value ^= 1

    def scatter(job: int, *rest: int) -> int:
        found = right.scatter(job, *rest)
        if wrong == "target":
            places = ctypes.c_int64.from_address(job + 16).value
            ctypes.c_uint8.from_address(ctypes.c_int64.from_address(places + 8).value).value ^= 1
        return -1 if wrong == "verdict" else found

    code: Any = copying._Code(gather, scatter)
    monkeypatch.setattr(copying, "_code", lambda: code)
    monkeypatch.setattr(trials, "_refusals", [])
    assert not tried()
    assert "not used" in caplog.text


def test_what_llvm_refuses_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies go on by library calls."""
    monkeypatch.setattr(copying, "TEXT", copying.TEXT + "\nno IR at all")
    monkeypatch.setattr(copying, "_code", copying._code.__wrapped__)
    monkeypatch.setattr(trials, "_refusals", [])
    assert not tried()
    assert "expected top-level entity" in caplog.text
