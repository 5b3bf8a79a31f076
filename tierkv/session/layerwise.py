"""Layer-wise stores: a session's KV is gathered while the model still computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import ClosedError, LayoutError, StoreIncomplete
from tierkv.mover.layering import Layering
from tierkv.session.batches import StoreRequest, checked, store_again
from tierkv.session.leased import follow
from tierkv.session.saving import finish_store, plan_store, source_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tierkv.abc import Event, View
    from tierkv.blocks import Media
    from tierkv.session.handle import Session
    from tierkv.session.saving import Saving, StoreResult

__all__ = ["LayerStore"]


class LayerStore:
    """A store that follows the model, layer by layer; see :meth:`Session.store_layers`.

    Entering waits for the session's turn and takes memory for the new blocks: in the first tier,
    or else a window of staging memory. Leaving publishes all blocks; leaving by an exception, or
    before each layer has come, stores nothing.

    Attributes:
        result: What became of each block, once it was left without an exception.
    """

    def __init__(
        self,
        session: Session,
        token_ids: Sequence[int],
        kv: View,
        start: int = 0,
        media: Sequence[Media] = (),
    ) -> None:
        self.result: StoreResult | None = None
        self._session = session
        self._request = StoreRequest(session, token_ids, kv, start, False, media)
        self._missing: set[int] = set()
        self._saving: Saving | None = None
        self._layering: Layering | None = None
        self._began = 0.0

    def __repr__(self) -> str:
        state = "open" if self._layering is not None else "closed"
        return f"<LayerStore {state}: {len(self._missing)} layers to come>"

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the frames that are filled layer by layer; the rest is gathered at the end."""
        return 0 if self._layering is None else self._layering.nbytes

    async def __aenter__(self) -> LayerStore:
        session, core = self._session, self._session.runtime.core
        if self._layering is not None or self.result is not None:
            raise ClosedError("a layer-wise store is used once: call store_layers() again")
        self._began = core.clock()
        request = self._request = checked(self._request)
        source = source_of(core, request.kv, request.ready)
        await session.begin_turn()
        try:
            chain, _ = await follow(session, request.token_ids, request.media)
            self._saving = plan_store(session, chain, source, request.start)
            layering = Layering(core, session.runtime.behind, self._saving.plan)
            try:
                await layering.begin()
            except BaseException:
                await layering.abandon()
                raise
        except BaseException:
            session.end_turn()
            raise
        self._layering = layering
        groups = session.space.layout.groups
        self._missing = {layer.index for group in groups for layer in group.layers}
        return self

    async def layer(self, index: int, *, ready: Event | None = None) -> None:
        """Gather one layer: its KV is in the view now, for all tokens.

        On a device this submits copies behind the work that the calling thread has submitted, and
        returns; it waits only while more than a window of copies is under way. A layer may come
        again: the last time counts.

        Args:
            index: Number of the model layer.
            ready: As in :meth:`Session.store`.

        Raises:
            ClosedError: if this is not open.
            LayoutError: if the space has no such layer, or the view does not fit.

        Cancellation: re-raised once no thread reads the view any more. The view has to stay as it
        is until this store is left: what had no memory is gathered at the end.
        """
        layering, session = self._layering, self._session
        if layering is None:
            raise ClosedError("this store is not open: use it inside its 'async with'")
        session.check_open()
        known = {layer.index for group in session.space.layout.groups for layer in group.layers}
        if index not in known:
            raise LayoutError(f"the layout has no layer {index!r}; it has {sorted(known)}")
        device = layering.plan.device
        if ready is None and device is not None:
            ready = device.current().record()
        await layering.gather(index, ready)
        self._missing.discard(index)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        layering, self._layering = self._layering, None
        if layering is None:
            return
        try:
            try:
                if error is None:
                    if self._missing:
                        raise StoreIncomplete(tuple(sorted(self._missing)))
                    self._session.check_open()
                    self.result = await self._finish(layering)
            finally:
                await layering.abandon()
        finally:
            self._session.end_turn()

    async def _finish(self, layering: Layering) -> StoreResult:
        session, saving = self._session, self._saving
        assert saving is not None
        core = session.runtime.core
        now = source_of(core, self._request.kv)
        fidelity = f"derived:{session.derived}" if session.derived else "exact"
        if fidelity != layering.plan.fidelity:
            # something lossy was loaded meanwhile: frames that claim otherwise must not appear
            await layering.abandon()
            chain, _ = await follow(session, self._request.token_ids, self._request.media)
            resets = saving.plan.resets
            saving = plan_store(session, chain, now, self._request.start)
            saving.plan.resets = resets
            layering = Layering(core, session.runtime.behind, saving.plan)
        saving.plan.ready = now.ready
        await layering.finish()
        savings = [saving]
        await store_again(session.runtime, [session], savings)
        result = await finish_store(session, savings[0])
        seconds = core.clock() - self._began
        core.observer.operation(op="store", tier=core.levels[0].name, seconds=seconds)
        return result
