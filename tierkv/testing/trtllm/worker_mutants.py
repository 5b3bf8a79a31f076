"""Rank sides that are wrong, each in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.testing.trtllm.mutant import Mutant
from tierkv.testing.trtllm.reference import Item, Job, ReferenceWorker, Store

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["WORKERS"]


class LoadsNothing(ReferenceWorker):
    """Says that loads are over, and forgets to do them."""

    def load(self, job: Job) -> None:
        return


class ReportsLoadsEarly(ReferenceWorker):
    """Says that a load is over once it has begun."""

    def over(self, kind: int, busy: Iterable[int]) -> list[int]:
        return super().over(kind, [] if kind == 1 else busy)


class ReportsSavesEarly(ReferenceWorker):
    """Says that a save is over once it has begun."""

    def over(self, kind: int, busy: Iterable[int]) -> list[int]:
        return super().over(kind, [] if kind == 0 else busy)


class RankZeroForAll(ReferenceWorker):
    """Loads what rank 0 stored."""

    def load(self, job: Job) -> None:
        rank, self.rank = self.rank, 0
        super().load(job)
        self.rank = rank


class OneKeyForAllGroups(ReferenceWorker):
    """Stores a block's layer groups in one place."""

    def load(self, job: Job) -> None:
        for item in job.items:
            data = self.store.get(self.rank, Item(item.key, 0, item.page))
            if data is not None:
                self.write(item, data)


class ForeignId(ReferenceWorker):
    """Returns an id of its own making."""

    def over(self, kind: int, busy: Iterable[int]) -> list[int]:
        return [number + 1000 for number in super().over(kind, busy)]


class IdTwice(ReferenceWorker):
    """Returns an id in the poll after, too."""

    last: tuple[list[int], list[int]] = ([], [])

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        saved, loaded = super().get_finished(saving, loading)
        before, self.last = self.last, (saved, loaded)
        return saved + before[0], loaded + before[1]


class NoFence(ReferenceWorker):
    """Goes on reading pages that were given to others."""

    def fence(self, taken: set[tuple[int, int]]) -> None:
        return


class SavesInLayerHooks(ReferenceWorker):
    """Begins saves when the last layer has run, if Python hears of it."""

    def save_kv_layer(self, layer: int, stream: object) -> None:
        if layer == 3:
            super().wait_for_save(stream)

    def wait_for_save(self, stream: object) -> None:
        return


class DropsSaves(ReferenceWorker):
    """Takes the end of a request for the end of its saves."""

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        self.saves = [job for job in self.saves if job.id not in saving]
        return super().get_finished(saving, loading)


class NeverLetsGo(ReferenceWorker):
    """Holds the pages of a request that loaded for ever."""

    def get_finished(self, saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        self.loaded.update(loading)
        return super().get_finished([n for n in saving if n not in self.loaded], loading)

    def __init__(self, store: Store, rank: int, lag: int) -> None:
        super().__init__(store, rank, lag)
        self.loaded: set[int] = set()


class OnceInAWhile(ReferenceWorker):
    """Copies the wrong page, once in a while."""

    copies = 0

    def write(self, item: Item, data: object) -> None:
        self.copies += 1
        page = item.page ^ 1 if self.copies % 13 == 0 else item.page
        super().write(item._replace(page=page), data)  # type: ignore[arg-type]


WORKERS: list[Mutant] = [
    Mutant("loads-nothing", LoadsNothing, "test_round_trip", "load-incomplete"),
    Mutant(
        "load-reported-early",
        ReportsLoadsEarly,
        "test_loads_are_over_when_reported",
        "load-incomplete",
    ),
    Mutant("rank-0-for-all", RankZeroForAll, "test_ranks_keep_their_own", "load-incomplete"),
    Mutant(
        "one-key-for-all-groups",
        OneKeyForAllGroups,
        "test_layer_groups_are_kept_apart",
        "load-incomplete",
    ),
    Mutant("foreign-id", ForeignId, "test_ids_are_those_that_were_given", "id-foreign"),
    Mutant("id-twice", IdTwice, "test_ids_come_back_once", "id-repeated"),
    Mutant(
        "save-reported-early",
        ReportsSavesEarly,
        "test_saves_are_over_when_reported",
        "load-incomplete",
    ),
    Mutant(
        "saves-after-reuse",
        NoFence,
        "test_pages_that_a_window_left",
        "load-incomplete",
        lag=9,
    ),
    Mutant("drops-saves", DropsSaves, "test_the_model_ends_by_itself", None),
    Mutant("saves-in-layer-hooks", SavesInLayerHooks, "test_cuda_graphs", None),
    Mutant(
        "never-lets-go",
        NeverLetsGo,
        "test_requests_are_given_up_at_any_time",
        "never-finished",
    ),
    Mutant("once-in-a-while", OnceInAWhile, "test_random_schedules", "load-incomplete"),
]
