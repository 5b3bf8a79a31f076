"""One connector at a time, in fresh processes, on the same prompts: what every request cost."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from benchmarks.vllm.connectors import plug_in, transfer
from benchmarks.vllm.damage import flip_bits, truncate
from benchmarks.vllm.processes import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from benchmarks.vllm.processes import Ran

__all__ = ["Answer", "Bench", "Broken", "Visit"]

_CODE: Final = """
from benchmarks.vllm.engine import complete, counters, make_llm, prompt_tokens, settle
llm = make_llm(args["model"], args["transfer"], kv_bytes=args["kv_bytes"])
complete(llm, [[5] * 40], max_tokens=2)
for length in args["lengths"]:
    prompt = prompt_tokens(args["model"], length, seed=length)
    tell(**{str(length): complete(llm, [prompt], max_tokens=args["max_tokens"])[0]})
tell(stored=settle(llm, args["folder"]))
tell(counters=counters("vllm:kv_offload", "vllm:tierkv", "tierkv"))
"""
_NEW_TOKENS: Final = 8


class Answer(NamedTuple):
    """What one request got, and what it cost.

    Attributes:
        output: Token ids.
        cached: Tokens that the engine counts as cached.
        ttft_s: Seconds to the first token.
        wall_s: Seconds to the last.
        cpu_s: CPU seconds of the process and its children up to the first token.
        whole_cpu_s: CPU seconds up to the last.
    """

    output: list[int]
    cached: int
    ttft_s: float
    wall_s: float
    cpu_s: float
    whole_cpu_s: float


class Visit(NamedTuple):
    """What one process did.

    Attributes:
        outcome: ``"alive"``, ``"died"`` or ``"hung"``.
        answers: By the length of the prompt; those that came.
        counters: Its Prometheus counters at the end.
        log: The end of its output.
    """

    outcome: str
    answers: dict[int, Answer]
    counters: dict[str, float]
    log: str


class Broken(NamedTuple):
    """What a fault did.

    Attributes:
        visit: The process that met it.
        damaged: Bits flipped or files cut, 0 where the fault is another.
    """

    visit: Visit
    damaged: int


class Bench:
    """Runs processes on a model; open it with ``with``.

    Args:
        python: Interpreter with vLLM.
        model: Directory of the model.
        lengths: Prompt lengths in tokens; every process answers one of each.
        within: Seconds after which a process counts as hung.
        kv_bytes: Size of the paged KV cache.
    """

    def __init__(
        self, python: Path, model: Path, lengths: Sequence[int], *, within: float, kv_bytes: int
    ) -> None:
        self._python = python
        self._lengths = list(lengths)
        self._within = within
        self._fixed = {"model": str(model), "kv_bytes": kv_bytes, "max_tokens": _NEW_TOKENS}

    def __enter__(self) -> Self:
        self._top = Path(tempfile.mkdtemp(prefix="tierkv-bench-vllm-"))
        self._plugged = plug_in(self._top / "plug-in")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._top, ignore_errors=True)

    def folder(self, name: str) -> Path:
        """A folder to store in, empty and named so."""
        place = self._top / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place

    def stored(self, name: str) -> Path:
        """A folder of that name, as it is."""
        return self._top / name

    def visit(
        self, connector: str, folder: Path, fault: str | None = None, lengths: Sequence[int] = ()
    ) -> Visit:
        """Answer every prompt once in a fresh process.

        Args:
            connector: One of :data:`~benchmarks.vllm.connectors.CONNECTORS`.
            folder: Where it stores, and may find what an earlier one stored.
            fault: One of :data:`~benchmarks.vllm.connectors.FAULTS`.
            lengths: Which prompts; default: all.
        """
        asked = transfer(connector, folder, fault)
        engine = f"tierkv-bench-{uuid.uuid4().hex}"
        if asked is not None:
            asked["engine_id"] = engine
        wanted = list(lengths) or self._lengths
        args = {"transfer": asked, "folder": str(folder), "lengths": wanted}
        try:
            ran = run(
                _CODE,
                self._fixed | args,
                within=self._within,
                python=self._python,
                env={"PYTHONPATH": str(self._plugged)},
            )
        finally:  # vLLM's CPU tier survives a process that is killed
            Path(f"/dev/shm/vllm_offload_{engine}.mmap").unlink(missing_ok=True)
        return _visit(ran, wanted)

    def broken(self, connector: str, stored: Path, fault: str, length: int) -> Broken:
        """What becomes of one request when something is broken.

        Args:
            connector: One of :data:`~benchmarks.vllm.connectors.CONNECTORS`.
            stored: What a sound process stored; a copy of it is used.
            fault: One of :data:`~benchmarks.vllm.connectors.FAULTS`.
            length: Which prompt.
        """
        folder = self._top / f"{connector}-{fault}"
        damaged = 0
        if fault == "transfer":  # nothing is stored yet: the stores are what fails
            folder.mkdir()
        else:
            shutil.copytree(stored, folder)
        if fault == "corrupt":
            damaged = flip_bits(folder)
        elif fault == "failing" and connector == "example":
            damaged = truncate(folder)
        try:
            return Broken(self.visit(connector, folder, fault, [length]), damaged)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _visit(ran: Ran, lengths: Sequence[int]) -> Visit:
    answers = {}
    for length in lengths:
        if told := ran.told.get(str(length)):
            answers[length] = Answer(**told)
    log = os.linesep.join(ran.log.splitlines()[-12:])
    return Visit(ran.outcome, answers, ran.told.get("counters", {}), log)
