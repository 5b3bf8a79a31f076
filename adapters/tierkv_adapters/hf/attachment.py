"""What every handle shares: the model, its identity now, its counters, and how turns begin."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tierkv.errors import AttachError
from tierkv.layout import Space
from tierkv_adapters.hf.arguments import check_arguments
from tierkv_adapters.hf.fingerprint import ModelIdentity
from tierkv_adapters.hf.probe import check_supported, layout_of, probe_layers
from tierkv_adapters.hf.result import Status
from tierkv_adapters.hf.stream import Started
from tierkv_adapters.hf.turn import Bound, Counters, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import Identity
    from tierkv.engine import Engine
    from tierkv.session import Session
    from tierkv_adapters.chat.result import GenerateResult
    from tierkv_adapters.hf.turn import Request

__all__ = ["Attachment", "Opener"]

if TYPE_CHECKING:
    Opener = Callable[[Bound], Session]


def _configured(identity: Identity) -> list[tuple[str, str]]:
    """What a model's cache is made after; hooks and adapters come and go without changing it."""
    return [fact for fact in identity.extra if fact[0] != "patches"]


class Attachment:
    """One model joined to one store. Handles of both kinds are thin faces of it."""

    def __init__(self, model: Any, tokenizer: Any, block_tokens: int) -> None:
        check_supported(model)
        self.model = model
        self.tokenizer = tokenizer
        self.attached = True
        self._block_tokens = block_tokens
        self._counters = Counters()
        self._identity = ModelIdentity(model)
        self._lock = threading.Lock()
        self._bound: tuple[int, Bound] | None = None

    def bind(self) -> Bound:
        """Space and KV shape of the model as it is now.

        Milliseconds if nothing changed; else it reads all changed weights and runs one token
        through the model: call it in a worker thread.

        Raises:
            AttachError: if the model cannot be served (any more).
        """
        with self._lock:
            identity = self._identity()
            known = self._bound
            now = self._identity.readings, _configured(identity)
            if known is None or (known[0], _configured(known[1].space.identity)) != now:
                layers = probe_layers(self.model)
            else:
                layers = known[1].layers
            space = Space(identity, layout_of(layers), self._block_tokens)
            bound = Bound(space, layers)
            self._bound = self._identity.readings, bound
            return bound

    def unchanged(self, bound: Bound) -> bool:
        """Whether the model still is what ``bound`` says; costs as :meth:`bind`, without a run."""
        with self._lock:
            try:
                return self._identity() == bound.space.identity
            except AttachError:
                return False

    def refresh(self) -> None:
        """Read the weights again at the next request."""
        with self._lock:
            self._identity.refresh()

    def check(self, arguments: dict[str, Any]) -> None:
        """Refuse what cannot be served, and count the rest.

        Raises:
            AttachError: with what to do instead.
        """
        if not self.attached:
            raise AttachError("this handle was detached: attach the model again")
        check_supported(self.model)
        check_arguments(self.model, arguments)
        self._counters.requests += 1

    def start(
        self,
        engine: Engine,
        opener: Opener,
        request: Request,
        *,
        forget: bool,
        emit: Callable[[int], None],
        done: Callable[[], None],
    ) -> Started:
        """Start a turn as engine-owned work; on the engine's loop.

        Args:
            engine: Where it runs.
            opener: Opens the session in the space that the model has now.
            request: What is asked.
            forget: Whether the session is destroyed afterwards.
            emit: Called with each new token, in the model's thread.
            done: Called at the end, on the loop.
        """
        tiers = [tier.name for tier in engine.config.tiers]
        counters, still = self._counters, self.unchanged
        turn = Turn(self.model, self.tokenizer, engine.workers, tiers, counters, emit, still)

        async def job() -> GenerateResult:
            try:
                bound = await engine.workers.run_long(self.bind)
                session = opener(bound)
                try:
                    return await turn.run(session, bound, request)
                finally:
                    if forget:
                        session.destroy()
            finally:
                done()

        return Started(turn, engine.workers.spawn(job, name="hf-turn"))

    def status(self) -> Status:
        """Snapshot of the counters."""
        counters = self._counters
        reason = None
        if not counters.requests:
            reason = "no request yet"
        elif not counters.stored:
            reason = f"nothing stored: {counters.why_not_stored or 'all blocks were there'}"
        elif not counters.reused:
            reason = f"nothing reused: {counters.why_not_reused}"
        return Status(
            attached=self.attached,
            requests_seen=counters.requests,
            blocks_stored=counters.stored,
            blocks_reused=counters.reused,
            restores_failed=counters.restores_failed,
            stores_failed=counters.stores_failed,
            reason=reason,
        )
