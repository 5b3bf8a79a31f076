"""Chunks of vLLM's CPU tier in the order of one of tierkv's policies. Pure: no vLLM, no clock.

vLLM keeps chunks under opaque keys and evicts a number of them at once; tierkv's policies order
dense rows, one victim at a time. What is between them:

* *A request is one access.* vLLM inserts chunks from head to tail while a request runs and says
  when it is over. A policy that heard of each chunk at once would have the head as the oldest,
  and evict it first, which makes the rest of the prompt useless; hearing of it again at the end
  would count every chunk twice, and policies that count uses (or learn the time between two)
  would be misled. So chunks of running requests are *young*: the policy hears of them when the
  request is over, tail first, once. They are evicted only if nothing else can be.
* Versions of vLLM that do not say when a request is over get each chunk into the order at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tierkv.abc import Policy

__all__ = ["Chunk", "OrderedChunks"]


class Chunk(Protocol):
    """vLLM's status of a chunk."""

    ref_cnt: int


_CHUNK_BYTES: Final = 1  # all chunks are equally large


class OrderedChunks:
    """The chunks of a CPU tier, and which of them goes next.

    Args:
        make: Makes the policy; again whenever the tier is emptied.
        capacity: Chunks that the tier has room for.
        by_request: Whether :meth:`finished` will be called for every request.
    """

    def __init__(self, make: Callable[[], Policy], capacity: int, *, by_request: bool) -> None:
        self._make = make
        self._capacity = capacity
        self._by_request = by_request
        self.clear()

    def __len__(self) -> int:
        return len(self._chunks)

    def clear(self) -> None:
        """Forget everything, history included."""
        self._policy = self._make()
        self._policy.resize(self._capacity)
        self._chunks: dict[bytes, Chunk] = {}
        self._young: dict[bytes, None] = {}  # of running requests, oldest first
        self._rows: dict[bytes, int] = {}
        self._keys: list[bytes] = []  # by row
        self._free: list[int] = []
        self._clock = 0

    def get(self, key: bytes) -> Chunk | None:
        """The chunk of a key."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Chunk) -> None:
        """Add a chunk that has just been given room."""
        self._chunks[key] = chunk
        if self._by_request:
            self._young[key] = None
        else:
            self._settle(key)

    def remove(self, key: bytes) -> None:
        """Forget a chunk that was never filled."""
        if self._chunks.pop(key, None) is None:
            return
        if key in self._young:
            del self._young[key]
        else:
            row = self._rows.pop(key)
            self._policy.remove(row)
            self._free.append(row)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note an access of filled chunks, given from head to tail; the head counts as last."""
        for key in reversed(list(keys)):
            row = self._rows.get(key)
            if row is not None and self._chunks[key].ref_cnt >= 0:
                self._policy.touch(row, self._tick())

    def finished(self, keys: Sequence[bytes], reused: Collection[bytes]) -> None:
        """Note that a request is over.

        Args:
            keys: Chunks that it inserted or used, from head to tail.
            reused: Those that were there before it.
        """
        for key in reversed(keys):
            if key in self._young:
                del self._young[key]
                self._settle(key)
            if key in reused and (row := self._rows.get(key)) is not None:
                self._policy.touch(row, self._tick())

    def evictable(self, key: bytes) -> None:
        """Nobody reads or fills a chunk any more."""
        row = self._rows.get(key)
        if row is not None:
            self._policy.release(row)

    def pinned(self, key: bytes) -> None:
        """Somebody reads a chunk."""
        row = self._rows.get(key)
        if row is not None:
            self._policy.hold(row)

    def evict(self, count: int, protected: Collection[bytes]) -> list[tuple[bytes, Chunk]] | None:
        """Take chunks out, exactly so many, or none at all.

        Args:
            count: How many.
            protected: Keys that stay.

        Returns:
            Keys and chunks; None if there are not enough that nobody reads.
        """
        rows, passed = self._victims(count, protected)
        young: list[bytes] = []
        for key in self._young:
            if len(rows) + len(young) == count:
                break
            if self._chunks[key].ref_cnt == 0 and key not in protected:
                young.append(key)
        enough = len(rows) + len(young) == count
        for row in passed if enough else (*passed, *rows):
            if self._chunks[self._keys[row]].ref_cnt == 0:
                self._policy.release(row)
        if not enough:
            return None
        out = [(self._keys[row], self._chunks.pop(self._keys[row])) for row in rows]
        for (key, _), row in zip(out, rows, strict=True):
            self._policy.remove(row, evicted=True, ident=_ident(key))
            del self._rows[key]
            self._free.append(row)
        for key in young:
            del self._young[key]
            out.append((key, self._chunks.pop(key)))
        return out

    def _victims(self, count: int, protected: Collection[bytes]) -> tuple[list[int], list[int]]:
        """Rows to evict and rows that were passed over, all held meanwhile."""
        rows: list[int] = []
        passed: list[int] = []
        while len(rows) < count and (row := self._policy.victim()) is not None:
            self._policy.hold(row)
            key = self._keys[row]
            stays = key in protected or self._chunks[key].ref_cnt != 0
            (passed if stays else rows).append(row)
        return rows, passed

    def _settle(self, key: bytes) -> None:
        """Give a chunk its place in the order."""
        if self._free:
            row = self._free.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
        self._rows[key] = row
        self._policy.insert(row, _CHUNK_BYTES, self._tick(), _ident(key))
        if self._chunks[key].ref_cnt == 0:
            self._policy.release(row)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _ident(key: bytes) -> int:
    """64 bits that name a chunk for good: of its hash, and its group, which stands at the end."""
    return (int.from_bytes(key[:8], "little") ^ int.from_bytes(key[-4:], "little")) or 1
