"""Broken connectors, each of which a replay catches: the reference with one mistake each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.testing.serving.objects import GroupSpec, Mode, TransferResults, Violation
from tierkv.testing.serving.reference import (
    Copy,
    ReferenceScheduler,
    ReferenceWorker,
    Step,
    make_reference,
)
from tierkv.testing.serving.replay import Replay
from tierkv.testing.serving.storms import Storm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.testing.serving.content import Memory
    from tierkv.testing.serving.objects import Request, StepOutput

__all__ = ["MUTANTS", "Mutant"]


class _ReportsEarly(ReferenceWorker):
    def start_load_kv(self, context: Any) -> None:
        super().start_load_kv(context)
        self._done |= {copy.request for copy in self._step.loads}

    def load(self, copy: Copy) -> None:
        super().load(copy)
        self._done.discard(copy.request)


class _ForgetsLoad(ReferenceWorker):
    def load(self, copy: Copy) -> None:
        self._done.add(copy.request)


class _NoFence(ReferenceWorker):
    def handle_preemptions(self, step: Step) -> None:
        pass


class _WrongGroup(ReferenceWorker):
    def load(self, copy: Copy) -> None:
        last = len(self._pools) - 1
        super().load(Copy(copy.request, tuple((last - g, k, page) for g, k, page in copy.pages)))


class _SavesBeforeForward(ReferenceWorker):
    def bind_connector_metadata(self, step: Step) -> None:
        super().bind_connector_metadata(step)
        for copy in step.saves:
            self.save(copy)

    def wait_for_save(self) -> None:
        pass


class _Twice(ReferenceWorker):
    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        again: set[str] = getattr(self, "_again", set())
        results = super().get_transfer_results(finished)
        self._again = set(results.finished_recving)
        results.finished_recving |= again
        return results


class _Foreign(ReferenceWorker):
    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        results = super().get_transfer_results(finished)
        results.finished_recving = {f"{name}-0" for name in results.finished_recving}
        return results


class _ForgetsAborted(ReferenceWorker):
    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        self._loads = [one for one in self._loads if one[1].request not in finished]
        return super().get_transfer_results(finished)


class _HidesFailures(ReferenceWorker):
    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        results = super().get_transfer_results(finished)
        results.failed_recving = set()
        return results


class _PagesOfGroups(ReferenceWorker):
    def get_block_ids_with_load_errors(self) -> set[int]:
        return {page for copy in self._step.loads for _, _, page in copy.pages}


class _RaisesOnStep(ReferenceWorker):
    def wait_for_save(self) -> None:
        raise OSError("the disk is full")


class _ForgetsSalt(ReferenceScheduler):
    def root(self, request: Request) -> bytes:
        return repr(request.lora_request).encode()


class _ForgetsLora(ReferenceScheduler):
    def root(self, request: Request) -> bytes:
        return repr(request.cache_salt).encode()


class _ForgetsMedia(ReferenceScheduler):
    def keys(self, request: Request, tokens: int) -> list[bytes]:
        features, request.mm_features = request.mm_features, []
        try:
            return super().keys(request, tokens)
        finally:
            request.mm_features = features


class _LastToken(ReferenceScheduler):
    asynchronous = False

    def limit(self, request: Request) -> int:
        return request.num_tokens


class _CountsFromZero(ReferenceScheduler):
    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        tokens, is_async = super().get_num_new_matched_tokens(request, computed)
        return (tokens + computed if tokens else 0), is_async


class _OldPages(ReferenceScheduler):
    """Appends a resumed request's pages to those that it lost."""

    def build_connector_meta(self, output: StepOutput) -> Step:
        mine: dict[str, list[list[int]]] = self.__dict__.setdefault("_mine", {})
        for new in output.scheduled_new_reqs:
            mine[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, pages in zip(mine[name], more or (), strict=False):
                table.extend(pages)
        return super().build_connector_meta(output)

    def pages(
        self, request: Request, tables: Sequence[Sequence[int]], start: int, stop: int
    ) -> tuple[tuple[int, bytes, int], ...]:
        mine = self.__dict__.get("_mine", {}).get(request.request_id)
        return super().pages(request, mine or tables, start, stop)


class _DiesOfAbort(ReferenceScheduler):
    def request_finished(self, request: Request, tables: Any) -> tuple[bool, None]:
        del self._saved[request.request_id]
        return super().request_finished(request, tables)


class _NeverFrees(ReferenceScheduler):
    def request_finished(self, request: Request, tables: Any) -> tuple[bool, None]:
        super().request_finished(request, tables)
        return True, None


class _NoWindow(ReferenceScheduler):
    """Brings of a window's pages only that of the last token."""

    def update_state_after_alloc(self, request: Request, blocks: Any, tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, tokens)
        if tokens:
            last = self._step.loads.pop()
            end = self.keys(request, self._computed[last.request] + tokens)[-1]
            pages = tuple(one for one in last.pages if not one[0] or one[1] == end)
            self._step.loads.append(Copy(last.request, pages))


class _LastTokenOfWindow(ReferenceScheduler):
    def limit(self, request: Request) -> int:
        return request.num_tokens


class _Unpicklable(ReferenceScheduler):
    def build_connector_meta(self, output: StepOutput) -> Step:
        step = super().build_connector_meta(output)
        step.__dict__["requests"] = (request for request in self._requests)
        return step


_SMALL = Mode(pages=96, chunk=24)
_TIGHT = Mode(pages=40, chunk=24)
_HYBRID = Mode(groups=(GroupSpec(), GroupSpec(window=9)), pages=160, chunk=24)


@dataclass(frozen=True)
class Mutant:
    """A broken connector and where its mistake shows.

    Attributes:
        name: What is wrong with it.
        kinds: Kinds of violations that it may be caught by.
        scheduler: Its scheduler side.
        worker: Its worker sides.
        mode: How the engine runs.
        lag: Steps that its copies take.
        losses: Share of loads before which a page is lost.
    """

    name: str
    kinds: frozenset[str]
    scheduler: type[ReferenceScheduler] = ReferenceScheduler
    worker: type[ReferenceWorker] = ReferenceWorker
    mode: Mode = _SMALL
    lag: int = 0
    losses: float = 0.0

    def hunt(self, seeds: int = 8, requests: int = 60, *, mended: bool = False) -> Violation | None:
        """Run storms until it is caught.

        Args:
            seeds: Storms at most.
            requests: Requests of each.
            mended: Run the reference in its place, which must get through.

        Returns:
            What it was caught by; None: it got through.
        """
        scheduler = ReferenceScheduler if mended else self.scheduler
        worker = ReferenceWorker if mended else self.worker

        def make(
            memories: Sequence[Memory],
        ) -> tuple[ReferenceScheduler, list[ReferenceWorker]]:
            return make_reference(
                self.mode,
                memories,
                lag=self.lag,
                losses=self.losses,
                scheduler=scheduler,
                worker=worker,
            )

        for seed in range(seeds):
            replay = Replay(self.mode, make, idle=lambda: None, patience=200)
            try:
                Storm(replay, seed).run(requests)
            except Violation as violation:
                return violation
        return None


def _mutant(name: str, *kinds: str, **how: Any) -> Mutant:
    return Mutant(name, frozenset(kinds), **how)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("load reported early", "wrong-kv", worker=_ReportsEarly, lag=2),
    _mutant("load forgotten", "wrong-kv", worker=_ForgetsLoad),
    _mutant("saves read pages after reuse", "wrong-kv", worker=_NoFence, mode=_TIGHT, lag=4),
    _mutant("pages of another group", "wrong-kv", worker=_WrongGroup, mode=_HYBRID),
    _mutant("saves before the forward pass", "wrong-kv", worker=_SavesBeforeForward),
    _mutant("load reported twice", "twice", "unknown-id", worker=_Twice),
    _mutant("load of another request reported", "unknown-id", worker=_Foreign),
    _mutant("load of an aborted request not reported", "hang", worker=_ForgetsAborted, lag=3),
    _mutant("failed load reported as good", "wrong-kv", worker=_HidesFailures, losses=0.5),
    _mutant(
        "invalid pages of several groups", "invalid-pages", worker=_PagesOfGroups, mode=_HYBRID
    ),
    _mutant("exception out of a worker", "raised", worker=_RaisesOnStep),
    _mutant("salt forgotten", "wrong-kv", scheduler=_ForgetsSalt),
    _mutant("adapter forgotten", "wrong-kv", scheduler=_ForgetsLora),
    _mutant("media forgotten", "wrong-kv", scheduler=_ForgetsMedia),
    _mutant("last token offered synchronously", "last-token", scheduler=_LastToken),
    _mutant("offer counted from token 0", "offer-too-long", "wrong-kv", scheduler=_CountsFromZero),
    _mutant("pages from before a preemption", "wrong-kv", scheduler=_OldPages, mode=_TIGHT),
    _mutant("dies of an abort", "raised", scheduler=_DiesOfAbort),
    _mutant("keeps pages for ever", "hang", "leak", scheduler=_NeverFrees),
    _mutant("window cut short", "wrong-kv", scheduler=_NoWindow, mode=_HYBRID),
    _mutant(
        "whole prompt where a window needs more",
        "wrong-kv",
        scheduler=_LastTokenOfWindow,
        mode=_HYBRID,
    ),
    _mutant("metadata that cannot travel", "raised", scheduler=_Unpicklable),
)
"""Each with what it must be caught by."""
