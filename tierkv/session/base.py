"""Handles on sessions: names, lifetime and turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from tierkv.errors import ClosedError, ConfigError, SessionBusyError
from tierkv.session.scoring import scored_parts
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierkv.blocks import Media
    from tierkv.layout import Space
    from tierkv.mover.load import Progress
    from tierkv.session.leased import LeasedPrefix
    from tierkv.session.table import Runtime, SessionState, SessionTable

__all__ = ["Handle", "check_fidelity"]

_MOST = 1e15  # more tokens or seconds than that were never computed


def check_fidelity(fidelity: str) -> str:
    """Take what a caller said of lossy copies.

    Raises:
        ConfigError: if it is neither ``"exact"`` nor ``"lossy"``.
    """
    if fidelity not in ("exact", "lossy"):
        raise ConfigError(f"fidelity must be 'exact' or 'lossy', not {fidelity!r}")
    return fidelity


class Handle:
    """What is common to every use of a session: its name, its life, its turns.

    Attributes:
        runtime: What it needs of its engine.
        state: The session, shared by all handles on it.
        lossy: Whether lossy copies are welcome.
        quota: Whether the session has a byte quota.
        matches: Its open matches; leaving the handle leaves them.
        matched: Whether it opened one at all.
        aside: Derived KV that was in place before its last match, which found nothing.
        covered: Tokens that were stored since.
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
        self.runtime = runtime
        self.state = state
        self.lossy = check_fidelity(fidelity) == "lossy"
        self.quota = quota
        self._lineage: list[Progress] = []
        self.matched = False
        self.aside: list[Progress] = []
        self.covered = 0
        self.matches: set[LeasedPrefix] = set()
        self._table = table
        self._ttl = None if ttl is None else parse_duration(ttl)
        self._open = False

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id!r} of tenant {self.tenant!r}: {self.state.chain!r}>"
        )

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
    def lineage(self) -> list[Progress]:
        """The loads since the match that this handle opened last."""
        return self._lineage

    @lineage.setter
    def lineage(self, loads: list[Progress]) -> None:
        self._lineage = self.state.lineage = loads
        self.matched, self.aside, self.covered = True, [], 0

    @property
    def behind(self) -> list[Progress]:
        """The loads behind which this handle's KV was computed, as far as anybody knows.

        Before it opens a match, those of whoever did last in this session: a caller may still hold
        what was loaded then, and go on with it.
        """
        own = self.matched or self._lineage
        return self._lineage if own else self.state.lineage

    @property
    def derived(self) -> str:
        """How KV computed behind this handle's loads differs from exact KV; empty if not."""
        return next((load.derived for load in self.behind if load.derived), "")

    @property
    def token_ids(self) -> list[int]:
        """Its history: the token ids of the last match or store."""
        return self.state.chain.tokens.tolist()

    async def __aenter__(self) -> Self:
        if self._open:
            raise ClosedError(f"this handle on session {self.id!r} is open already")
        if self.runtime.core.closed:
            raise ClosedError("the engine is closed")
        self.runtime.core.workers.home.refuse_elsewhere()
        if not self.lossy:
            self._table.greet_exact(self.state)
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
        for match in list(self.matches):
            match.close()
        self.state.handles -= 1
        self.state.used = self.runtime.core.clock()

    def remember(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> None:
        """Make ``token_ids`` the session's history, e.g. a reply whose last token has no KV yet.

        Hashes what is new on the loop, at about 2 us a block. No await, so that a cancelled turn
        can put back the history that it began with.

        Args:
            token_ids: The history.
            media: Content behind placeholder tokens of it.

        Raises:
            LayoutError: if they are no token ids.
            SessionBusyError: if somebody else has a turn running.
        """
        if not self.state.turns.free_for(self):
            raise SessionBusyError(
                f"session {self.id!r} has a turn running: remember() belongs inside your own turn"
            )
        self.state.follow(token_ids, media)

    def computed(self, tokens: int, seconds: float) -> None:
        """Tell how long a prefill took, so that no load takes longer than recomputing.

        What is learned (tokens a second, the last few prefills counting most) holds for every
        session of the space. Tell it of prefills of some hundred tokens or more; steps of
        decoding say nothing of the speed of prefill.

        Args:
            tokens: Tokens whose KV was computed.
            seconds: How long that took.

        Raises:
            ConfigError: if one of them is not a positive number.
        """
        for name, value in (("tokens", tokens), ("seconds", seconds)):
            number: object = value
            if not isinstance(number, int | float) or not 0 < number <= _MOST:
                raise ConfigError(
                    f"computed(): {name} must be a positive number, not {value!r:.40}"
                )
        core = self.runtime.core
        core.decisions.computed(self.space.fingerprint, tokens, float(seconds), core.clock())

    def hint(self, *, next_in: float | str | None = None, stop_reason: str | None = None) -> None:
        """Tell what is known of the session's next turn; call it when a turn has ended.

        The engine learns how long sessions really stay away after each stop reason, keeps what
        is needed again soon for longer than what is not, and may fetch early. Hints that turn out
        to tell nothing are ignored. On the loop, some 2 us a block for at most 256 blocks.

        Args:
            next_in: Seconds (or text such as ``"2m"``) until the next turn, as far as expected.
            stop_reason: Why this turn ended: ``"tool_use"``, ``"end_turn"``, or any short text
                that callers tell apart.

        Raises:
            ConfigError: if neither is given, or one of them makes no sense.
            ClosedError: if the handle is not open, or the engine is closed.
        """
        self.check_open()
        seconds = None if next_in is None else parse_duration(next_in)
        core, state = self.runtime.core, self.state
        groups = len(state.space.layout.groups)
        core.decisions.hint(
            tuple(state.chain.keys), groups, core.clock(), stop_reason=stop_reason, next_in=seconds
        )
        self.runtime.prefetcher.hinted(state, stop_reason=stop_reason, next_in=seconds)
        if self.runtime.recorder is not None:
            self.runtime.recorder.hinted(state, core.clock(), stop_reason, seconds)

    def score(self, value: float | Sequence[float], start: int = 0) -> None:
        """Tell how important parts of the session's history are, from 0 (may go first) to 1.

        Policy ``importance`` evicts by it, and codec rules may go by it. It is told of blocks:
        what was said last of a block counts, for every session that shares it, while the block is
        stored anywhere. Blocks that are not stored are passed over. On the loop, some 1 us a block.

        Args:
            value: One number for all tokens from ``start``; or one each, e.g. attention mass: a
                block is then as important as the most important of its tokens given here.
            start: First token that is meant.

        Raises:
            ConfigError: if a value is outside 0 to 1, or ``start`` is not inside the history.
            ClosedError: if the handle is not open, or the engine is closed.
        """
        self.check_open()
        core, state = self.runtime.core, self.state
        parts, values = scored_parts(state, value, start)
        core.decisions.score(parts, values, core.clock())

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
            ClosedError: if the handle is not open, the engine is closed, or belongs to another
                event loop or process.
            SessionBusyError: if a turn runs and the engine is set to refuse a second one, or it is
                this very task that holds it through another handle.
        """
        runtime = self.runtime
        runtime.core.workers.home.refuse_elsewhere()
        await self.state.turns.begin(
            self, closing=runtime.core.closing, refuse=runtime.busy == "refuse"
        )
        try:
            self.check_open()  # it may have been left, or the engine closed, while this waited
        except ClosedError:
            self.end_turn()
            raise

    def end_turn(self) -> None:
        """End a turn begun with :meth:`begin_turn`."""
        self.state.turns.end(self)
