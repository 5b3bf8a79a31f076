"""Batches of a store: consecutive parts, and their way through one tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierkv.chains import RAW
from tierkv.decisions.types import SkipReason
from tierkv.frame import page_round
from tierkv.mover.core import SLICE_BYTES
from tierkv.mover.plans import PartOutcome
from tierkv.mover.reserving import host_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.mover.core import Core
    from tierkv.mover.gathering import Gather
    from tierkv.mover.levels import Level
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.mover.writing import Writing
    from tierkv.workers import Job

__all__ = ["Begun", "Passage", "Run", "batch_bytes", "batches", "staged_bytes"]

_BATCH_PARTS = 128
_HEADERS_BYTES = _BATCH_PARTS * 8192
"""What headers may add to a slice: 32 frames of 1 MiB go together."""
_RAM_BYTES = 256 * 1024 * 1024
_RAM_SHARE = 8
"""Into RAM so much goes in one batch, but beyond a slice no more than this part of the tier: a
batch cannot evict what it brings itself."""
_SPLIT_BYTES = 4 * 1024 * 1024
"""A store of less than this travels as one batch, and one of more in batches of no less than a
quarter of it: below, what a call costs outweighs what overlapping saves."""
_SPLIT_PARTS = 16
"""A larger one is cut into so many: filling and draining the stages then costs about 1/16 each."""


class Run:
    """Consecutive parts of one plan that travel together, and what became of them."""

    __slots__ = ("left", "outcomes", "parts", "plan")

    def __init__(self, plan: StorePlan) -> None:
        self.plan = plan
        self.parts: list[NewPart] = []
        self.outcomes: list[PartOutcome] = []
        self.left: list[int] = []

    def start(self) -> None:
        """Everything is left to do."""
        self.outcomes = [PartOutcome(False, SkipReason.FULL)] * len(self.parts)
        self.left = list(range(len(self.parts)))

    def note(self, got: Sequence[PartOutcome]) -> None:
        """Take what became of the parts that were left."""
        for index, outcome in zip(self.left, got, strict=True):
            self.outcomes[index] = outcome

    def busy(self) -> list[NewPart]:
        """Parts that somebody else is storing right now."""
        return [self.parts[i] for i in self.left if self.outcomes[i].skip is SkipReason.IN_FLIGHT]

    def keep(self, reasons: Sequence[SkipReason]) -> None:
        """Leave what was skipped for one of these reasons."""
        self.left = [i for i in range(len(self.parts)) if self.outcomes[i].skip in reasons]

    def orphan(self) -> NewPart | None:
        """The first part that is left, if it was skipped for its parent's sake.

        Its parent is of another batch, then, and there may be a copy of it by now.
        """
        first = self.left[0] if self.left else -1
        lonely = first >= 0 and self.outcomes[first].skip is SkipReason.NO_PARENT
        return self.parts[first] if lonely else None


class Passage:
    """One batch on its way through one tier.

    Attributes:
        level: The tier.
        batch: What is stored.
        works: What has room there.
        unfilled: Those whose frames are built only once the copies are there.
        gathers: Copies of devices that may be under way.
        job: What writes it to a medium.
    """

    __slots__ = ("batch", "gathers", "job", "level", "unfilled", "works")

    def __init__(self, level: Level, batch: Sequence[Run]) -> None:
        self.level = level
        self.batch = batch
        self.works: list[tuple[Run, Writing]] = []
        self.unfilled: list[Writing] = []
        self.gathers: list[Gather] = []
        self.job: Job[None] | None = None

    @property
    def writings(self) -> list[Writing]:
        """What has room in the tier."""
        return [work for _, work in self.works]

    @property
    def smooth(self) -> bool:
        """Whether each part is there or has room."""
        return all(outcome.skip is None for _, work in self.works for outcome in work.outcomes)


class Begun(NamedTuple):
    """Parts whose frames are filled by copies that were submitted already, in the first tier.

    Attributes:
        parts: The parts, in order.
        work: Their way there.
        gathers: The copies.
    """

    parts: Sequence[NewPart]
    work: Writing
    gathers: list[Gather]


def batch_bytes(core: Core, plans: Sequence[StorePlan]) -> int:
    """Most bytes of one batch of a store, headers included."""
    level, total = core.levels[0], sum(plan.nbytes for plan in plans)
    most = min(SLICE_BYTES, core.window_bytes)
    if level.memory is not None and all(map(host_memory, plans)):
        # one stage: there is nothing to overlap, and without a codec nothing is staged; a thread
        # that fills frames stops between two of them for a caller that is cancelled
        share = min(_RAM_BYTES, core.decisions.capacity(level.index) // _RAM_SHARE)
        return max(SLICE_BYTES + _HEADERS_BYTES, share) if level.chain == RAW else most
    if total < _SPLIT_BYTES:
        return most
    # what is gathered, sealed and written at once fits a share of the staging window
    return max(
        1, min(most, core.staging.limit // 16, max(_SPLIT_BYTES // 4, total // _SPLIT_PARTS))
    )


def batches(core: Core, plans: Sequence[StorePlan], limit: int) -> Iterator[list[Run]]:
    """Cut chains into batches whose frames take at most ``limit`` bytes, or of one part."""
    batch: list[Run] = []
    size = count = 0
    for plan in plans:
        run = Run(plan)
        known: dict[tuple[int, int], int] = {}  # by group and tokens: most are alike
        for new in plan.parts:
            kind = new.group, new.tokens
            nbytes = known[kind] if kind in known else staged_bytes(core, plan, new)
            known[kind] = nbytes
            if count and (size + nbytes > limit or count == _BATCH_PARTS):
                yield [*batch, run] if run.parts else batch
                batch, run, size, count = [], Run(plan), 0, 0
            run.parts.append(new)
            size += nbytes
            count += 1
        if run.parts:
            batch.append(run)
    if batch:
        yield batch


def staged_bytes(core: Core, plan: StorePlan, new: NewPart) -> int:
    """Most bytes that the frame of a part takes while it is on its way into the first tier."""
    return page_round(core.pipeline(plan.space, core.levels[0]).max_bytes(new.group, new.tokens))
