"""``CacheManager``: an engine for callers that have threads instead of a loop."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tierkv.blocking.control import Control
from tierkv.chains import parse_chains
from tierkv.config import engine_chains, load_config
from tierkv.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Backend, Observer, View
    from tierkv.blocks import Media
    from tierkv.layout import Space
    from tierkv.session import LoadResult, StoreResult

__all__ = ["CacheManager"]


class CacheManager(Control):
    """An engine for synchronous callers: ``with CacheManager(tiers=[...]) as manager``.

    Thread-safe; no lock is held while bytes move. A forked child needs a manager of its own.
    Close it: what is still queued for a slower tier when the interpreter exits is not written.

    Args:
        source: TOML file, mapping or :class:`~tierkv.config.EngineConfig`, as for
            :func:`tierkv.open`.
        space: Space of the sessions; an adapter binds it when it attaches.
        backends: Ready backends for the tiers, instead of making them by kind.
        observer: Who hears what happens, instead of the metrics.
        **settings: Fields of :class:`~tierkv.config.EngineConfig`, e.g. ``name``, ``tiers``,
            ``policy``, ``compression``, ``block_tokens``, ``metrics``, ``metrics_port``.

    Raises:
        ConfigError: if a setting is unknown, malformed or cannot be honoured.

    Attributes:
        portable: Whether its configuration alone makes an engine like it, in any process.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        space: Space | None = None,
        backends: Sequence[Backend] | None = None,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        config = load_config(source, **settings).config
        chains = [parse_chains(chain) for chain in engine_chains(config)]
        # asking for lossy compression is the opt-in to reading it
        fidelity = "exact" if all(chain.lossless for chain in chains) else "lossy"
        super().__init__(Engine(config, backends=backends, observer=observer), space, fidelity)
        self.portable = backends is None and observer is None

    # ------------------------------------------------------------------ KV

    def load(
        self,
        token_ids: Sequence[int],
        into: View,
        *,
        start: int = 0,
        session: str | None = None,
        deadline: float | str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> LoadResult:
        """Match a prompt and load its prefix into a view; see :meth:`tierkv.session.Match.load`.

        Args:
            token_ids: All tokens of the prompt, from the first.
            into: Where token 0 onwards goes. It need back nothing before ``start`` with memory.
            start: First token to load, the first one of a block: what is before it is in place
                already; see :meth:`tierkv.session.Session.match`.
            session: Session it is for; None takes the current one.
            deadline: Seconds, or text such as ``"150ms"``, after which no block is waited for.
            space: Space to work in; None takes the only one bound.
            media: Content behind placeholder tokens.

        Returns:
            How many leading tokens are in place; ``reason`` also tells why no more was matched.

        Raises:
            ConfigError: if there is no such session, or no space to work in.
            LayoutError: if the view does not fit the layout, or no block begins at ``start``.
            ClosedError: if the manager is not open, or was handed over.
        """
        self._check_here()
        name, space = self._named(session), self.space(space)
        return self.call(self._load, name, space, token_ids, into, start, deadline, media)

    async def _load(
        self,
        name: str,
        space: Space,
        token_ids: Sequence[int],
        into: View,
        start: int,
        deadline: float | str | None,
        media: Sequence[Media],
    ) -> LoadResult:
        async with (
            self.handle(name, space) as session,
            session.match(token_ids, media=media, start=start) as match,
        ):
            loaded = await match.load(into, deadline=deadline)
            return dataclasses.replace(loaded, reason=loaded.reason or match.reason)

    def store(
        self,
        token_ids: Sequence[int],
        kv: View,
        start: int = 0,
        *,
        tail: bool = False,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> StoreResult:
        """Store the blocks of a prompt; see :meth:`tierkv.session.Session.store`.

        Args:
            token_ids: All tokens whose KV is in the view, from the first.
            kv: The KV; index 0 is token 0. It may be overwritten once this returns.
            start: First token that needs storing; rounded down to a block.
            tail: Whether the partial block at the end is kept too, privately to the session.
            session: Session it is for; None takes the current one.
            space: Space to work in; None takes the only one bound.
            media: Content behind placeholder tokens.

        Raises:
            ConfigError: if there is no such session, or no space to work in.
            LayoutError: if the view does not fit the layout, or does not hold these tokens.
            ClosedError: if the manager is not open, or was handed over.
        """
        self._check_here()
        name, space = self._named(session), self.space(space)
        return self.call(self._store, name, space, token_ids, kv, start, tail, media)

    async def _store(
        self,
        name: str,
        space: Space,
        token_ids: Sequence[int],
        kv: View,
        start: int,
        tail: bool,
        media: Sequence[Media],
    ) -> StoreResult:
        async with self.handle(name, space) as session:
            return await session.store(token_ids, kv, start, tail=tail, media=media)
