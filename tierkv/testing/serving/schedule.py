"""vLLM's scheduler in small: its order of calls into a connector, its states of a request.

Written after reading ``v1/core/sched/scheduler.py`` of vLLM 0.32 and tracing it: running requests
first, then those that wait; a request that asks for an asynchronous load is parked with its pages
until every rank reported; preempted ones come back with other pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.testing.serving.objects import (
    Blocks,
    BlockState,
    CachedRequests,
    NewRequest,
    StepOutput,
    Violation,
)
from tierkv.testing.serving.requests import Requests

if TYPE_CHECKING:
    from tierkv.testing.serving.objects import Request

__all__ = ["Scheduler"]


class Scheduler(Requests):
    """One scheduler with its pages; ``call`` makes every call into the connector."""

    def schedule(self) -> StepOutput:
        """Plan one step, empty ones too."""
        budget = self._mode.chunk
        counts: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        news: list[Request] = []
        resumed: list[Request] = []
        more: dict[str, tuple[list[int], ...]] = {}
        preempted = False
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            guess = self._guess(request)
            due = request.num_tokens + request.num_output_placeholders + len(guess)
            count = min(due - request.num_computed_tokens, budget)
            if count <= 0 or self._has_enough(request):
                continue
            had = [len(t) for t in self.pool.tables[request.request_id]]
            stop = request.num_computed_tokens + count
            while not self.pool.allocate(request.request_id, request.num_computed_tokens, stop):
                victim = self.running[-1]
                preempted = True
                self.preempt(victim)
                budget += counts.pop(victim.request_id, 0)
                drafts.pop(victim.request_id, None)
                more.pop(victim.request_id, None)
                if victim is request:
                    break
            if request not in self.running:
                break
            name = request.request_id
            counts[name], budget = count, budget - count
            if guess and count > 1:
                drafts[name] = guess[: count - 1]
            tables = self.pool.tables[name]
            more[name] = tuple(t[n:] for t, n in zip(tables, had, strict=True))
        sync = False
        if not preempted:
            sync = self._admit(counts, budget, news, resumed)
        return self._output(counts, drafts, news, resumed, more, sync)

    def _has_enough(self, request: Request) -> bool:
        """Whether the steps under way bring all the tokens it may decode."""
        ahead = request.num_output_tokens + request.num_output_placeholders
        return request.num_output_placeholders > 0 and ahead >= request.max_tokens

    def _guess(self, request: Request) -> list[int]:
        if not self._mode.drafts or self._mode.overlap or not request.num_output_tokens:
            return []
        if request.num_computed_tokens != request.num_tokens - 1:
            return []
        truth, at = self.truth[request.request_id], request.num_tokens
        right = self._random.randrange(self._mode.drafts + 1)
        count = self._mode.drafts
        return [truth.token(at + n) if n < right else truth.token(at + n) + 1 for n in range(count)]

    def _admit(
        self, counts: dict[str, int], budget: int, news: list[Request], resumed: list[Request]
    ) -> bool:
        """Look at the requests that wait; whether one of them loads synchronously."""
        sync = False
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._mode.running:
                break
            if request.status == "loading" and not self._landed(request):
                continue
            if request.num_stale_tokens:
                continue
            answer = self._place(request, budget)
            if answer is None:
                break
            count, is_sync, parked = answer
            if parked:
                continue
            self.waiting.remove(request)
            self.running.append(request)
            (resumed if request.num_preemptions else news).append(request)
            request.status = "running"
            counts[request.request_id] = count
            budget -= count
            sync |= is_sync
        return sync

    def _place(self, request: Request, budget: int) -> tuple[int, bool, bool] | None:
        """Give a waiting request pages; (tokens of this step, sync load, parked), None: no room."""
        name, hit = request.request_id, None
        computed, extra, is_async = request.num_computed_tokens, 0, False
        if computed == 0:
            tables: tuple[list[int], ...] = tuple([] for _ in self._mode.groups)
            local = 0
            if not request.skip_reading_prefix_cache:
                tables, local = self.pool.prefix(self.truth[name], request.num_tokens)
            asked = self._ask(request, local)
            if asked is None:  # it asks for time, and is asked again in the next step
                return 0, False, True
            extra, is_async = asked
            computed, hit = local + extra, tables
            request.cached = local
        count = 0 if is_async else min(request.num_tokens - computed, budget)
        if not self.pool.allocate(name, computed, computed + count, hit):
            return None
        self._call("update_state_after_alloc", request, Blocks(self.pool.tables[name]), extra)
        request.offered = extra or request.offered
        if extra:
            self._call("hit_sources", request, extra, optional=True)
        request.num_computed_tokens = computed
        if is_async:
            request.status = "loading"
            return 0, False, True
        return count, bool(extra), False

    def _ask(self, request: Request, local: int) -> tuple[int, bool] | None:
        answer = self._call("get_num_new_matched_tokens", request, local)
        if answer == (None, False):
            return None
        if not isinstance(answer, tuple) or type(answer[0]) is not int or answer[0] < 0:
            raise Violation("bad-answer", f"get_num_new_matched_tokens answers {answer!r}")
        tokens, is_async = answer
        if request.skip_reading_prefix_cache:
            return 0, False
        if local + tokens > request.num_tokens:
            raise Violation(
                "offer-too-long", f"{tokens} tokens behind {local} of {request.num_tokens}"
            )
        if tokens and not is_async and local + tokens >= request.num_tokens:
            raise Violation("last-token", "a synchronous load leaves no token to compute")
        if tokens and not is_async and not self._mode.sync_loads:
            raise Violation("sync-load", "this engine loads asynchronously only")
        return tokens, bool(is_async and tokens)

    def _landed(self, request: Request) -> bool:
        """Whether a parked request's load is over; it then waits like others."""
        name = request.request_id
        if name not in self._arrived:
            return False
        self._arrived.discard(name)
        if name in self._failed:
            self._failed.discard(name)
            if not request.num_computed_tokens:
                self.pool.release(name)
        if request.num_computed_tokens:
            self.pool.remember(name, self.truth[name], request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = "preempted" if request.num_preemptions else "waiting"
        return True

    def _output(
        self,
        counts: dict[str, int],
        drafts: dict[str, list[int]],
        news: list[Request],
        resumed: list[Request],
        more: dict[str, tuple[list[int], ...]],
        sync: bool,
    ) -> StepOutput:
        tables = {n: tuple(list(t) for t in self.pool.tables[n]) for n in counts}
        cached = CachedRequests()
        for name in counts:
            request = self.requests[name]
            if request in news:
                continue
            cached.req_ids.append(name)
            whole = request in resumed
            if whole:
                cached.resumed_req_ids.add(name)
            grown = tables[name] if whole else more[name]
            cached.new_block_ids.append(grown if whole or any(grown) else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(
                request.num_output_tokens + request.num_output_placeholders
            )
        output = StepOutput(
            [
                NewRequest(
                    r.request_id,
                    r.prompt_token_ids,
                    tables[r.request_id],
                    r.num_computed_tokens,
                )
                for r in news
            ],
            cached,
            counts,
            drafts,
            self._finished,
            self._preempted,
            sync,
            BlockState(tables),
            starts={n: self.requests[n].num_computed_tokens for n in counts},
            fresh=self.pool.take_fresh(),
        )
        output.kv_connector_metadata = self._call("build_connector_meta", output)
        output.kv_connector_block_state = None
        self._finished, self._preempted = set(), set()
        for name, count in counts.items():
            self._count(name, count, len(drafts.get(name, ())))
        return output

    def _count(self, name: str, count: int, guessed: int) -> None:
        """Count a scheduled request's tokens as computed, ahead of time."""
        request = self.requests[name]
        request.num_computed_tokens += count
        request.num_in_flight_tokens += count
        known = request.num_tokens + request.num_output_placeholders
        sure = min(request.num_computed_tokens, request.num_tokens)
        self.pool.remember(name, self.truth[name], sure)
        if self._mode.overlap and request.num_computed_tokens >= known:
            request.num_output_placeholders += 1 + guessed
