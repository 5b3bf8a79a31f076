"""The life of requests in vLLM's scheduler, outside of the planning of steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tierkv.testing.serving.content import Truth
from tierkv.testing.serving.objects import Request, Violation
from tierkv.testing.serving.pool import PagePool

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.testing.serving.objects import ConnectorOutput, Mode, Prompt, StepOutput

__all__ = ["Requests"]


class Requests:
    """Requests and their pages: how they come, are preempted and end, and what results do to them.

    Attributes:
        requests: Requests whose pages are not given back yet.
        pool: The pages.
        truth: What each request's tokens and KV are.
        waiting: Those that wait, parked ones too.
        running: Those that run.
    """

    def __init__(self, mode: Mode, call: Callable[..., Any]) -> None:
        self._mode = mode
        self._call = call
        self._random = random.Random(mode.seed)
        self.pool = PagePool(mode)
        self.requests: dict[str, Request] = {}
        self.truth: dict[str, Truth] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._arrived: set[str] = set()  # loads that every rank reported
        self._failed: set[str] = set()

    # ------------------------------------------------------------------ requests

    def add(self, name: str, prompt: Prompt) -> Request:
        """A request arrives."""
        request = Request(name, prompt)
        self.requests[name] = request
        self.truth[name] = Truth(prompt)
        self.waiting.append(request)
        self._call("on_new_request", request)
        return request

    def finish(self, request: Request, status: str) -> None:
        """A request is over: it stopped, or was aborted, in whatever state it is."""
        delayed = request.status == "loading" and request.request_id not in self._arrived
        if request.status == "loading":
            self._arrived.discard(request.request_id)
            self._failed.discard(request.request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = status
        tables = self.pool.tables.get(request.request_id, tuple([] for _ in self._mode.groups))
        answer = self._call("request_finished", request, tuple(list(t) for t in tables))
        if not isinstance(answer, tuple) or not isinstance(answer[0], bool):
            raise Violation("bad-answer", f"request_finished answers (bool, dict), not {answer!r}")
        self._finished.add(request.request_id)
        if not (delayed or answer[0]):
            self._free(request)

    def _free(self, request: Request) -> None:
        self.pool.release(request.request_id)
        del self.requests[request.request_id]

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away."""
        self.running.remove(request)
        self.pool.release(request.request_id)
        request.status = "preempted"
        request.num_computed_tokens = 0
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.add(request.request_id)

    # ------------------------------------------------------------------ results

    def update(self, output: StepOutput, told: ConnectorOutput, accepted: dict[str, int]) -> None:
        """Take in the results of a step.

        Args:
            output: The step.
            told: What the ranks' connectors reported.
            accepted: Per request that sampled, tokens it got (drafts accepted, and one).
        """
        skipped = self._invalid(told, output)
        for name in told.failed_recving:
            request = self.requests.get(name)
            if request is not None and request.status == "loading":
                request.num_computed_tokens = 0
                self._failed.add(name)
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue
            request.num_in_flight_tokens -= count
            stale = request.num_stale_tokens > 0
            if stale:
                request.num_stale_tokens -= count
            if name in skipped or request.status in {"finished", "aborted"}:
                continue
            self._take(request, output, accepted.get(name, 0), stale)
        self._call("update_connector_output", told)
        self._transfers(told)

    def _take(self, request: Request, output: StepOutput, got: int, stale: bool) -> None:
        name = request.request_id
        rejected = len(output.scheduled_spec_decode_tokens.get(name, ())) + 1 - got
        if got and not stale:
            request.num_computed_tokens -= rejected
            if request.num_output_placeholders:
                request.num_output_placeholders -= got + rejected
        truth = self.truth[name]
        for _ in range(got):
            request.all_token_ids.append(truth.token(request.num_tokens))
            if request.num_output_tokens >= request.max_tokens or request.pooling_params:
                self.finish(request, "finished")
                return

    def _transfers(self, told: ConnectorOutput) -> None:
        for name in told.finished_recving:
            request = self.requests.get(name)
            if request is None:
                raise Violation("unknown-id", f"load of {name!r} reported: no such request")
            if request.status == "loading":
                if name in self._arrived:
                    raise Violation("twice", f"load of {name!r} reported twice")
                self._arrived.add(name)
            elif request.status in {"finished", "aborted"}:
                self._free(request)
            else:
                raise Violation(
                    "unknown-id", f"load of {name!r} reported, which is {request.status}"
                )
        for name in told.finished_sending:
            if name not in self.requests:
                raise Violation("unknown-id", f"saves of {name!r} reported: no such request")
            self._free(self.requests[name])

    def _invalid(self, told: ConnectorOutput, output: StepOutput) -> set[str]:
        """Cut requests down to what is before the first invalid page."""
        if told.invalid_block_ids and len(self._mode.groups) > 1:
            raise Violation("invalid-pages", "pages reported where there are several groups")
        size, skipped = self._mode.groups[0].page_tokens, set[str]()
        for request in [*self.waiting, *self.running]:
            if request.status not in {"loading", "running"}:
                continue
            name = request.request_id
            done = request.num_computed_tokens - output.num_scheduled_tokens.get(name, 0)
            for at, page in enumerate(self.pool.tables[name][0][: -(-done // size)]):
                if page in told.invalid_block_ids:
                    request.num_computed_tokens = at * size
                    (self._failed if request.status == "loading" else skipped).add(name)
                    break
        return skipped

    def reset(self, running: bool) -> None:
        """Forget the prefixes in the pages; ``running``: preempt what runs for it."""
        while running and self.running:
            self.preempt(self.running[-1])
        self.pool.forget()
