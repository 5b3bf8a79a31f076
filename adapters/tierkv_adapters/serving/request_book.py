"""The requests that a rank was told of: what each has, and whose the pages are."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING

from tierkv_adapters.serving.jobs import RequestState
from tierkv_adapters.serving.orders import RequestFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv_adapters.serving.jobs import Job
    from tierkv_adapters.serving.orders import Grown
    from tierkv_adapters.serving.pages import PageGroup

__all__ = ["RequestBook"]


class RequestBook:
    """Requests by the engine's name for them. Belongs to the worker's thread.

    Args:
        groups: Page groups of the rank.
    """

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        self._groups = groups
        self._drops = any(group.drops for group in groups)
        self._requests: dict[str, RequestState] = {}
        self._serial = itertools.count()
        self._step = 0
        # per group, page: in which step it was last given to a request
        self._taken: list[dict[int, int]] = [{} for _ in groups]

    def __len__(self) -> int:
        return len(self._requests)

    def names(self) -> list[str]:
        """All that are there."""
        return list(self._requests)

    def get(self, name: str) -> RequestState | None:
        """A request, if it was told of and is not over."""
        return self._requests.get(name)

    def pop(self, name: str) -> RequestState | None:
        """The same, and forget it."""
        return self._requests.pop(name, None)

    def step(self) -> None:
        """A step of the engine begins."""
        self._step += 1

    def meet(self, facts: RequestFacts) -> RequestState:
        """Take a request in; it has no space, tokens or pages yet."""
        name = facts.session
        if name is None:  # a name may come again while copies for the last one are under way
            name = f"serving-{facts.id}-{next(self._serial)}"
        request = self._requests[facts.id] = RequestState(facts, None, name, self._groups)
        return request

    def stranger(self, name: str) -> RequestState:
        """A request that nobody told of, and that is not taken in: to report on."""
        return RequestState(RequestFacts(name), None, "", self._groups)

    def grow(self, grown: Grown) -> None:
        """Take in the tokens and pages that a request got.

        Raises:
            LookupError: if nobody told of it.
            ValueError: if it names another number of page groups.
        """
        request = self._requests.get(grown.id)
        if request is None:
            raise LookupError(f"nobody told of request {grown.id!r}")
        request.grow(grown, self._step)

    def taken(self, pages: Sequence[Iterable[int]]) -> None:
        """Per group, pages that were given to requests in this step: nobody else has them now."""
        if self._drops:
            for given, mine in zip(self._taken, pages, strict=True):
                given.update(dict.fromkeys(mine, self._step))

    def equip(self, job: Job) -> None:
        """Give a job the tokens and pages as they are now.

        Raises:
            LookupError: if the request has no space.
            ValueError: if the order does not fit the request.
        """
        request, start, stop = job.request, job.start, job.stop
        if request.space is None:
            raise LookupError("no_space")
        size, writing = request.space.block_tokens, job.kind == "load"
        if writing:  # the engine may have taken less than it was offered
            job.stop = stop = stop // size * size
        whole = stop % size == 0 and (writing or start % size == 0)
        if not 0 <= start < stop <= len(request.tokens) or not whole:
            raise ValueError(
                f"tokens [{start}, {stop}) of {len(request.tokens)} are no blocks of {size}"
            )
        job.tokens = array("I", request.tokens[:stop])
        job.pages = request.cut(start, stop, self._taken, writing=writing)
