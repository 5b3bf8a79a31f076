"""Where machine code of codecs is compiled: not on an event loop, and whole before a fork."""

from __future__ import annotations

import os
import subprocess
import sys

ON_A_LOOP = """
import asyncio, sys, threading
from tests.codecs.test_trials import there_and_back
from tierkv import jit
from tierkv.jit import trials

chains = ["int8", "int4", "rot4", "ecq4+rans", "planes"]
threads = set()
real = trials.Tried._try

def watched(self, key):
    threads.add(threading.get_ident())
    real(self, key)

trials.Tried._try = watched

async def main():
    heavy = lambda: {name for name in ("llvmlite", "numba") if name in sys.modules}
    first = [there_and_back(chain) for chain in chains]
    assert not threads, "tried on the loop"
    assert not heavy(), heavy()
    assert jit.behind()
    loop = asyncio.get_running_loop()
    for _ in range(9):  # what is there asks for more
        if not jit.behind():
            break
        await loop.run_in_executor(None, jit.catch_up)
        again = [there_and_back(chain) for chain in chains]
    assert not jit.behind()
    assert threads and threading.get_ident() not in threads
    # what the bytes decode to is the same; lanes are chosen only where they are quick
    assert [two for _, two in first] == [two for _, two in again]
    lossy = [i for i, chain in enumerate(chains) if "planes" not in chain and "rans" not in chain]
    assert [first[i] for i in lossy] == [again[i] for i in lossy]
    print(len(threads), jit.refusals())

asyncio.run(main())
"""


def _said_in_a_new_process(code: str) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_compiled_nor_loaded_where_a_loop_runs() -> None:
    said = _said_in_a_new_process(ON_A_LOOP)
    assert said.split(maxsplit=1)[1].strip() == "()"


FORKING = """
import os, threading
import torch
torch.set_num_threads(1)
from tests.codecs.test_trials import there_and_back
from tierkv.jit import trials

begun = threading.Event()
real = trials.Tried._try

def watched(self, key):
    begun.set()
    real(self, key)

trials.Tried._try = watched
found = []
other = threading.Thread(target=lambda: found.append(there_and_back("int4")))
other.start()
begun.wait()
child = os.fork()  # while the other thread compiles
mine = there_and_back("int4")[1]
if child == 0:
    os._exit(17 + (len(mine) > 0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
other.join()
assert found[0][1] == mine
"""


def test_processes_that_fork_while_codecs_are_compiled_go_on() -> None:
    said = _said_in_a_new_process(FORKING)
    assert said.strip() == "18"
