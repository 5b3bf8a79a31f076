"""The connector's scheduler side: vLLM's calls, put to the planner and answered from memory.

Runs on the thread of vLLM's scheduler: no call waits, does I/O or a system call, or raises. It
imports nothing of vLLM and looks at its objects, so that the same code serves several versions and
is tested by replaying vLLM's order of calls without it (:mod:`tierkv.testing.serving`).

Loads are always asynchronous: a synchronous one has to leave a token to compute and so recomputes
a whole block, and vLLM hashes its pages before their bytes are there. A prompt that is there whole
is offered whole; vLLM itself computes its last token again.

What counts as computed: vLLM counts ahead of what is certain, by draft tokens that may be rejected
and by tokens that the step before is still computing. Tokens whose ids are known
(``request.num_tokens``) and scheduled by the end of this step are certain; nothing else is saved.

*Cost*, measured (CPython 3.11, x86-64, CPU time, blocks of 64 tokens): a waiting request asked
again 5 us and 0.08 us for each block and rank of its match; a new prompt 2.5 us for each block and
rank that is hashed, which ends at the first slice of blocks that nobody holds (1 ms for 64,000
tokens that nobody holds, most of it for copying the token ids); a running request 2.6 us a step,
9 us in a step that fills a block.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tierkv.decisions.types import GroupRule
from tierkv.layout import GroupKind
from tierkv_adapters.serving.negative import NegativeCache
from tierkv_adapters.serving.orders import StepOrders
from tierkv_adapters.serving.planner import Planner
from tierkv_adapters.serving.replicas import ReplicaIndex
from tierkv_adapters.vllm.scheduling.announcing import Announcer, announcer_of
from tierkv_adapters.vllm.scheduling.intake import Intake
from tierkv_adapters.vllm.scheduling.links import connect
from tierkv_adapters.vllm.scheduling.pacing import Pacing
from tierkv_adapters.vllm.scheduling.ranks import agreed_groups, spaces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.blocks import AdapterId
    from tierkv_adapters.serving.settings import ServingSettings
    from tierkv_adapters.vllm.scheduling.links import Link

__all__ = ["SchedulerSide"]


class SchedulerSide(Intake):
    """Answers vLLM's scheduler; called by one thread.

    Until :meth:`started` told what ranks there are, nothing is offered or saved.

    Args:
        vllm_config: vLLM's configuration (read: whether steps overlap, how media are named).
        kv_cache_config: vLLM's page groups.
        settings: The adapter's settings.
        clock: Tells the time in seconds.
        digest: Reads a LoRA adapter's files, in a thread of its own; default: :func:`adapter_id`.
        link: Connects to a rank: what it holds, and its reset.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: ServingSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        digest: Callable[[Any], AdapterId] | None = None,
        link: Callable[[int, Mapping[str, Any], ReplicaIndex], Link] = connect,
    ) -> None:
        super().__init__(kv_cache_config, settings, digest, vllm_config)
        self._clock = clock
        self._link = link
        self._places: dict[str, int] = {}  # tokens in place, of loads some rank reported
        self._anew: set[str] = set()  # loads that vLLM computes again as a whole
        self._links: list[Link] = []
        self._negative = NegativeCache(settings.retry_after)
        overlap = getattr(vllm_config, "scheduler_config", None)
        self._pacing = Pacing(2 if getattr(overlap, "async_scheduling", False) else 1)
        self._vllm = vllm_config
        self._announcer: Announcer | None = None
        self._tiers: tuple[str, ...] = ()

    # ------------------------------------------------------------------ start and end

    def started(self, handshakes: Mapping[int, Mapping[str, Any]]) -> None:
        """Hear what the ranks are, before requests come; waits a bounded time for their feeds.

        Args:
            handshakes: By rank number from 0, what each rank tells of itself: ``identity``,
                ``layout``, ``block_tokens``, ``groups``, ``socket``, ``pid``.

        Raises:
            ConfigError: if ranks do not agree on blocks and groups.
        """
        ranks = [handshakes[number] for number in sorted(handshakes)]
        if not ranks:
            return
        groups = agreed_groups(ranks)
        rules = tuple(GroupRule(GroupKind(kind), window) for kind, window, _ in groups)
        tiers = [kind for _, kind in ranks[0].get("tiers", ())]
        self._tiers = tuple(name for name, _ in ranks[0].get("tiers", ()))
        announcer = self._announcer = announcer_of(self._vllm, len(rules), tiers)
        index = announcer.index(len(ranks)) if announcer else ReplicaIndex(len(ranks))
        self._tables.learn(groups)
        self._planner = Planner(
            spaces_of(ranks),
            rules,
            index,
            self._negative,
            self._settings,
            page_tokens=[page for _, _, page in groups],
        )
        self._links = [self._link(number, rank, index) for number, rank in enumerate(ranks)]

    def close(self) -> None:
        """Let go of the ranks. Idempotent."""
        links, self._links = self._links, []
        for link in links:
            link.close()
        self._fingerprints.close()

    def reset_cache(self) -> bool:
        """Empty every rank's tiers; what is on its way is stopped by the ranks.

        The one call that waits: an operator asks for it, and on return nothing old is found. It
        may be because other weights were put in place, which changes no file that they are known
        by: what is computed from now on is found by this run of vLLM alone, and what requests of
        now compute is not stored at all.

        Returns:
            Whether all ranks did.
        """
        self._begin_era()
        if self._planner is not None:
            self._planner.renew()
        done = [link.reset() for link in self._links]
        return all(done)

    # ------------------------------------------------------------------ requests that wait

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens behind those computed can be loaded; True: asynchronously."""
        live = self._admitted(request)
        planner = self._planner
        if live is None or planner is None:
            return 0, False
        live.account.asked(request, num_computed_tokens)
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if not live.admitted:  # None: vLLM asks again in its next step
            return (None if self._fingerprints.waits(request, self._clock()) else 0), False
        if not self._fits(live):
            return 0, False
        known = planner.known(request.request_id) or 0
        if known < request.num_tokens:
            planner.learn(request.request_id, request.all_token_ids[known:])
        tokens = planner.offer(
            request.request_id,
            num_computed_tokens,
            self._clock(),
            leave=self._tables.leave(request),
        )
        return tokens, tokens > 0

    def hit_sources(self, request: Any, num_tokens: int) -> dict[int, int]:
        """Where the tokens of an accepted offer come from: bit of the slowest tier -> tokens."""
        bit = self._planner.source(request.request_id) if self._planner is not None else 0
        return {bit: num_tokens} if num_tokens > 0 else {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """VLLM allocated pages: for a load if ``num_external_tokens`` are taken, else nothing."""
        if num_external_tokens > 0 and self._planner is not None:
            pages = self._tables.pages(blocks.get_block_ids())
            live = self._live.get(request.request_id)
            if live is not None:
                bit = self._planner.source(request.request_id)
                live.account.accepted(request, num_external_tokens, bit)
            self._planner.accept(request.request_id, pages, num_external_tokens)

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Plan the saves of a step, and hand over everything planned for it."""
        planner = self._planner
        if planner is None:
            return StepOrders()
        for name in scheduler_output.finished_req_ids:
            self._over(name)
        for name in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if (live := self._live.get(name)) is not None:
                self._catch_up(live)
        planner.taken(self._tables.copied(scheduler_output))
        counts = scheduler_output.num_scheduled_tokens
        prefill = 0
        for new in scheduler_output.scheduled_new_reqs:
            count = counts.get(new.req_id, 0)
            prefill += count
            self._advance(
                scheduler_output, new.req_id, new.block_ids, new.num_computed_tokens, True
            )
        cached = scheduler_output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            resumed = name in cached.resumed_req_ids
            if cached.num_output_tokens[place] == 0 or resumed:
                prefill += counts.get(name, 0)
            self._advance(
                scheduler_output,
                name,
                cached.new_block_ids[place],
                cached.num_computed_tokens[place],
                resumed,
            )
        speed = self._pacing.step(prefill, sum(counts.values()), self._clock())
        orders = planner.step(speed)
        orders.hints, orders.requests = self._hinting.take(), planner.counters.requests
        return orders

    def _advance(self, output: Any, name: str, blocks: Any, had: int, whole: bool) -> None:
        """Tell the planner of one scheduled request; ``whole``: ``blocks`` are all its pages."""
        planner, live = self._planner, self._live.get(name)
        if planner is None:
            return
        pages = self._tables.pages(blocks)
        late = live is not None and not live.admitted and not whole
        table = self._tables.table(output, name) if late else None
        if table is not None:  # it becomes known only now: with the pages that it got before
            pages, whole = table, True
        lost = live is None or (late and table is None) or self._admitted(live.request) is None
        if live is None or lost or not self._fits(live):
            planner.advance(name, tokens=(), pages=pages, computed=0, replace=whole, kept=had)
            return
        request = live.request
        self._tables.note(output, name, had)
        computed = min(had + output.num_scheduled_tokens.get(name, 0), request.num_tokens)
        tokens: Sequence[int] = ()
        if planner.due(name, computed):
            known = planner.known(name) or 0
            tokens = request.all_token_ids[known:computed] if known < computed else ()
            table = self._tables.table(output, name) if self._tables.drops else None
            if table is not None:  # pages that left a window were given away without notice
                planner.taken(pages, replace=whole, kept=had)
                pages, whole = self._tables.sure(name, table), True
            elif self._tables.states:  # which page holds which state, nobody tells
                computed, tokens = 0, ()
        saved = planner.advance(
            name, tokens=tokens, pages=pages, computed=computed, replace=whole, kept=had
        )
        if saved is not None and self._announcer is not None:
            self._announcer.saved(request, planner.names(name, *saved), *saved)

    def update_connector_output(self, output: Any) -> None:
        """Hear what ranks report of a step's loads; a load is over when all of them did."""
        planner, now = self._planner, self._clock()
        self._pacing.done(now)
        if planner is None:
            return
        meta = getattr(output, "kv_connector_worker_meta", None)
        for name, (place, reason) in getattr(meta, "loads", {}).items():
            self._places[name] = min(place, self._places.get(name, place))
            if reason is not None and name in self._live:  # else it was given up
                self._limited.warning("load fell short", f"request {name}: {reason}")
        self._anew |= getattr(output, "failed_recving", None) or set()
        for name in getattr(output, "finished_recving", None) or ():
            anew = name in self._anew
            self._anew.discard(name)
            place = self._places.pop(name, 0 if anew else None)
            if place is None:
                planner.loaded(name)
            else:
                live = self._live.get(name)
                if live is not None:
                    live.account.short(0 if anew else place)
                planner.failed(name, place, now, anew=anew)

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over. Its pages are vLLM's at once: saves are fenced by the ranks."""
        live = self._live.get(request.request_id)
        self._over(request.request_id)
        if live is None or live.asked is None or not live.asked.report:
            return False, None
        return False, {"tierkv": live.account.told(self._tiers)}

    def take_events(self) -> list[Any]:
        """KV events since the last call (:mod:`tierkv_adapters.vllm.events`), if they are on."""
        return [] if self._announcer is None else self._announcer.take()

    def stats(self) -> dict[str, int]:
        """Counts of the scheduler's side so far, by name."""
        counted = {
            "malformed": self.malformed,
            "hints_unknown": self._hinting.unknown,
            "hints_unreadable": self._hinting.unreadable,
        }
        if self._planner is not None:
            counts = self._planner.counters
            counted |= {name: getattr(counts, name) for name in counts.__slots__}
        return counted
