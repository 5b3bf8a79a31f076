"""The session handle: what ``async with engine.session(id) as session`` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import ConfigError
from tierkv.mover.slices import sliced
from tierkv.session.base import Handle
from tierkv.session.batches import StoreRequest, store_many
from tierkv.session.explaining import BlockReport, explain, explain_in_slices
from tierkv.session.layerwise import LayerStore
from tierkv.session.leased import make_query
from tierkv.session.match import Match
from tierkv.session.nowait import get_nowait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Event, View
    from tierkv.blocks import BlockKey, Media
    from tierkv.mover.behind import FlushResult
    from tierkv.session.saving import StoreResult
    from tierkv.session.table import SessionInfo
    from tierkv.workers import Job

__all__ = ["Session"]


class Session(Handle):
    """A handle on a session; open it with ``async with``.

    Several handles (and tasks) may share one session: its history is common, and turns on it
    run one after the other. Tasks that share one handle share its turn. Leaving deletes nothing;
    :meth:`destroy` does.
    """

    def match(
        self, token_ids: Sequence[int], *, media: Sequence[Media] = (), start: int = 0
    ) -> Match:
        """The longest loadable prefix of a prompt, leased: ``async with session.match(ids)``.

        Args:
            token_ids: All tokens of the prompt, from the first.
            media: Content behind placeholder tokens.
            start: First token that is asked for, the first one of a block (or the end of the
                prompt): what is before it is in place already, its windows and states, too, and
                need not be stored anywhere. Blocks of it that are stored count as used.

        Raises:
            LayoutError: if no block begins at ``start``.
        """
        return Match(self, token_ids, media, start)

    async def store(
        self,
        token_ids: Sequence[int],
        kv: View,
        start: int = 0,
        *,
        tail: bool = False,
        media: Sequence[Media] = (),
        ready: Event | None = None,
        gathered: Callable[[], object] | None = None,
    ) -> StoreResult:
        """Store the full blocks of ``token_ids`` whose KV is in ``kv``.

        Args:
            token_ids: All tokens whose KV is in the view, from the first.
            kv: The KV; index 0 is token 0.
            start: First token that needs storing; rounded down to a block. Where this session is
                ``"lossy"`` and neither stored nor loaded what is before it, what is stored counts
                as derived: it may have been computed behind lossy KV.
            tail: Whether the partial block at the end is kept too, privately to this session,
                until its next such store.
            media: Content behind placeholder tokens.
            ready: Event of the view's device (:class:`tierkv.abc.Event`) behind the work that
                fills the view. None: whatever was submitted on the current stream of the thread
                that runs this; a model that runs in another thread, on a stream of its own,
                records one there.
            gathered: Called, on the loop, once no thread and no device reads the view any more: a
                tier that is a medium is written afterwards, from the engine's own memory. Exactly
                once, also if this raises. It must not raise. A part that a tier fails to write
                after that is skipped: the KV is gone that the next one would take.

        Returns:
            Per block: stored, present, or skipped and why. The tensors may be overwritten now.

        Raises:
            ClosedError: if the session or engine is closed.
            LayoutError: if the view does not fit the layout, or does not hold these tokens.

        Blocks before ``start`` that have gone meanwhile are stored again, since those behind them
        would be of no use.

        Cancellation: blocks published so far stay, and those that are being written to a medium
        become visible later; the rest is as if never stored. At most one slice (32 MiB) of a gather
        is waited for, and copies of a device that are under way.
        """
        request = StoreRequest(self, token_ids, kv, start, tail, media, ready, gathered)
        return (await store_many(self.runtime, [request]))[0]

    def store_layers(
        self,
        token_ids: Sequence[int],
        kv: View,
        start: int = 0,
        *,
        media: Sequence[Media] = (),
    ) -> LayerStore:
        """Store while the model computes, layer by layer.

        ::

            async with session.store_layers(token_ids, kv, start=loaded.tokens) as saver:
                for layer in range(layers):
                    compute(layer)  # writes the KV of this layer into the view
                    await saver.layer(layer)
            print(saver.result)

        Each call copies that layer of every new block into engine memory, so that at the end
        there is little left to do; where a device holds the view, it only submits the copies. All
        blocks become visible when the block is left, and none if it is left by an exception or
        before each layer came. In the tier itself memory is taken for all new blocks that have
        room there; for a tier that is written (``nvme``, ``file``) or a codec chain, a window of
        staging memory bounds what is copied ahead (``saver.ahead_bytes``), and the rest is
        gathered at the end. Other sessions find those blocks in flight meanwhile and do not store
        them.

        Args:
            token_ids: All tokens whose KV will be in the view, from the first.
            kv: The KV; index 0 is token 0. It must stay as it is until the block is left.
            start: First token that needs storing; rounded down to a block.
            media: Content behind placeholder tokens.

        Raises:
            ClosedError: (on entering) if the session or engine is closed.
            LayoutError: (on entering) if the view does not fit the layout.
            StoreIncomplete: (on leaving) if a layer never came. An exception out of the block
                wins.

        Cancellation: nothing is stored; it waits until no thread and no device reads the view.
        """
        return LayerStore(self, token_ids, kv, start, media)

    get_nowait = get_nowait  # bound as it is: one call more would be a tenth of its cost

    async def flush(self) -> FlushResult:
        """Make the session's parts durable, as far as there are tiers for it.

        Returns:
            How many parts would survive a crash now, and how many would not: also those that it
            was asked to store and that no tier took or kept.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        self.check_open()
        wanted = [part async for part in sliced(self.state.wanted(self.runtime.core))]
        return await self.runtime.behind.flush(wanted)

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
        state.adopt(self.state.chain.fork(), 0)
        state.kept = self.state.kept
        state.ttl = self.state.ttl
        branch = Session(
            self.runtime,
            self._table,
            state,
            ttl=self._ttl,
            fidelity="lossy" if self.lossy else "exact",
            quota=self.quota,
        )
        branch.lineage = list(self.behind)
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

    def explain(
        self, token_ids: Sequence[int] | None = None, *, media: Sequence[Media] = ()
    ) -> list[BlockReport]:
        """Tell, per block of a prompt, where it is or why it is nowhere. Changes nothing.

        It takes some 10 us a block, on the loop: see :meth:`aexplain` for long prompts.

        Args:
            token_ids: The prompt; None takes the session's history.
            media: Content behind placeholder tokens of the prompt; the history has its own.
        """
        return explain(self.runtime.core, self.state, token_ids, media, lossy=self.lossy)

    async def aexplain(
        self, token_ids: Sequence[int] | None = None, *, media: Sequence[Media] = ()
    ) -> list[BlockReport]:
        """As :meth:`explain`, in slices between which the loop goes on."""
        core = self.runtime.core
        return await explain_in_slices(core, self.state, token_ids, media, lossy=self.lossy)
