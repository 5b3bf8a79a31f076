"""The sessions that exist: named by (space, tenant, id), whether or not somebody uses them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.blocks import KeyChain, part_id
from tierkv.chains import parse_chains
from tierkv.decisions.types import EvictReason
from tierkv.errors import ConfigError
from tierkv.frame import MAX_TENANT_BYTES
from tierkv.layout import GroupKind
from tierkv.session.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.blocks import BlockKey, Media, PartId
    from tierkv.layout import Space
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.mover.load import Progress
    from tierkv.pipeline import Like
    from tierkv.prefetch import Prefetcher
    from tierkv.traces.recording import Recorder

__all__ = ["Runtime", "SessionInfo", "SessionState", "SessionTable", "Tail"]

_log: Final = logging.getLogger("tierkv.session")


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a session needs of its engine."""

    core: Core
    fetcher: Fetcher
    behind: WriteBehind
    prefetcher: Prefetcher
    busy: str
    recorder: Recorder | None = None


class Tail(NamedTuple):
    """The private partial block behind the full ones."""

    blocks: int
    parent: BlockKey
    tokens: bytes
    media: bytes
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
        kept: Leading blocks of its history that it was asked to store.
        turns: Who may change it now.
        likes: What its blocks in memory have in common, by the group as it stands in their names.
        lineage: The loads since the match that was opened last.
        gone: Whether it was destroyed; handles on it may still be open.
    """

    def __init__(self, name: str, tenant: str, space: Space, salt: bytes) -> None:
        """Begin with no history.

        Raises:
            ConfigError: if a name or the salt is malformed.
        """
        _check(name, tenant, salt)
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
        self.kept = 0
        self.lineage: list[Progress] = []
        self.gone = False
        self.turns = Turns(name)
        self.likes: dict[bytes, Like] = {}

    def __repr__(self) -> str:
        return f"<session {self.id!r}: {self.chain!r}, {self.handles} open>"

    def follow(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> int:
        """Make ``token_ids`` its history; how many leading tokens it had already."""
        shared = self.chain.follow(token_ids, media)
        self.adopt(self.chain, shared)
        return shared

    def adopt(self, chain: KeyChain, shared: int) -> None:
        """Take over a history that has its first ``shared`` tokens in common with the last one."""
        self.chain = chain
        self.kept = min(self.kept, shared // self.space.block_tokens)

    def parts(self) -> Iterator[PartId]:
        """Every part that the session refers to."""
        groups = range(len(self.space.layout.groups))
        for key in self.chain.keys:
            for group in groups:
                yield part_id(key, group)
        if self.tail is not None:
            for group in groups:
                yield part_id(self.tail.key, group)

    def wanted(self, core: Core) -> Iterator[PartId]:
        """Parts that it was asked to keep, wherever they are, and what else of it there is.

        Windows and snapshots behind the last ones are of no use: they count while they are there.
        """
        strict = [g.kind in (GroupKind.FULL, GroupKind.LATENT) for g in self.space.layout.groups]
        for block, key in enumerate(tuple(self.chain.keys)):
            for group, needed in enumerate(strict):
                part = part_id(key, group)
                asked = needed and block < self.kept
                if asked or core.decisions.state(part, core.clock()).tiers:
                    yield part
        for part in self.tail_parts():
            if core.decisions.state(part, core.clock()).tiers:
                yield part

    def tail_parts(self) -> list[PartId]:
        """Parts of the private tail."""
        if self.tail is None:
            return []
        return [part_id(self.tail.key, g) for g in range(len(self.space.layout.groups))]


def _check(name: object, tenant: object, salt: object) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"a session's name is a text that is not empty, not {name!r:.80}")
    if not isinstance(tenant, str):
        raise ConfigError(f"tenant is a text, not {tenant!r:.80}")
    if len(tenant.encode("utf-8", "surrogatepass")) > MAX_TENANT_BYTES:
        raise ConfigError(f"tenant is at most {MAX_TENANT_BYTES} bytes long, not {tenant!r:.80}")
    if not isinstance(salt, bytes):
        raise ConfigError(f"salt is bytes, not {salt!r:.80}")


class SessionTable:
    """All sessions of an engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._states: dict[tuple[bytes, str, str], SessionState] = {}
        self._in_vain = not any(parse_chains(level.chain).lossless for level in core.levels)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(list(self._states.values()))

    def get(self, space: Space, tenant: str, name: str) -> SessionState | None:
        """The session of this name, if it exists.

        Raises:
            ConfigError: if a name is malformed.
        """
        _check(name, tenant, b"")
        return self._states.get((space.fingerprint, tenant, name))

    def ensure(self, space: Space, tenant: str, name: str, salt: bytes) -> SessionState:
        """The session of this name, made if need be; another salt starts it afresh.

        Raises:
            ConfigError: if a name or the salt is malformed.
        """
        _check(name, tenant, salt)
        key = (space.fingerprint, tenant, name)
        state = self._states.get(key)
        if state is not None and state.salt != salt:
            self.destroy(state)
            state = None
        if state is None:
            state = self._states[key] = SessionState(name, tenant, space, salt)
            self._core.spaces[space.fingerprint] = space
        return state

    def greet_exact(self, state: SessionState) -> None:
        """Warn, once, where a session that takes no lossy copies will never find anything."""
        if self._in_vain:
            self._in_vain = False
            _log.warning(
                "session %r is exact, but every tier has a lossy codec: what it stores is a miss "
                "to it. Open it with fidelity='lossy', or leave one tier a lossless codec",
                state.id,
            )

    def clear(self, state: SessionState) -> None:
        """Drop a session's history, references and private tail. Idempotent."""
        drops = self._core.decisions.forget(
            state.tail_parts(), EvictReason.REMOVED, self._core.clock()
        )
        state.tail = None
        state.lineage = []
        state.adopt(KeyChain(state.root, state.space.block_tokens), 0)
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
