"""The driver: an engine without a model or a GPU, in TensorRT-LLM's order of calls.

The order is that of ``py_executor.py``, ``resource_manager.py`` and ``kv_cache_connector.py`` of
NVIDIA/TensorRT-LLM (1.2 and later), and how often each hook is called equals what its own
integration test of connectors asserts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from tierkv.testing.trtllm.args import FakeLlmArgs
from tierkv.testing.trtllm.engine import Engine
from tierkv.testing.trtllm.modes import Mode
from tierkv.testing.trtllm.requests import Prompt, Request
from tierkv.testing.trtllm.violations import Violation

if TYPE_CHECKING:
    from types import TracebackType

    from tierkv.testing.trtllm.connector import Connector

__all__ = ["Replay"]


class Replay(Engine):
    """One engine that lives from the connector's construction to :meth:`close`.

    One step is: new requests are matched and get pages; those that load asynchronously leave the
    batch; metadata is built, pickled and given to every rank, which start to load; layers run
    between their hooks; tokens are delivered and requests end; transfers are polled. Everything
    that a connector does wrong raises :class:`~tierkv.testing.trtllm.violations.Violation`.
    """

    def __init__(
        self,
        connector: Connector,
        mode: Mode | None = None,
        *,
        args: FakeLlmArgs | None = None,
        patience: int = 20_000,
        pause: float = 0.002,
    ) -> None:
        """Construct the connector and register the pages with it.

        Args:
            connector: What is tested.
            mode: How the engine is set up.
            args: What the connector is constructed with; those of the mode if None.
            patience: Polls without progress after which a transfer counts as lost.
            pause: Seconds between two such polls.

        Raises:
            Exception: What the connector's constructors raise.
            Violation: A hook was wrong.
        """
        self._patience, self._pause = patience, pause
        self._connector: Connector | None = connector
        self._count = 0
        mode = mode or Mode()
        try:
            sides = connector.start(args or FakeLlmArgs.of(mode), mode.ranks)
            super().__init__(mode, *sides, connector.ends)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connector. May be called twice."""
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    def submit(self, prompt: Prompt) -> Request:
        """Put a request into the engine; :meth:`step` moves it on."""
        self._count += 1
        request = Request.new(self._count, prompt, self.mode)
        self.active.append(request)
        return request

    def run(self, prompt: Prompt) -> Request:
        """Run one request to its end; its saves may still be under way.

        Raises:
            Violation: The connector did something wrong.
        """
        return self.run_all([prompt])[0]

    def run_all(self, prompts: list[Prompt]) -> list[Request]:
        """Run requests side by side to their end.

        Raises:
            Violation: The connector did something wrong.
        """
        requests = [self.submit(prompt) for prompt in prompts]
        self.finish(requests)
        return requests

    def finish(self, requests: list[Request]) -> None:
        """Step until these requests are over.

        Raises:
            Violation: ``never-finished``, among others.
        """
        idle = 0
        while not all(request.over for request in requests):
            idle = 0 if self.step() else idle + 1
            self._wait(idle)

    def settle(self) -> None:
        """Let transfers come to their end on an engine that has nothing to compute.

        Only ``get_finished`` is called: no metadata reaches a rank. Once nothing runs any more,
        every page must be free again.

        Raises:
            Violation: ``never-finished`` or ``pages-lost``, among others.
        """
        idle = 0
        while not self.transfers.idle:
            idle = 0 if self.poll() else idle + 1
            self._wait(idle)
        if self._connector is not None:
            self._connector.settle()
        if not self.active and any(self.memory.lost()):
            raise Violation("pages-lost", f"pages out per group: {self.memory.lost()}")

    def _wait(self, idle: int) -> None:
        if idle > self._patience:
            waiting = sorted(self.transfers.loading), sorted(self.transfers.saving)
            raise Violation("never-finished", f"loads of {waiting[0]}, saves of {waiting[1]}")
        if idle and self._pause:
            time.sleep(self._pause)
