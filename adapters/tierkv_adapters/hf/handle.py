"""``attach``: a model and a store, joined without touching the model.

::

    kv = hf.attach(model, engine, tokenizer=tokenizer)
    reply = await kv.generate("Write quicksort in Python.", session="chat-42")
    async with kv.stream("Now in Rust.", session="chat-42") as tokens:
        async for token in tokens:
            print(token.text, end="")
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Self, overload

from tierkv.blocking import CacheManager
from tierkv.engine import Engine
from tierkv.errors import AttachError, ClosedError, ConfigError
from tierkv_adapters.hf.attachment import Attachment
from tierkv_adapters.hf.stream import SyncTokenStream, TokenStream
from tierkv_adapters.hf.turn import Request, absorb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.session import Session
    from tierkv_adapters.chat.result import GenerateResult
    from tierkv_adapters.hf.attachment import Opener
    from tierkv_adapters.hf.result import Status
    from tierkv_adapters.hf.stream import Begin, Started
    from tierkv_adapters.hf.turn import Bound

__all__ = ["AsyncHandle", "SyncHandle", "attach"]


@overload
def attach(model: Any, target: Engine, tokenizer: Any = None) -> AsyncHandle: ...
@overload
def attach(model: Any, target: CacheManager, tokenizer: Any = None) -> SyncHandle: ...
def attach(
    model: Any, target: Engine | CacheManager, tokenizer: Any = None
) -> AsyncHandle | SyncHandle:
    """Attach a Transformers model to a store.

    Nothing is patched: the model gets a cache object with each call, and is as before when the
    handle is detached. Several models may be attached to one store, and one model to several.

    Args:
        model: A decoder-only Transformers model in evaluation mode, PEFT-wrapped or not.
        target: An open engine (``generate`` is then async) or manager (then it is not). A
            manager binds the model's space at once, which reads all weights.
        tokenizer: Needed for prompts in text, and for replies in text.

    Raises:
        AttachError: if this model cannot be served rightly (says why), or ``target`` is neither.
        ClosedError: if ``target`` is not open.
    """
    # the parts that differ per target are all in the two handles below
    if isinstance(target, Engine):
        if target.core.closed:  # not opened at all: ``core`` says so itself
            raise ClosedError("this engine is closed: attach to an open one")
        return AsyncHandle(model, target, tokenizer)
    if isinstance(target, CacheManager):
        return SyncHandle(model, target, tokenizer)
    raise AttachError(f"attach takes an Engine or a CacheManager, not {type(target).__name__}")


def _nothing(*_: object) -> None:
    """For callers that want neither single tokens nor a call at the end."""


class _Handle:
    """What does not depend on whether the caller has an event loop."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def status(self) -> Status:
        """How the attachment is doing."""
        return self._attachment.status()

    def refresh(self) -> None:
        """Read the weights again at the next request: needed after edits through ``.data``."""
        self._attachment.refresh()

    def detach(self) -> None:
        """Take no further requests. Idempotent; requests under way go on."""
        self._attachment.attached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


class AsyncHandle(_Handle):
    """A model attached to an engine; a context manager that detaches at its end."""

    def __init__(self, model: Any, engine: Engine, tokenizer: Any) -> None:
        super().__init__(Attachment(model, tokenizer, engine.config.block_tokens))
        self._engine = engine

    def __repr__(self) -> str:
        return f"<hf {type(self._attachment.model).__name__}: {self.status()}>"

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        tenant: str = "",
        salt: bytes = b"",
        ttl: float | str | None = None,
        fidelity: str = "exact",
        chat: bool = False,
        append: bool | None = None,
        **arguments: Any,
    ) -> GenerateResult:
        """Answer a prompt; what the store holds of it is loaded instead of computed.

        Args:
            prompt: New text, or token ids (a sequence or a tensor of one row).
            session: Session whose history is continued; None uses no history and leaves none.
            tenant: Whose it is; tenants never share blocks.
            salt: Further secret that blocks must share to be reused.
            ttl: How long the session's blocks live after their last use, e.g. ``"6h"``.
            fidelity: ``"exact"``, or ``"lossy"`` if lossy copies are welcome.
            chat: Wrap text as one user turn in the tokenizer's chat template.
            append: Whether the prompt follows the session's history. None: text does, token ids
                are the whole prompt.
            **arguments: For Transformers' ``generate``: ``max_new_tokens``, ``do_sample``, ...

        Raises:
            AttachError: for what is not supported (batches, beams, assisted decoding), or after
                :meth:`detach`.
            SessionBusyError: if the engine refuses a second turn on a busy session.
            ClosedError: if the engine is closed.

        Cancellation: the model stops at its next layer, then the cancellation is re-raised; the
        session's history is as before the call.
        """
        opener = self._opener(session, tenant=tenant, salt=salt, ttl=ttl, fidelity=fidelity)
        request = Request(prompt, arguments, chat, append)
        begin = self._begin(session, opener, request)
        turn, job = begin(_nothing, _nothing)
        return await absorb(job, turn.stop)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        tenant: str = "",
        salt: bytes = b"",
        ttl: float | str | None = None,
        fidelity: str = "exact",
        chat: bool = False,
        append: bool | None = None,
        **arguments: Any,
    ) -> TokenStream:
        """As :meth:`generate`, token by token: ``async with kv.stream(...) as tokens``.

        Leaving the block early stops the model and leaves the session's history as it was.
        """
        opener = self._opener(session, tenant=tenant, salt=salt, ttl=ttl, fidelity=fidelity)
        request = Request(prompt, arguments, chat, append)
        return TokenStream(self._begin(session, opener, request), self._attachment.tokenizer)

    def _begin(self, session: str | None, opener: Opener, request: Request) -> Begin:
        self._attachment.check(request.arguments)

        def begin(emit: Callable[[int], None], done: Callable[[], None]) -> Started:
            return self._attachment.start(
                self._engine, opener, request, forget=session is None, emit=emit, done=done
            )

        return begin

    def _opener(self, session: str | None, **options: Any) -> Opener:
        name = session if session is not None else f"once-{uuid.uuid4()}"

        def open_session(bound: Bound) -> Session:
            return self._engine.session(name, space=bound.space, **options)

        return open_session


class SyncHandle(_Handle):
    """A model attached to a manager; a context manager that detaches at its end.

    Tenant, salt, time to live and fidelity are those that the session was created with.
    """

    def __init__(self, model: Any, manager: CacheManager, tokenizer: Any) -> None:
        _ = manager.engine  # not open: said now, not at the first request
        super().__init__(Attachment(model, tokenizer, manager.config.block_tokens))
        self._manager = manager
        manager.bind(self._attachment.bind().space)

    def __repr__(self) -> str:
        return f"<hf {type(self._attachment.model).__name__}: {self.status()}>"

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        chat: bool = False,
        append: bool | None = None,
        **arguments: Any,
    ) -> GenerateResult:
        """Answer a prompt in a session of the manager; see :meth:`AsyncHandle.generate`.

        Args:
            prompt: New text, or token ids (a sequence or a tensor of one row).
            session: Session to continue; None takes the one that ``use_session`` made current.
            chat: Wrap text as one user turn in the tokenizer's chat template.
            append: Whether the prompt follows the session's history. None: text does, token ids
                are the whole prompt.
            **arguments: For Transformers' ``generate``.

        Raises:
            ConfigError: if no session is named or current, or there is none of that name.
            AttachError: for what is not supported, or after :meth:`detach`.

        A KeyboardInterrupt stops the model at its next layer.
        """
        begin = self._begin(session, Request(prompt, arguments, chat, append))
        with SyncTokenStream(self._manager, begin, None) as tokens:
            for _ in tokens:
                pass
        assert tokens.result is not None
        return tokens.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        chat: bool = False,
        append: bool | None = None,
        **arguments: Any,
    ) -> SyncTokenStream:
        """As :meth:`generate`, token by token: ``with kv.stream(...) as tokens``."""
        begin = self._begin(session, Request(prompt, arguments, chat, append))
        return SyncTokenStream(self._manager, begin, self._attachment.tokenizer)

    def _begin(self, session: str | None, request: Request) -> Begin:
        name = session if session is not None else self._manager.current_session()
        if name is None:
            raise ConfigError(
                "no session is current: name session=, or call this inside "
                "'with manager.use_session(id)'"
            )
        self._attachment.check(request.arguments)
        manager = self._manager

        def open_session(bound: Bound) -> Session:
            manager.bind(bound.space)  # new weights or adapters make a new space
            return manager.handle(name, bound.space)

        def begin(emit: Callable[[int], None], done: Callable[[], None]) -> Started:
            return self._attachment.start(
                manager.engine, open_session, request, forget=False, emit=emit, done=done
            )

        return begin
