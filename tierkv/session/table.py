"""The sessions that exist: named by (space, tenant, id), whether or not somebody uses them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tierkv.blocks import KeyChain, part_id
from tierkv.decisions.types import EvictReason
from tierkv.errors import SessionBusyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import Space
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.mover.load import Progress
    from tierkv.prefetch import Prefetcher

__all__ = ["Runtime", "SessionInfo", "SessionState", "SessionTable", "Tail"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a session needs of its engine."""

    core: Core
    fetcher: Fetcher
    behind: WriteBehind
    prefetcher: Prefetcher
    busy: str


class Tail(NamedTuple):
    """The private partial block behind the full ones."""

    blocks: int
    parent: BlockKey
    tokens: bytes
    key: BlockKey


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Snapshot of one session.

    Attributes:
        id: Its name.
        tenant: Its tenant.
        tokens: Tokens of its history.
        blocks: Full blocks of its history.
        nbytes: Bytes that its parts take now, each counted once per tier.
        handles: How many times it is open.
        ttl: Seconds its parts live after their last use, or None.
    """

    id: str
    tenant: str
    tokens: int
    blocks: int
    nbytes: int
    handles: int
    ttl: float | None


class SessionState:
    """One session: shared by all handles on it, changed only inside a turn.

    Attributes:
        chain: Its history.
        handles: How many times it is open.
        used: When it was used last.
        tail: Its private partial block.
        lineage: The loads since the match that was opened last.
        gone: Whether it was destroyed; handles on it may still be open.
    """

    def __init__(self, name: str, tenant: str, space: Space, salt: bytes) -> None:
        self.id = name
        self.tenant = tenant
        self.space = space
        self.salt = salt
        self.root = space.root(tenant, salt)
        self.chain = KeyChain(self.root, space.block_tokens)
        self.ttl: float | None = None
        self.handles = 0
        self.used = 0.0
        self.tail: Tail | None = None
        self.lineage: list[Progress] = []
        self.gone = False
        self._owner: object | None = None
        self._depth = 0
        self._queue: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<session {self.id!r}: {self.chain!r}, {self.handles} open>"

    def parts(self) -> Iterator[PartId]:
        """Every part that the session refers to."""
        groups = range(len(self.space.layout.groups))
        for key in self.chain.keys:
            for group in groups:
                yield part_id(key, group)
        if self.tail is not None:
            for group in groups:
                yield part_id(self.tail.key, group)

    def tail_parts(self) -> list[PartId]:
        """Parts of the private tail."""
        if self.tail is None:
            return []
        return [part_id(self.tail.key, g) for g in range(len(self.space.layout.groups))]

    # ------------------------------------------------------------------ turns

    async def begin_turn(self, owner: object, busy: str) -> None:
        """Wait for (or be refused) the session's turn; the same owner may nest.

        Raises:
            SessionBusyError: if another turn runs and ``busy`` is ``"refuse"``.
        """
        if self._owner is owner:
            self._depth += 1
            return
        if self._owner is not None or self._queue:
            if busy == "refuse":
                raise SessionBusyError(
                    f"session {self.id!r} has a turn running; wait for it, use a fork, or set "
                    "busy='wait'"
                )
            waiter = asyncio.get_running_loop().create_future()
            self._queue.append(waiter)
            try:
                await waiter  # resolved by the turn before us, which hands the turn over
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._owner = None
                    self._hand_over()
                elif waiter in self._queue:  # else it was passed over, cancelled as it was
                    self._queue.remove(waiter)
                raise
        self._owner = owner
        self._depth = 1

    def end_turn(self, owner: object) -> None:
        """End one nesting level; the last hands the turn to the next in line."""
        if self._owner is not owner:
            return
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._hand_over()

    def _hand_over(self) -> None:
        while self._queue:
            waiter = self._queue.pop(0)
            if not waiter.done():
                self._owner = waiter  # nobody slips in before the waiter wakes up
                waiter.set_result(None)
                return


class SessionTable:
    """All sessions of an engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._states: dict[tuple[bytes, str, str], SessionState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._states.values()))

    def get(self, space: Space, tenant: str, name: str) -> SessionState | None:
        """The session of this name, if it exists."""
        return self._states.get((space.fingerprint, tenant, name))

    def ensure(self, space: Space, tenant: str, name: str, salt: bytes) -> SessionState:
        """The session of this name, made if need be; another salt starts it afresh."""
        key = (space.fingerprint, tenant, name)
        state = self._states.get(key)
        if state is not None and state.salt != salt:
            self.destroy(state)
            state = None
        if state is None:
            state = self._states[key] = SessionState(name, tenant, space, salt)
            self._core.spaces[space.fingerprint] = space
        return state

    def clear(self, state: SessionState) -> None:
        """Drop a session's history, references and private tail. Idempotent."""
        drops = self._core.decisions.forget(
            state.tail_parts(), EvictReason.REMOVED, self._core.clock()
        )
        state.tail = None
        state.lineage = []
        state.chain = KeyChain(state.root, state.space.block_tokens)
        self._core.free(drops)

    def destroy(self, state: SessionState) -> None:
        """Clear a session and forget its name. Idempotent."""
        self.clear(state)
        state.gone = True
        key = (state.space.fingerprint, state.tenant, state.id)
        if self._states.get(key) is state:
            del self._states[key]

    def expire(self, now: float) -> None:
        """Forget sessions that nobody has open and whose time to live is over."""
        for state in list(self._states.values()):
            if state.handles == 0 and state.ttl is not None and state.used + state.ttl <= now:
                self.destroy(state)

    def info(self, state: SessionState) -> SessionInfo:
        """Snapshot of one session."""
        return SessionInfo(
            id=state.id,
            tenant=state.tenant,
            tokens=len(state.chain.tokens),
            blocks=len(state.chain.keys),
            nbytes=self._core.decisions.session_bytes(state.parts()),
            handles=state.handles,
            ttl=state.ttl,
        )
