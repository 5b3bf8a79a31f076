"""Asynchronous loads and saves: which are under way, and which are over on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm.violations import EngineEnded, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.testing.trtllm.hooks import Hooks
    from tierkv.testing.trtllm.requests import Request

__all__ = ["Transfers"]


class Transfers:
    """Does ``get_finished`` for all ranks: hands in each id once, wants it back from each once.

    Attributes:
        loading: Requests whose load is not over on all ranks.
        saving: Requests whose saves are not over on all ranks.
    """

    def __init__(
        self, hooks: Hooks, workers: Sequence[object], ends: tuple[type[Exception], ...] = ()
    ) -> None:
        self._hooks = hooks
        self._ends = ends
        self._workers = workers
        self.loading: dict[int, Request] = {}
        self.saving: dict[int, Request] = {}
        self._new: tuple[list[int], list[int]] = ([], [])
        self._over: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in workers]
        self._past: tuple[set[int], set[int]] = (set(), set())

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self.loading and not self.saving

    def load(self, request: Request) -> None:
        """A request waits for its load from now on."""
        self.loading[request.id] = request
        self._past[1].discard(request.id)
        self._new[1].append(request.id)

    def save(self, request: Request) -> None:
        """A request's pages wait for its saves from now on."""
        self.saving[request.id] = request
        self._past[0].discard(request.id)
        self._new[0].append(request.id)

    def poll(self, loaded: Callable[[int, Request], None]) -> tuple[list[Request], list[Request]]:
        """Ask every rank once; ``loaded(rank, request)`` is told of each load a rank reports.

        Returns:
            Requests whose saves are over on all ranks, and whose load is.

        Raises:
            Violation: ``id-foreign``, ``id-repeated``, ``hook-result``, ``ranks-apart`` and what
                hooks raise.
            EngineEnded: every rank ended the engine on purpose.
        """
        (saving, loading), self._new = self._new, ([], [])
        ended: list[Exception] = []
        for rank, worker in enumerate(self._workers):
            given = list(saving), list(loading)
            try:
                answer = self._hooks.call(worker, "get_finished", *given)
            except Violation as error:
                if not isinstance(error.__cause__, self._ends):
                    raise
                ended.append(error.__cause__)
                continue
            saved, read = _two_lists(answer)
            self._count(rank, 0, saved, self.saving)
            for number in self._count(rank, 1, read, self.loading):
                loaded(rank, self.loading[number])
        if 0 < len(ended) < len(self._workers):
            raise Violation("ranks-apart", f"{len(ended)} of {len(self._workers)}: {ended[0]}")
        if ended:
            raise EngineEnded(ended)
        return self._collect(0, self.saving), self._collect(1, self.loading)

    def _count(self, rank: int, kind: int, ids: list[int], known: dict[int, Request]) -> list[int]:
        what = ("saving", "loading")[kind]
        over = self._over[rank][kind]
        for number in ids:
            if number in over or number in self._past[kind]:
                raise Violation("id-repeated", f"rank {rank} returned {number} ({what}) twice")
            if number not in known:
                raise Violation("id-foreign", f"rank {rank} returned {number}, not {what}")
            over.add(number)
        return ids

    def _collect(self, kind: int, known: dict[int, Request]) -> list[Request]:
        everywhere = set.intersection(*(over[kind] for over in self._over))
        for over in self._over:
            over[kind].difference_update(everywhere)
        self._past[kind].update(everywhere)
        return [known.pop(number) for number in sorted(everywhere)]


def _two_lists(answer: Any) -> tuple[list[int], list[int]]:
    try:
        saved, loaded = answer
        lists = list(saved), list(loaded)
    except (TypeError, ValueError):
        raise Violation("hook-result", f"get_finished returned {answer!r}, not two lists") from None
    if not all(type(number) is int for one in lists for number in one):
        raise Violation("hook-result", f"get_finished returned {answer!r}, not numbers")
    return lists
