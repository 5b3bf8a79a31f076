"""The session handle: what ``async with engine.session(id) as session`` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, ConfigError
from tierkv.session.batches import StoreRequest, store_many
from tierkv.session.match import Match, make_query
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierkv.abc import View
    from tierkv.blocks import BlockKey, Media, PartId
    from tierkv.decisions.types import PartState
    from tierkv.layout import Space
    from tierkv.mover.behind import FlushResult
    from tierkv.mover.load import Progress
    from tierkv.session.saving import StoreResult
    from tierkv.session.table import Runtime, SessionInfo, SessionState, SessionTable
    from tierkv.workers import Job

__all__ = ["BlockReport", "Session"]


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Where one block of a prompt is, or why it is nowhere.

    Attributes:
        index: Number of the block.
        start_token: Its first token.
        end_token: One past its last token.
        tier: Fastest tier in which a prefix load would find it, or None.
        chain: Codec chain of that copy, e.g. ``"raw"``, ``"int8+zstd"``.
        exact: Whether its KV is exact.
        reason: Why it would not be loaded; None if it would.
        about: Tier that the reason is about, if it is about one.
        ago: Seconds since the reason arose, if known.
    """

    index: int
    start_token: int
    end_token: int
    tier: str | None
    chain: str | None
    exact: bool
    reason: MissReason | None
    about: str | None = None
    ago: float | None = None

    def __str__(self) -> str:
        if self.reason is None:
            return f"block {self.index}: {self.tier}, {self.chain}"
        where = f" in {self.about}" if self.about else ""
        when = f" {self.ago:.0f} s ago" if self.ago is not None else ""
        return f"block {self.index}: {self.reason.value}{when}{where}"


class Session:
    """A handle on a session; open it with ``async with``.

    Several handles (and tasks) may share one session: its history is common, and turns on it
    run one after the other. Leaving deletes nothing; :meth:`destroy` does.
    """

    def __init__(
        self,
        runtime: Runtime,
        table: SessionTable,
        state: SessionState,
        *,
        ttl: float | str | None = None,
        fidelity: str = "exact",
        quota: bool = False,
    ) -> None:
        if fidelity not in ("exact", "lossy"):
            raise ConfigError(f"fidelity must be 'exact' or 'lossy', not {fidelity!r}")
        self.runtime = runtime
        self.state = state
        self.lossy = fidelity == "lossy"
        self.quota = quota
        self.lineage: list[Progress] = []
        self._table = table
        self._ttl = None if ttl is None else parse_duration(ttl)
        self._open = False

    def __repr__(self) -> str:
        return f"<Session {self.id!r} of tenant {self.tenant!r}: {self.state.chain!r}>"

    @property
    def id(self) -> str:
        """Name of the session."""
        return self.state.id

    @property
    def tenant(self) -> str:
        """Its tenant."""
        return self.state.tenant

    @property
    def space(self) -> Space:
        """Its space."""
        return self.state.space

    @property
    def ttl(self) -> float | None:
        """Seconds its parts live after their last use, or None."""
        return self.state.ttl

    @property
    def derived(self) -> str:
        """How KV computed behind this handle's loads differs from exact KV; empty if not."""
        return next((load.derived for load in self.lineage if load.derived), "")

    @property
    def token_ids(self) -> list[int]:
        """Its history: the token ids of the last match or store."""
        return self.state.chain.tokens.tolist()

    async def __aenter__(self) -> Session:
        if self._open:
            raise ClosedError(f"this handle on session {self.id!r} is open already")
        if self.runtime.core.closed:
            raise ClosedError("the engine is closed")
        self.state.handles += 1
        self._open = True
        if self._ttl is not None:
            self.state.ttl = self._ttl
        self.state.used = self.runtime.core.clock()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        self.state.handles -= 1
        self.state.used = self.runtime.core.clock()

    def check_open(self) -> None:
        """Refuse to work on a handle that is not open.

        Raises:
            ClosedError: if it is not, or if the engine is closed.
        """
        if not self._open:
            raise ClosedError(f"session {self.id!r} is not open: use it inside its 'async with'")
        if self.runtime.core.closed:
            raise ClosedError("the engine is closed")

    async def begin_turn(self) -> None:
        """Wait for the session's turn; nests. Pair with :meth:`end_turn`.

        Raises:
            SessionBusyError: if a turn runs and the engine is set to refuse a second one.
        """
        await self.state.begin_turn(self, self.runtime.busy)

    def end_turn(self) -> None:
        """End a turn begun with :meth:`begin_turn`."""
        self.state.end_turn(self)

    def match(self, token_ids: Sequence[int], *, media: Sequence[Media] = ()) -> Match:
        """The longest loadable prefix of a prompt, leased: ``async with session.match(ids)``.

        Args:
            token_ids: All tokens of the prompt, from the first.
            media: Content behind placeholder tokens.
        """
        return Match(self, token_ids, media)

    async def store(
        self,
        token_ids: Sequence[int],
        kv: View,
        start: int = 0,
        *,
        tail: bool = False,
        media: Sequence[Media] = (),
    ) -> StoreResult:
        """Store the full blocks of ``token_ids`` whose KV is in ``kv``.

        Args:
            token_ids: All tokens whose KV is in the view, from the first.
            kv: The KV; index 0 is token 0.
            start: First token that needs storing; rounded down to a block.
            tail: Whether the partial block at the end is kept too, privately to this session,
                until its next such store.
            media: Content behind placeholder tokens.

        Returns:
            Per block: stored, present, or skipped and why. The tensors may be overwritten now.

        Raises:
            ClosedError: if the session or engine is closed.
            LayoutError: if the view does not fit the layout, or does not hold these tokens.

        Blocks before ``start`` that have gone meanwhile are stored again, since those behind them
        would be of no use.

        Cancellation: blocks published so far stay; the rest is as if never stored. At most one
        slice (32 MiB) of a gather is waited for.
        """
        request = StoreRequest(self, token_ids, kv, start, tail, media)
        return (await store_many(self.runtime, [request]))[0]

    async def flush(self) -> FlushResult:
        """Make the session's parts durable, as far as there are tiers for it.

        Returns:
            How many parts would survive a crash now, and how many would not.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        self.check_open()
        return await self.runtime.behind.flush(list(self.state.parts()))

    def fork(self, name: str) -> Session:
        """A new session that starts with this one's history; shared blocks are counted once.

        Raises:
            ConfigError: if a session of that name has a history already.
        """
        self.check_open()
        known = self._table.get(self.space, self.tenant, name)
        if known is not None and known.chain.tokens:
            raise ConfigError(f"session {name!r} exists and has a history; fork to a new name")
        state = self._table.ensure(self.space, self.tenant, name, self.state.salt)
        state.chain = self.state.chain.fork()
        state.ttl = self.state.ttl
        branch = Session(
            self.runtime,
            self._table,
            state,
            ttl=self._ttl,
            fidelity="lossy" if self.lossy else "exact",
            quota=self.quota,
        )
        branch.lineage = list(self.lineage)
        return branch

    def clear(self) -> None:
        """Drop history, references and the private tail; shared blocks stay evictable."""
        self._table.clear(self.state)

    def destroy(self) -> None:
        """Clear the session and forget its name. Idempotent."""
        self._table.destroy(self.state)

    def info(self) -> SessionInfo:
        """Snapshot of the session."""
        return self._table.info(self.state)

    def promote(self, keys: Sequence[BlockKey]) -> Job[int]:
        """Bring these blocks into the fastest tier; engine-owned, nobody needs to wait."""
        size = self.space.block_tokens
        query = make_query(self, keys, len(keys) * size, touch=False)
        return self.runtime.prefetcher.start(self.space, self.state.root, query)

    def explain(self, token_ids: Sequence[int] | None = None) -> list[BlockReport]:
        """Tell, per block of a prompt, where it is or why it is nowhere. Changes nothing.

        Args:
            token_ids: The prompt; None takes the session's history.
        """
        chain = self.state.chain
        if token_ids is not None:
            chain = chain.fork()
            chain.follow(token_ids)
        size = self.space.block_tokens
        reports = [
            self._report(index, key, index * size, (index + 1) * size)
            for index, key in enumerate(chain.keys)
        ]
        done = len(chain.keys) * size
        if done < len(chain.tokens):
            tail = self.state.tail
            ours = tail is not None and tail.tokens == chain.tokens[done:].tobytes()
            key = tail.key if tail is not None and ours else None
            reports.append(self._report(len(reports), key, done, len(chain.tokens)))
        return reports

    def _report(self, index: int, key: BlockKey | None, start: int, end: int) -> BlockReport:
        core = self.runtime.core
        if key is None:
            return BlockReport(index, start, end, None, None, True, MissReason.NEVER_STORED)
        now = core.clock()
        worst: tuple[PartId, PartState] | None = None
        for group in range(len(self.space.layout.groups)):
            part = part_id(key, group)
            state = core.decisions.state(part, now)
            if worst is None or _slower(state, worst[1]):
                worst = (part, state)
        assert worst is not None
        part, state = worst
        usable = [
            t
            for t, lossless in zip(state.tiers, state.lossless, strict=True)
            if self.lossy or (lossless and state.exact)
        ]
        if not usable:
            reason = MissReason.FIDELITY if state.tiers else state.reason
            about = core.levels[state.tier].name if state.tier is not None else None
            return BlockReport(index, start, end, None, None, state.exact, reason, about, state.ago)
        level = core.levels[usable[0]]
        chain = level.chain
        if level.memory is not None:
            chain = core.chain_of(level, part, state.generation) or chain
        return BlockReport(index, start, end, level.name, chain, state.exact, None)


def _slower(state: PartState, than: PartState) -> bool:
    return (not state.tiers, state.tiers[:1]) > (not than.tiers, than.tiers[:1])
