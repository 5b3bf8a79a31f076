"""Scheduler sides that are wrong, each in one way."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm.mutant import Mutant
from tierkv.testing.trtllm.reference import (
    Item,
    Job,
    Meta,
    ReferenceScheduler,
    ReferenceWorker,
    State,
    Store,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SCHEDULERS"]


class IndexesMinusOne(ReferenceScheduler):
    """Takes page -1 for a page."""

    def items(self, state: State, pages: list[list[int]], first: int, stop: int) -> list[Item]:
        return [
            Item(state.keys[block], group, mine[block])
            for group, mine in enumerate(pages)
            for block in range(first, stop)
        ]


class MixesUpLoads(ReferenceScheduler):
    """Loads of one step get each other's blocks."""

    def build_connector_meta(self, output: Any) -> Meta:
        meta = super().build_connector_meta(output)
        whole = [job for job in meta.loads if job.items]
        for job, other in pairwise(whole):
            swapped = zip(job.items, other.items, strict=False)
            job.items = [Item(b.key, a.group, a.page) for a, b in swapped]
        return meta


class WaitsForMetadata(ReferenceWorker):
    """Begins to think about a request's saves when metadata tells of them."""

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        self.promised.update(saving)
        saved, loaded = super().get_finished([], loading)
        return saved, loaded

    def wait_for_save(self, stream: object) -> None:
        told = {job.id for job in self.meta.saves} & self.promised
        self.asked[0].update(told)
        super().wait_for_save(stream)

    def __init__(self, store: Store, rank: int, lag: int) -> None:
        super().__init__(store, rank, lag)
        self.promised: set[int] = set()


class PlansWhenFinished(ReferenceScheduler):
    """Saves a request when it is over, in the next step: which need not come."""

    def request_finished_by_layer_group(self, request: Any, pages: list[list[int]]) -> bool:
        state = self.requests.pop(request.request_id)
        items = self.items(state, pages, 0, len(state.keys))
        self.meta.saves.append(Job(request.request_id, items))
        return True

    def full(self, state: State, data: Any) -> int:
        return 0


class FreesEarly(ReferenceScheduler):
    """Lets go of pages that are being saved."""

    def request_finished_by_layer_group(self, request: Any, pages: list[list[int]]) -> bool:
        super().request_finished_by_layer_group(request, pages)
        return False


class SavesThePromptOnly(ReferenceScheduler):
    """Looks at requests when they are new."""

    def full(self, state: State, data: Any) -> int:
        return super().full(state, data) if data.computed_position < 21 else state.saved


class SavesAhead(ReferenceScheduler):
    """Takes known tokens for computed ones."""

    def full(self, state: State, data: Any) -> int:
        return len(state.tokens) // self.block


class NewRequestsOnly(ReferenceScheduler):
    """Never looks at ``cached_requests``."""

    def build_connector_meta(self, output: Any) -> Meta:
        if output is not None:
            output.cached_requests = []
        return super().build_connector_meta(output)


class NothingAsynchronously(ReferenceScheduler):
    """Offers nothing, asynchronously."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return super().get_num_new_matched_tokens(request, computed)[0], True


class OffersAll(ReferenceScheduler):
    """Leaves no token to compute."""

    def offer(self, state: State, tokens: Sequence[int], computed: int) -> int:
        first = computed // self.block
        return (self.held(state, first, len(tokens) // self.block) - first) * self.block


class OffersHalfBlocks(ReferenceScheduler):
    """Goes on in the middle of a block."""

    def offer(self, state: State, tokens: Sequence[int], computed: int) -> int:
        whole = super().offer(state, tokens, computed // self.block * self.block)
        return max(0, whole - computed % self.block)


class OffersWhatIsComputed(ReferenceScheduler):
    """Counts from the beginning of the prompt."""

    def offer(self, state: State, tokens: Sequence[int], computed: int) -> int:
        count = super().offer(state, tokens, computed)
        return count + computed if count else 0


class OffersMore(ReferenceScheduler):
    """Believes that one more block is there."""

    def held(self, state: State, first: int, limit: int) -> int:
        stop = super().held(state, first, limit)
        return min(limit, stop + 1) if stop > first else stop


class NoSalt(ReferenceScheduler):
    """Shares across salts."""

    def root(self, request: Any) -> bytes:
        return repr((request.lora_task_id, self.media(request))).encode()


class NoAdapter(ReferenceScheduler):
    """Shares across LoRA adapters."""

    def root(self, request: Any) -> bytes:
        return repr(self.media(request)).encode()


class NoMedia(ReferenceScheduler):
    """Shares across pictures."""

    def media(self, request: Any) -> object:
        return request.multimodal_positions


class ReadsAFile(ReferenceScheduler):
    """Looks on a disk, or asks a thread, while the engine's tree is locked."""

    def offer(self, state: State, tokens: Sequence[int], computed: int) -> int:
        os.stat("/")
        threading.Event().wait(0)
        return super().offer(state, tokens, computed)


class HashesAnew(ReferenceScheduler):
    """Hashes the whole prefix of every block."""

    def extend(self, state: State, tokens: Sequence[int]) -> None:
        for stop in range(0, len(tokens), self.block):
            state.keys = []
            super().extend(state, tokens[: stop + self.block])


class OldSignature(ReferenceScheduler):
    """Wants to know more than the engine tells."""

    def cancel_load(self, request: Any, start: int, end: int, reason: Any) -> None:  # type: ignore[override]
        super().cancel_load(request, start, end)


class LambdaInMeta(ReferenceScheduler):
    """Gives the ranks something to call."""

    def build_connector_meta(self, output: Any) -> Meta:
        meta = super().build_connector_meta(output)
        for job in meta.loads:
            job.asynchronous = lambda: True  # type: ignore[assignment]
        return meta


class RaisesOnNone(ReferenceScheduler):
    """Expects an output in every step."""

    def build_connector_meta(self, output: Any) -> Meta:
        assert output.new_requests is not None
        return super().build_connector_meta(output)


class IgnoresCancel(ReferenceScheduler):
    """Loads what it offered, whatever the engine took of it."""

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        return


class KeepsAfterReset(ReferenceScheduler):
    """Loads into the pages that the request had."""

    def request_reset(self, request: Any) -> None:
        return

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        return


class KeepsTokens(ReferenceScheduler):
    """Takes a request that begins anew for one that goes on."""

    def begin(self, data: Any) -> None:
        state = self.requests[data.request_id]
        before = self.known.get(data.request_id, [])
        state.tokens, state.loading = list(before), False
        self.known[data.request_id] = state.tokens

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known: dict[int, list[int]] = {}


class ForgetsLoads(ReferenceScheduler):
    """Knows of saves only when a request is over."""

    def request_finished_by_layer_group(self, request: Any, pages: list[list[int]]) -> bool:
        state = self.requests.pop(request.request_id, None)
        return state is not None and state.issued


SCHEDULERS: list[Mutant] = [
    Mutant(
        "page-minus-one",
        IndexesMinusOne,
        "test_pages_that_are_not_there",
        "last-page-written",
    ),
    Mutant("mixes-up-loads", MixesUpLoads, "test_loads_in_one_step", "load-incomplete"),
    Mutant(
        "plans-when-finished",
        PlansWhenFinished,
        "test_idle_engines_finish_saves",
        "never-finished",
        worker=WaitsForMetadata,
    ),
    Mutant(
        "frees-before-saved",
        FreesEarly,
        "test_pages_are_held_while_saved",
        "load-incomplete",
    ),
    Mutant(
        "saves-the-prompt-only",
        SavesThePromptOnly,
        "test_decoded_blocks_are_saved",
        None,
    ),
    Mutant(
        "saves-ahead",
        SavesAhead,
        "test_only_what_is_computed_is_saved",
        "load-incomplete",
        lag=0,
    ),
    Mutant("new-requests-only", NewRequestsOnly, "test_pages_that_come_later", None),
    Mutant(
        "nothing-asynchronously",
        NothingAsynchronously,
        "test_nothing_is_not_loaded_asynchronously",
        "offer-shape",
    ),
    Mutant("offers-all", OffersAll, "test_one_token_is_left", "offer-too-long"),
    Mutant(
        "offers-half-blocks",
        OffersHalfBlocks,
        "test_offers_are_whole_blocks",
        "offer-partial",
    ),
    Mutant(
        "offers-what-is-computed",
        OffersWhatIsComputed,
        "test_offers_are_behind_what_is_computed",
        "offer-too-long",
    ),
    Mutant(
        "offers-what-is-not-there",
        OffersMore,
        "test_offers_are_there",
        "load-incomplete",
    ),
    Mutant("no-salt", NoSalt, "test_salts_are_kept_apart", "load-incomplete"),
    Mutant("no-adapter", NoAdapter, "test_adapters_are_kept_apart", "load-incomplete"),
    Mutant("no-media", NoMedia, "test_media_are_kept_apart", "load-incomplete"),
    Mutant("reads-a-file", ReadsAFile, "test_matching_does_no_io", "io-in-match"),
    Mutant("hashes-anew", HashesAnew, "test_matching_is_cheap", "match-cost"),
    Mutant("old-signature", OldSignature, "test_signatures", None),
    Mutant("lambda-in-meta", LambdaInMeta, "test_metadata_is_pickled", "meta-pickle"),
    Mutant(
        "raises-on-none",
        RaisesOnNone,
        "test_hooks_tolerate_what_may_come",
        "hook-raised",
    ),
    Mutant("ignores-cancel", IgnoresCancel, "test_cancelled_loads", "hook-raised"),
    Mutant("keeps-after-reset", KeepsAfterReset, "test_resets", "kv-wrong"),
    Mutant("keeps-after-preemption", KeepsTokens, "test_preemption", None),
    Mutant(
        "forgets-aborted-loads",
        ForgetsLoads,
        "test_requests_are_given_up_while_they_load",
        "free-written",
    ),
]
