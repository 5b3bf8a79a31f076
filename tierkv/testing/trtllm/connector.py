"""What is tested: two classes, and how they are made."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.testing.trtllm.args import FakeLlmArgs

__all__ = ["Connector"]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector as the driver makes it.

    Attributes:
        scheduler: Makes the scheduler's side from the engine's arguments.
        worker: Makes a rank's side; it is told its rank, which it would have from MPI.
        settle: Waits until what the ranks stored can be offered, if that takes time.
        close: Lets go of what they hold. TensorRT-LLM has no such call: processes just end.
        ends: Errors that ``get_finished`` raises on purpose, to end an engine that must not go on.
    """

    scheduler: Callable[[FakeLlmArgs], object]
    worker: Callable[[FakeLlmArgs, int], object]
    settle: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    ends: tuple[type[Exception], ...] = ()

    def start(self, args: FakeLlmArgs, ranks: int) -> tuple[object, list[object]]:
        """Make both sides; those of rank 0 in two threads at once, as the engine does.

        Raises:
            Exception: What a constructor raised: it refuses to start.
        """
        made: list[object] = []
        failed: list[Exception] = []

        def make() -> None:
            try:
                made.append(self.scheduler(args))
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=make, name="connector-scheduler")
        thread.start()
        try:
            workers = [self.worker(args, rank) for rank in range(ranks)]
        finally:
            thread.join()
        if failed:
            raise failed[0]
        return made[0], workers
