"""The thread that keeps the scheduler's side in touch with the ranks, and gets blocks held.

Everything slow happens here: finding the ranks, hashing prompts for each of them, asking for holds
and giving them back. The scheduler's thread only leaves wishes in a queue.

A wish is about the leading blocks of one prompt. Of a prompt that was *asked* for, whatever all
ranks have in some tier is to be held: from disk it is brought into memory, offered with the next
request. Of one whose blocks are being *stored*, the wish waits until every rank has them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.blocks import KeyChain
from tierkv.decisions.types import GroupRule
from tierkv.errors import LayoutError, TierKVError
from tierkv.frame import header_bytes, page_round
from tierkv_adapters.serving.limited_log import LimitedLog
from tierkv_adapters.serving.replicas import needed_parts
from tierkv_adapters.trtllm.holds import HoldBook, Run
from tierkv_adapters.trtllm.links import open_link
from tierkv_adapters.trtllm.shapes import read_facts, socket_path
from tierkv_adapters.trtllm.watching import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import BlockKey
    from tierkv.layout import Group, Space
    from tierkv_adapters.serving.orders import RequestFacts
    from tierkv_adapters.serving.replicas import ReplicaIndex
    from tierkv_adapters.trtllm.links import Held, RankLink
    from tierkv_adapters.trtllm.shapes import RankFacts

__all__ = ["HoldFeed", "Ranks", "Wish"]

_log = logging.getLogger("tierkv.trtllm")
_LOOK_S: Final = 0.02  # between looks for ranks, and for blocks that are being stored
_STORE_S: Final = 1.0  # saves that get no further for so long are not waited for
_SNAPSHOT_S: Final = 60.0
_MOST: Final = 1024  # wishes that may wait; beyond it new ones are dropped
_TRIES: Final = 3


class Ranks(NamedTuple):
    """All ranks, once they are known.

    Attributes:
        facts: What each told of itself.
        rules: Rule of each page group.
        book: What is held.
    """

    facts: tuple[RankFacts, ...]
    rules: tuple[GroupRule, ...]
    book: HoldBook


@dataclass(slots=True)
class Wish:
    """Leading tokens of a prompt whose blocks are wanted ready.

    Attributes:
        facts: The request that they are of.
        tokens: Token ids from the first; not changed by anybody any more.
        count: How many of them are meant: whole blocks.
        stored: Whether the blocks are being stored just now, and are waited for.
        until: When a wish that waits is no longer waited for; set by the feed.
        seen: Blocks that all ranks had at the last look; set by the feed.
        keys: By rank, keys of the whole blocks; set by the feed.
    """

    facts: RequestFacts
    tokens: Sequence[int] = field(repr=False)
    count: int
    stored: bool
    until: float = 0.0
    seen: int = 0
    keys: list[list[BlockKey]] | None = field(default=None, repr=False)


class HoldFeed:
    """See the module. One for each scheduler.

    Args:
        directory: Where the ranks tell of themselves.
        world: How many there are.
        fraction: Share of each rank's first memory tier that may be held.
        connect: Opens the connection to a rank.
    """

    def __init__(
        self,
        directory: str,
        world: int,
        fraction: float,
        connect: Callable[[str, ReplicaIndex, int], RankLink] = open_link,
    ) -> None:
        self._directory = directory
        self._world = world
        self._fraction = fraction
        self._connect = connect
        self._index = Residency(world, self._lost, self._wake_up)
        self._links: list[RankLink | None] = [None] * world
        self._facts: list[RankFacts | None] = [None] * world
        self._wishes: deque[Wish] = deque()
        self._waiting: list[Wish] = []
        self._wake = threading.Event()
        self._losses = [0] * world  # each written by that rank's feed alone
        self._cleared = [0] * world  # of those losses; written by the feed's thread alone
        self._wished = 0  # written by the scheduler's thread alone
        self._granted = 0  # written by the feed's alone
        self._stopping = False
        self._complain = LimitedLog(_log)
        self.ranks: Ranks | None = None
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name="tierkv-trtllm-feed", daemon=True)

    def start(self) -> None:
        """Begin to look for the ranks."""
        self._thread.start()

    def wish(self, wish: Wish) -> None:
        """Leave a wish; never waits. Of very many that wait the newest is dropped."""
        if len(self._wishes) >= _MOST:
            return
        self._wished += 1
        self._wishes.append(wish)
        self._wake.set()

    def connected(self) -> Ranks | None:
        """All ranks, if every one of them is connected and has told what it holds; else None."""
        ranks = self.ranks
        if ranks is None or self._cleared != self._losses or not self._index.is_complete():
            return None
        return ranks

    def _wake_up(self) -> None:
        self._wake.set()

    def _lost(self, rank: int) -> None:
        """A rank's connection broke: its holds may be gone, even if it comes back at once."""
        self._losses[rank] += 1
        self._wake.set()

    def settled(self, within: float) -> bool:
        """Wait until no wish is open, for at most ``within`` seconds; tells whether."""
        deadline = time.monotonic() + within
        while self._granted != self._wished:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """End the thread, and give every hold back."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_SNAPSHOT_S)
        if self.ranks is not None:
            self._forget(self.ranks.book.clear())
        for link in self._links:
            if link is not None:
                link.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                busy = self._turn()
            except Exception as error:  # noqa: BLE001 - the thread must not die
                self.errors += 1
                self._complain.warning("feed", f"{type(error).__name__}: {error}")
                busy = True
            self._wake.wait(_LOOK_S if busy else None)
            self._wake.clear()

    def _turn(self) -> bool:
        """One look at everything; whether another one is due soon."""
        if self.ranks is None and not self._meet():
            return True
        ranks = self.ranks
        assert ranks is not None
        if self._cleared != (losses := list(self._losses)):
            self._forget(ranks.book.clear())
            self._cleared = losses
        if damaged := self._index.damaged(ranks.book.runs()):
            ranks.book.damage(damaged)
            _log.warning("tierkv: %d held prefixes are damaged; offered no more", len(damaged))
        self._forget(ranks.book.spent())
        if not self._index.is_complete():
            return True
        while self._wishes and not self._stopping:
            self._waiting.append(self._wishes.popleft())
        waiting, self._waiting = self._waiting, []
        for wish in waiting:
            if not self._stopping and not self._tried(ranks, wish):
                self._waiting.append(wish)
            else:
                self._granted += 1
        return bool(self._waiting) or self._index.suspects() or ranks.book.damaged()

    def _meet(self) -> bool:
        """Look for ranks that have told of themselves; whether all are there."""
        for rank in range(self._world):
            if self._links[rank] is not None:
                continue
            facts = read_facts(self._directory, rank, self._world)
            if facts is None:
                return False
            link = self._connect(socket_path(self._directory, rank), self._index, rank)
            try:
                link.start(_SNAPSHOT_S)
            except BaseException:
                link.close()
                raise
            self._index.learn(rank, facts.memory_tiers)
            self._links[rank], self._facts[rank] = link, facts
        known = tuple(facts for facts in self._facts if facts is not None)
        self.ranks = _ranks(known, self._fraction)
        _log.info("tierkv: all %d ranks are connected", self._world)
        return True

    def _tried(self, ranks: Ranks, wish: Wish) -> bool:
        """Whether a wish is done with; one that fails is."""
        try:
            return self._grant(ranks, wish)
        except Exception as error:  # noqa: BLE001 - the other wishes are not to blame
            self.errors += 1
            self._complain.warning("wish", f"{type(error).__name__}: {error}")
            return True

    def _grant(self, ranks: Ranks, wish: Wish) -> bool:
        """Try to have a wish's blocks held; whether it is done with."""
        if wish.keys is None:
            wish.keys = [_keys(facts, wish) for facts in ranks.facts]
        size = ranks.book.block_tokens
        blocks = len(wish.keys[0])
        there = self._index.match(wish.keys, ranks.rules, size)
        now = time.monotonic()
        if there > wish.seen or not wish.until:
            wish.seen, wish.until = there, now + _STORE_S
        if wish.stored and there < blocks and now < wish.until:
            return False
        ready = ranks.book.ready_blocks(wish.keys[0])
        if there > ready:
            self._hold(ranks, wish, there, ready)
        return True

    def _hold(self, ranks: Ranks, wish: Wish, blocks: int, ready: int) -> None:
        assert wish.keys is not None
        book = ranks.book
        blocks, victims = book.fit(wish.keys[0][:blocks])
        self._forget(victims)
        for _ in range(_TRIES):
            if blocks <= ready:
                book.counters.short += 1
                return
            parts = [needed_parts(k[:blocks], ranks.rules, book.block_tokens) for k in wish.keys]
            with self._index.asking(parts):
                held = self._ask(ranks, wish, blocks)
                if held is None:
                    return
                least = min(one.blocks for one in held)
                if least == blocks:
                    # rank 0 names the parts that it holds; of the others those of the same blocks
                    run = Run(tuple(wish.keys[0][:blocks]), tuple(held[0].parts), list(held))
                    self._index.watch(run)
                    self._forget(book.admit(run))
                    return
            # a shorter prefix needs other parts of its windows: it is held by itself
            _release(held)
            blocks = least

    def _ask(self, ranks: Ranks, wish: Wish, blocks: int) -> list[Held] | None:
        """Have every rank hold these blocks, all at once; None if one does not answer."""
        assert wish.keys is not None
        held: list[Held] = []
        calls = [
            _Asking(link, facts.space(wish.facts.adapter), wish.facts, keys[:blocks])
            for link, facts, keys in zip(self._links, ranks.facts, wish.keys, strict=True)
            if link is not None
        ]
        for call in calls[1:]:
            call.start()
        for number, call in enumerate(calls):
            call.run() if number == 0 else call.join()
        for call in calls:
            if call.held is not None:
                held.append(call.held)
            elif call.error is not None:
                self.errors += 1
                self._complain.warning("hold", str(call.error))
        if len(held) < len(calls):
            _release(held)
            return None
        return held

    def _forget(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._index.forget(run)
            _release(run.handles)


class _Asking(threading.Thread):
    """One rank is asked, while others are."""

    def __init__(
        self, link: RankLink, space: Space, facts: RequestFacts, keys: Sequence[BlockKey]
    ) -> None:
        super().__init__(name="tierkv-trtllm-hold", daemon=True)
        self._ask = partial(link.hold, space, facts, keys)
        self.held: Held | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.held = self._ask()
        except Exception as error:  # noqa: BLE001 - told by the feed
            self.error = error


def _release(held: Sequence[Held]) -> None:
    for one in held:
        try:
            one.release()
        except TierKVError:  # the rank is gone, and its holds with it
            continue


def _keys(facts: RankFacts, wish: Wish) -> list[BlockKey]:
    request = wish.facts
    space = facts.space(request.adapter)
    chain = KeyChain(space.root(request.tenant, request.salt), facts.block_tokens)
    chain.follow(wish.tokens[: wish.count], request.media)
    return chain.keys


def _frame(group: Group, block_tokens: int) -> int:
    """Bytes that a part takes in memory: with its header, in whole pages."""
    return header_bytes(group) + page_round(group.raw_bytes(block_tokens))


def _ranks(facts: tuple[RankFacts, ...], fraction: float) -> Ranks:
    """What the scheduler's side works with.

    Raises:
        LayoutError: if the ranks' blocks do not fit together.
    """
    first = facts[0]
    for other in facts[1:]:
        mine, theirs = first.layout.groups, other.layout.groups
        same = [(g.kind, g.window) for g in mine] == [(g.kind, g.window) for g in theirs]
        if not same or first.block_tokens != other.block_tokens:
            raise LayoutError(
                f"ranks 0 and {other.rank} cut their KV differently ({first.block_tokens} and "
                f"{other.block_tokens} tokens a block, {len(mine)} and {len(theirs)} groups)"
            )
    rules = tuple(GroupRule(group.kind, group.window) for group in first.layout.groups)
    size = first.block_tokens
    most = [max(_frame(f.layout.groups[g], size) for f in facts) for g in range(len(rules))]
    budget = int(min(f.memory for f in facts) * fraction)
    return Ranks(facts, rules, HoldBook(rules, most, size, budget))
