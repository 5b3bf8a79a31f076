"""Replays vLLM's order of calls against a connector, over pages whose KV can be checked."""

from __future__ import annotations

import pickle
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tierkv.testing.serving.content import Memory
from tierkv.testing.serving.objects import ConnectorOutput, Violation
from tierkv.testing.serving.schedule import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.testing.serving.objects import Mode, Prompt, Request, StepOutput

__all__ = ["Replay"]

_PATIENCE = 60_000


class Replay:
    """An engine with a connector in it: one scheduler side, one worker side for each rank.

    Scheduler sides have vLLM's methods ``on_new_request``, ``get_num_new_matched_tokens``,
    ``update_state_after_alloc``, ``build_connector_meta``, ``update_connector_output``,
    ``request_finished(request, block_ids by group)``, ``reset_cache`` and, if they like,
    ``hit_sources(request, tokens)``; worker sides ``handle_preemptions``,
    ``bind_connector_metadata``, ``start_load_kv``, ``wait_for_save``, ``get_transfer_results``,
    ``get_block_ids_with_load_errors``, ``build_connector_worker_meta`` and
    ``clear_connector_metadata``. Metadata is pickled on its way to each rank.

    Args:
        mode: How the engine runs.
        make: Makes the two sides from each rank's memory.
        idle: Called where nothing can be computed until a load is over.
        patience: Steps in a row in which nothing can be computed, after which the engine hangs.

    Attributes:
        calls: Names of the calls made, in order.
        outputs: Tokens decoded, by request.
        offered: Tokens taken from the connector, by request, at its last admission.
        recomputed: Prompt tokens that forward passes computed, by request.
    """

    def __init__(
        self,
        mode: Mode,
        make: Callable[[Sequence[Memory]], tuple[Any, Sequence[Any]]],
        *,
        idle: Callable[[], None] = lambda: time.sleep(0.001),
        patience: int = _PATIENCE,
    ) -> None:
        self.mode = mode
        self.memories = [Memory(mode, rank) for rank in range(mode.ranks)]
        self.side, self.workers = make(self.memories)
        self.scheduler = Scheduler(mode, self._call)
        self.calls: list[str] = []
        self.outputs: dict[str, list[int]] = {}
        self.offered: dict[str, int] = {}
        self.recomputed: dict[str, int] = {}
        self._requests: dict[str, Request] = {}
        self._idle = idle
        self._flying: deque[tuple[StepOutput, ConnectorOutput, dict[str, int]]] = deque()
        self._reports: dict[str, int] = {}
        self._patience = patience
        self._still = 0

    # ------------------------------------------------------------------ driving

    def add(self, name: str, prompt: Prompt) -> None:
        """A request arrives."""
        self._requests[name] = self.scheduler.add(name, prompt)

    def abort(self, name: str) -> None:
        """A client goes away; nothing happens if its request is over."""
        request = self.scheduler.requests.get(name)
        if request is not None and request.status not in {"finished", "aborted"}:
            self.scheduler.finish(request, "aborted")

    def run(self, *prompts: tuple[str, Prompt]) -> None:
        """Serve requests that arrive together, to their end.

        Raises:
            Violation: as :meth:`step`.
        """
        for name, prompt in prompts:
            self.add(name, prompt)
        self.drain()

    def drain(self) -> None:
        """Go on until every request is over and every page is given back.

        Raises:
            Violation: as :meth:`step`; or if pages are left.
        """
        while self.busy:
            self.step()
        self.step()
        if self.scheduler.pool.free != self.mode.pages - 1:
            left = self.mode.pages - 1 - self.scheduler.pool.free
            raise Violation("leak", f"{left} pages are held by nobody")

    @property
    def busy(self) -> bool:
        """Whether a request is not over, or its pages are still lent out."""
        return bool(self.scheduler.requests or self._flying)

    def step(self) -> None:
        """Run the engine for one step.

        Raises:
            Violation: if the connector did what the engine cannot stand, or let it read wrong KV.
        """
        output = self.scheduler.schedule()
        self._flying.append((output, *self._execute(output)))
        while len(self._flying) > (1 if self.mode.overlap and output.num_scheduled_tokens else 0):
            self._update(*self._flying.popleft())
        if output.num_scheduled_tokens or not self.busy:
            self._still = 0
        else:
            self._idle()
            self._still += 1
            if self._still > self._patience:
                stuck = {r.request_id: r.status for r in self.scheduler.requests.values()}
                raise Violation("hang", f"nothing moves: {stuck}")

    def reset(self, *, connector: bool = True, running: bool = True) -> bool:
        """Empty the prefix cache, and the connector's if asked to."""
        self.scheduler.reset(running)
        return not connector or self._call("reset_cache") is not False

    def _update(self, output: StepOutput, told: ConnectorOutput, accepted: dict[str, int]) -> None:
        self.scheduler.update(output, told, accepted)
        for name, request in self._requests.items():
            self.outputs[name] = request.all_token_ids[request.num_prompt_tokens :]
            self.offered[name] = request.offered

    # ------------------------------------------------------------------ a step on the ranks

    def _execute(self, output: StepOutput) -> tuple[ConnectorOutput, dict[str, int]]:
        told = ConnectorOutput()
        accepted = self._accepted(output)
        for rank, worker in enumerate(self.workers):
            meta = _travelled(output.kv_connector_metadata)
            self._on(worker, "handle_preemptions", meta)
            self._on(worker, "bind_connector_metadata", meta)
            self.memories[rank].poison(output.fresh)
            if output.has_sync_kv_loads:
                self._on(worker, "start_load_kv", None)
            if output.num_scheduled_tokens:
                self._forward(rank, output, accepted)
            if not output.has_sync_kv_loads:
                self._on(worker, "start_load_kv", None)
            self._on(worker, "wait_for_save")
            self._collect(worker, output, told)
            self._on(worker, "clear_connector_metadata")
        return told, accepted

    def _accepted(self, output: StepOutput) -> dict[str, int]:
        """How many tokens each request of a step that reached its end gets."""
        accepted = {}
        for name, count in output.num_scheduled_tokens.items():
            request, truth = self._requests[name], self.scheduler.truth[name]
            guesses = output.scheduled_spec_decode_tokens.get(name, [])
            stop = output.starts[name] + count - len(guesses)
            if stop < request.num_tokens:
                continue
            right = 0
            while right < len(guesses) and guesses[right] == truth.token(stop + right):
                right += 1
            accepted[name] = right + 1
            truth.token(stop + right)
        return accepted

    def _forward(self, rank: int, output: StepOutput, accepted: dict[str, int]) -> None:
        memory, tables = self.memories[rank], self._tables(output)
        for name, count in output.num_scheduled_tokens.items():
            start, truth = output.starts[name], self.scheduler.truth[name]
            guesses = len(output.scheduled_spec_decode_tokens.get(name, ()))
            wrong = guesses + 1 - accepted[name] if name in accepted else 0
            memory.write(tables[name], start, truth.cells(start, start + count), wrong)
            if rank == 0:
                prompt = max(0, min(start + count, len(truth.tokens)) - start)
                self.recomputed[name] = self.recomputed.get(name, 0) + prompt
        for name in output.num_scheduled_tokens:
            start = output.starts[name]
            memory.check(
                f"request {name!r}", tables[name], start, self.scheduler.truth[name], start
            )

    def _tables(self, output: StepOutput) -> dict[str, tuple[list[int], ...]]:
        return {n: self.scheduler.pool.tables[n] for n in output.num_scheduled_tokens}

    def _collect(self, worker: Any, output: StepOutput, told: ConnectorOutput) -> None:
        """Join what one rank reports to what the others did, as vLLM does."""
        results = self._on(worker, "get_transfer_results", output.finished_req_ids)
        for kind in ("finished_recving", "finished_sending"):
            for name in getattr(results, kind, None) or ():
                key = f"{kind}:{name}"
                self._reports[key] = self._reports.get(key, 0) + 1
                if self._reports[key] == self.mode.ranks:
                    del self._reports[key]
                    getattr(told, kind).add(name)
        told.failed_recving |= getattr(results, "failed_recving", None) or set()
        told.invalid_block_ids |= self._on(worker, "get_block_ids_with_load_errors") or set()
        meta = self._on(worker, "build_connector_worker_meta")
        if meta is not None:
            meta = _travelled(meta)
            before = told.kv_connector_worker_meta
            told.kv_connector_worker_meta = meta if before is None else before.aggregate(meta)

    # ------------------------------------------------------------------ calls

    def _call(self, method: str, *args: Any, optional: bool = False) -> Any:
        if optional and not hasattr(self.side, method):
            return None
        return self._on(self.side, method, *args)

    def _on(self, side: Any, method: str, *args: Any) -> Any:
        self.calls.append(method)
        try:
            return getattr(side, method)(*args)
        except Violation:
            raise
        except Exception as error:
            raise Violation("raised", f"{method}: {type(error).__name__}: {error}") from error


def _travelled(meta: Any) -> Any:
    """Metadata as it arrives in another process."""
    try:
        return pickle.loads(pickle.dumps(meta))
    except Exception as error:
        raise Violation("raised", f"metadata cannot travel: {error}") from error
