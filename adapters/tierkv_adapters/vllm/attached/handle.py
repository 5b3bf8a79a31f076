"""Handles: an engine of vLLM that works in a manager's sessions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Self, overload

from tierkv.errors import AttachError, ConfigError
from tierkv_adapters.chat import GenerateResult, Token
from tierkv_adapters.vllm.attached.engines import vllm_config_of
from tierkv_adapters.vllm.attached.reporting import Status, status
from tierkv_adapters.vllm.attached.turns import Turn, Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tierkv.blocking import CacheManager

__all__ = ["AsyncHandle", "Handle", "TokenStream"]


class _Handle:
    """What handles of both kinds have; a context manager that detaches at its end."""

    def __init__(self, engine: Any, manager: CacheManager, tokenizer: Any) -> None:
        self.manager = manager
        self._engine = engine
        self._tokenizer = tokenizer
        self._attached = True
        model = getattr(vllm_config_of(engine), "model_config", None)
        self._has_tokenizer = not getattr(model, "skip_tokenizer_init", False)
        self._turns = Turns(manager, texts=self._has_tokenizer)
        manager.stats()  # is the engine there? What waited for it is done now

    def __repr__(self) -> str:
        state = "attached" if self._attached else "detached"
        return f"<vllm {type(self._engine).__name__}: {state}>"

    def status(self) -> Status:
        """How the engine and its store are doing; see :func:`tierkv_adapters.vllm.status`."""
        return status(self._engine)

    def detach(self) -> None:
        """Take no further requests. Idempotent; the engine goes on storing and loading."""
        self._attached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _check(self) -> None:
        if not self._attached:
            raise AttachError("this handle was detached: attach the engine again")


class Handle(_Handle):
    """An ``LLM`` or ``LLMEngine`` attached to a manager.

    Calls of several threads wait for each other, as the engine answers one caller at a time; put
    what may run at once into one call with ``sessions=``.
    """

    def __init__(self, engine: Any, manager: CacheManager, tokenizer: Any) -> None:
        super().__init__(engine, manager, tokenizer)
        self._core = getattr(engine, "llm_engine", engine)
        self._turn_of_engine = threading.Lock()

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        sessions: None = None,
        chat: bool = False,
        append: bool | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> GenerateResult: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str | Sequence[int]],
        *,
        session: None = None,
        sessions: Sequence[str],
        chat: bool = False,
        append: bool | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> list[GenerateResult]: ...
    def generate(
        self,
        prompt: Any,
        *,
        session: str | None = None,
        sessions: Sequence[str] | None = None,
        chat: bool = False,
        append: bool | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> GenerateResult | list[GenerateResult]:
        """Answer a prompt in a session of the manager, or several in as many sessions at once.

        Args:
            prompt: New text, or token ids; with ``sessions``, one for each of them.
            session: Session to continue; None takes the one that ``use_session`` made current.
            sessions: For several prompts: the session of each. They run in one batch.
            chat: Wrap text as one user turn in the tokenizer's chat template.
            append: Whether the prompt follows the session's history. None: text does, token ids
                are the whole prompt.
            lora_request: vLLM's ``LoRARequest``.
            **sampling: Fields of ``SamplingParams``; ``max_new_tokens`` and ``do_sample=False``
                are understood, too.

        Raises:
            ConfigError: if no session is named or current, or there is none of that name.
            AttachError: for what is not supported, after :meth:`detach`, or if the engine has
                requests of others under way.

        A KeyboardInterrupt aborts the requests; their sessions are as before.
        """
        self._check()
        single = sessions is None
        names = [self._turns.named(session)] if sessions is None else list(sessions)
        prompts = [prompt] if single else list(prompt)
        if session is not None and not single:
            raise ConfigError("session= and sessions=: give one of them")
        if len(names) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts for {len(names)} sessions")
        if len(set(names)) != len(names):
            raise ConfigError(
                "a session is named twice: its turns follow each other, so they are not one batch"
            )
        with self._turn_of_engine:
            tokenizer = self._own_tokenizer(prompts)
            turns = [
                self._turns.begin(one, name, tokenizer, sampling, chat=chat, append=append)
                for one, name in zip(prompts, names, strict=True)
            ]
            outputs = self._run(turns, lora_request)
            results = [self._turns.end(turn, outputs[turn.id]) for turn in turns]
        return results[0] if single else results

    def _own_tokenizer(self, prompts: Sequence[Any]) -> Any:
        wanted = self._has_tokenizer and any(isinstance(prompt, str) for prompt in prompts)
        if self._tokenizer is None and wanted:
            self._tokenizer = self._core.get_tokenizer()
        return self._tokenizer

    def _run(self, turns: Sequence[Turn], lora_request: Any) -> dict[str, Any]:
        """Step the engine until all of these are answered."""
        core = self._core
        if core.has_unfinished_requests():
            raise AttachError(
                "the engine has requests under way that are not this handle's: step them to their "
                "end first"
            )
        waiting = {turn.id: turn for turn in turns}
        finished: dict[str, Any] = {}
        begun = time.perf_counter()
        try:
            for turn in turns:
                core.add_request(turn.id, turn.prompt, turn.params, lora_request=lora_request)
            while core.has_unfinished_requests():
                for output in core.step():
                    answered = waiting.get(output.request_id)
                    if answered is None:
                        continue
                    if answered.ttft_s is None and output.outputs[0].token_ids:
                        answered.ttft_s = time.perf_counter() - begun
                    if output.finished:
                        finished[output.request_id] = output
        except BaseException:
            with contextlib.suppress(Exception):  # the error that is on its way says more
                core.abort_request([turn.id for turn in turns if turn.id not in finished])
            raise
        missing = [turn.id for turn in turns if turn.id not in finished]
        if missing:
            raise AttachError(f"vLLM did not answer {len(missing)} of {len(turns)} requests")
        return finished


class TokenStream:
    """``async for token in kv.stream(...)``; leaving the loop early aborts the request.

    Attributes:
        result: The whole reply, once the iteration is over.
    """

    def __init__(self, tokens: AsyncIterator[Token | GenerateResult]) -> None:
        self.result: GenerateResult | None = None
        self._tokens = tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        token = await anext(self._tokens)
        if isinstance(token, GenerateResult):
            self.result = token
            raise StopAsyncIteration
        return token

    async def aclose(self) -> None:
        """Abort the request, if it is not over; the session is as before then. Idempotent."""
        close = getattr(self._tokens, "aclose", None)
        if close is not None:
            await close()


class AsyncHandle(_Handle):
    """An ``AsyncLLM`` attached to a manager. Turns of one session wait for each other."""

    def __init__(self, engine: Any, manager: CacheManager, tokenizer: Any) -> None:
        super().__init__(engine, manager, tokenizer)
        self._busy: dict[str, tuple[asyncio.Lock, int]] = {}

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        chat: bool = False,
        append: bool | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> GenerateResult:
        """Answer a prompt in a session of the manager; see :meth:`Handle.generate`.

        Cancellation: the request is aborted; the session is as before.
        """
        stream = self.stream(
            prompt,
            session=session,
            chat=chat,
            append=append,
            lora_request=lora_request,
            **sampling,
        )
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
        assert stream.result is not None
        return stream.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        session: str | None = None,
        chat: bool = False,
        append: bool | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> TokenStream:
        """As :meth:`generate`, token by token."""
        self._check()
        name = self._turns.named(session)
        return TokenStream(self._stream(prompt, name, chat, append, lora_request, sampling))

    async def _stream(
        self,
        prompt: str | Sequence[int],
        name: str,
        chat: bool,
        append: bool | None,
        lora_request: Any,
        sampling: dict[str, Any],
    ) -> AsyncIterator[Token | GenerateResult]:
        begun = time.perf_counter()
        if self._tokenizer is None and self._has_tokenizer and isinstance(prompt, str):
            self._tokenizer = await _awaited(self._engine.get_tokenizer())
        async with self._session(name):
            turn = self._turns.begin(
                prompt, name, self._tokenizer, sampling, chat=chat, append=append
            )
            seen, shown, output = 0, 0, None
            answers = self._engine.generate(
                turn.prompt, turn.params, turn.id, lora_request=lora_request
            )
            async with contextlib.aclosing(answers):
                async for output in answers:
                    reply = output.outputs[0]
                    if turn.ttft_s is None and reply.token_ids:
                        turn.ttft_s = time.perf_counter() - begun
                    text = reply.text or ""
                    new = reply.token_ids[seen:]
                    for place, token in enumerate(new, 1):
                        last = place == len(new)  # text comes with the last of several tokens
                        yield Token(token, text[shown:] if last else "")
                    seen, shown = len(reply.token_ids), len(text) if new else shown
            yield self._turns.end(turn, output)

    @contextlib.asynccontextmanager
    async def _session(self, name: str) -> AsyncIterator[None]:
        """Wait for the turn of a session."""
        lock, waiting = self._busy.get(name) or (asyncio.Lock(), 0)
        self._busy[name] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._busy[name]
            if waiting == 1:
                del self._busy[name]
            else:
                self._busy[name] = lock, waiting - 1


async def _awaited(value: Any) -> Any:
    """VLLM gives the tokenizer at once or by a coroutine, as its versions go."""
    return await value if hasattr(value, "__await__") else value
